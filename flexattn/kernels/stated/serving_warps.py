"""Paged decode's feasibility where each warp has a part of a tile for itself, in sympy.

A kernel's share of an SM's registers is a number here: paged_decode/config.py counts it, and tells
it to the compiler.
"""

from __future__ import annotations

from typing import Any

from sympy import And, Eq, Ne, Not, Or, Piecewise, floor, symbols

from flexattn.kernels.stated.statement import Inequality, Statement, Steps

# A config's numbers. Then truth values: whether tiles go round the programs, its split_policy is
# known, and parts are awaited.
_CONFIG = (
    BLOCK_M, BLOCK_N, num_warps, keys_per_warp, num_stages, per_sm, least,
    goes_round, known_policy, awaits,
) = symbols(
    "BLOCK_M BLOCK_N num_warps keys_per_warp num_stages per_sm least "
    "goes_round known_policy awaits"
)  # fmt: skip
# A form's sizes: bytes of an element of q and of the cache, rows of the longest request, 0 where
# lengths are given; then truth values: whether k and v are as q, there is a mask_mod, as
# ServingForm has them.
_FORM = (
    itemsize, kv_itemsize, qk_dim, v_dim, chunks, kv_heads, requests, rows, same_dtype, masked,
    aligned, shared_kv, prefix, offset,
) = symbols(
    "itemsize kv_itemsize qk_dim v_dim chunks kv_heads requests rows same_dtype masked "
    "aligned shared_kv prefix offset"
)  # fmt: skip
# interpreted: no device. programs: of a launch. thread_registers: of one thread, for as many
# programs of an SM.
_DEVICE = (interpreted, capability, programs, thread_registers) = symbols(
    "interpreted capability programs thread_registers"
)
_ESTIMATED = (held,) = symbols("held,")
# Of a thread's registers, what addresses and the loop take beside its tile.
_BESIDE = 40
# Operands of 16 bits, on their way from 8 into products: with none left for them, tiles spill.
WIDENED = 32

let = Steps()
kv_tiles = let("kv_tiles", floor(keys_per_warp * (qk_dim + v_dim) * kv_itemsize / 128))
widened = let("widened", Piecewise((WIDENED, Eq(kv_itemsize, 1)), (0, True)))
product_rows = let("product_rows", BLOCK_M * chunks)
scores = let("scores", floor(keys_per_warp * chunks * product_rows / 16))
q_and_output = let("q_and_output", floor(BLOCK_M * (floor(qk_dim / 2) + v_dim) / 32))
ends = let("ends", floor(requests / 32) * Piecewise((2, masked), (1, True)), "Of requests.")
_HELD = let.formula(
    "held",
    "Registers of a thread that hold a tile, K, V and Q in words, and the ends of requests.",
    kv_tiles + widened + scores + q_and_output + ends,
)


def _one_of(size: Any, among: tuple[int, ...]) -> Any:
    return Or(*(Eq(size, each) for each in among))


WARPS_STATEMENT = Statement(
    "paged decode where each warp has a part of a tile for itself",
    (*_CONFIG, *_FORM, *_DEVICE),
    estimated=_ESTIMATED,
    formulas=(_HELD,),
    fit=(
        Inequality(
            "arch",
            Or(interpreted, And(capability >= 80, capability <= 90)),
            "warp-private kernels run on NVIDIA's sm_80 to sm_90",
        ),
        Inequality(
            "rows",
            _one_of(BLOCK_M * chunks, (8, 16)),
            "BLOCK_M={BLOCK_M} is 8 or 16, where heads have 256 columns 4 or 8",
        ),
        Inequality("warps", _one_of(num_warps, (1, 2, 4, 8)), "num_warps is 1, 2, 4 or 8"),
        Inequality(
            "keys",
            _one_of(keys_per_warp * chunks, (16, 32, 64)),
            "each warp has {keys_per_warp} of 16, 32 or 64 keys, of 256 columns half of them",
        ),
        Inequality(
            "keys", Eq(BLOCK_N, keys_per_warp * num_warps), "warps have equal shares of BLOCK_N"
        ),
        Inequality(
            "stages", Eq(num_stages, 1), "num_stages is 1: a warp holds one tile of K and V"
        ),
        Inequality("programs", And(per_sm >= 1, least >= 1), "per_sm and least are at least 1"),
        Inequality(
            "merge",
            Or(interpreted, Eq(BLOCK_M * chunks, 8), num_warps >= 4),
            "fewer than 4 warps have no registers to merge 16 rows, or 8 of 256 columns",
        ),
        Inequality(
            "split_policy", known_policy, "split_policy={split_policy!r} is heads or round"
        ),
        Inequality("combine", awaits, "parts are awaited where tiles are split by heads or round"),
        Inequality(
            "dtype",
            And(Eq(itemsize, 2), Or(Eq(kv_itemsize, 1), same_dtype)),
            "q has 16 bits, K and V are as q or have 8",
        ),
        Inequality(
            "dtype",
            Or(Ne(kv_itemsize, 1), interpreted, capability >= 89),
            "K and V of 8 bits are widened by instructions of sm_89 and newer",
        ),
        Inequality(
            "head dimension",
            And(
                _one_of(qk_dim, (64 * chunks, 128 * chunks)),
                _one_of(v_dim, (64 * chunks, 128 * chunks)),
            ),
            "head dimensions ({qk_dim}, {v_dim}) are 64 or 128, or 128 or 256",
        ),
        Inequality(
            "merge",
            num_warps * 128 >= v_dim,
            "one warp has too few threads to merge rows of 256 values",
        ),
        Inequality(
            "layout",
            And(aligned, Not(shared_kv)),
            "K and V are apart, and aligned to 16 bytes",
        ),
        Inequality(
            "requests",
            And(Not(prefix), requests <= 1024),
            "of at most 1024 requests, no shared prefix",
        ),
        Inequality(
            "registers",
            Or(interpreted, held + _BESIDE <= thread_registers),
            "{held} registers hold a thread's K, V, Q, scores and output",
        ),
        Inequality(
            "heads", kv_heads <= programs, "{kv_heads} KV heads have programs of their own"
        ),
        # Where a program's first tile lies then says nothing of a length.
        Inequality(
            "round",
            Or(
                Not(goes_round),
                And(Eq(requests, 1), rows > 0, rows <= BLOCK_M, Not(offset)),
            ),
            "tiles of one request and one tile of rows go round",
        ),
    ),
)
