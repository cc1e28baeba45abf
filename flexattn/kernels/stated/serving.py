"""Paged decode's feasibility where all warps of a program share a tile, in sympy.

The bytes of shared memory are a number here: paged_decode/config.py counts them, also for the
kernel.
"""

from __future__ import annotations

from typing import Any

from sympy import And, Eq, Mod, Not, Or, Symbol, symbols

from flexattn.kernels.stated.statement import Inequality, Statement, Steps

# A config's numbers; whether its words of who merges parts say "await", or anything that there is.
_CONFIG = (BLOCK_M, BLOCK_N, num_warps, num_stages, per_sm, least, awaits, known_combine) = (
    symbols("BLOCK_M BLOCK_N num_warps num_stages per_sm least awaits known_combine")
)
# Columns of V as tiles hold them, bytes of shared memory that the kernel needs and may have,
# registers of a thread.
_LIMITS = (v_padded, shared_memory, shared_limit, max_registers) = symbols(
    "v_padded shared_memory shared_limit max_registers"
)
_ESTIMATED = (accumulators,) = symbols("accumulators,")
# Of a thread's registers, what does not accumulate.
OTHERS = 55

let = Steps()
ACCUMULATORS = let.formula(
    "accumulators", "Numbers of a tile that registers add up.", BLOCK_M * (v_padded + BLOCK_N)
)


def _tile(size: Symbol) -> Inequality:
    powers: Any = And(size >= 16, Eq(Mod(2**16, size), 0))
    words = f"{size.name}={{{size.name}}} is no power of two of at least 16"
    return Inequality("power of two", powers, words)


PROGRAMS_STATEMENT = Statement(
    "paged decode where all warps of a program share a tile",
    (*_CONFIG, *_LIMITS),
    estimated=_ESTIMATED,
    formulas=(ACCUMULATORS,),
    fit=(
        Inequality(
            "combine",
            Not(awaits),
            "parts are awaited where tiles are split by heads or round",
        ),
        Inequality(
            "combine",
            known_combine,
            "combine={combine!r} is one of last, launch, dependent, await",
        ),
        _tile(BLOCK_M),
        _tile(BLOCK_N),
        Inequality(
            "warps",
            And(Or(*(Eq(num_warps, each) for each in (1, 2, 4, 8))), num_stages >= 1),
            "num_warps is 1, 2, 4 or 8, and num_stages at least 1",
        ),
        Inequality("programs", And(per_sm >= 1, least >= 1), "per_sm and least are at least 1"),
        Inequality(
            "shared memory",
            shared_memory <= shared_limit,
            "tiles need about {shared_memory} of {shared_limit} bytes of shared memory",
        ),
        Inequality(
            "registers",
            accumulators <= 32 * num_warps * (max_registers - OTHERS),
            "{accumulators} accumulators do not fit {num_warps} warps' registers",
        ),
    ),
)
