"""Feasibility, stated once: inequalities over a config, a problem and a device, with their words.

Symbols: flexattn/space/terms.py, and here two more for what flexattn/space/estimates.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sympy import And, Basic, Eq, Max, Mod, Not, Or, lambdify, symbols

from flexattn.device import Device
from flexattn.problem import Structure
from flexattn.space.config import Config, describe
from flexattn.space.estimates import estimated
from flexattn.space.terms import (
    BLOCK_M,
    BLOCK_N,
    NAMES,
    SYMBOLS,
    decodes,
    dense_layout,
    has_tma,
    keys_cover,
    known_order,
    mask_keys,
    mask_rows,
    num_splits,
    num_stages,
    num_warps,
    numbers,
    qk_padded,
    qk_tiles,
    rows_cover,
    shared_limit,
    sm_registers,
    thread_registers,
    use_tma,
    v_padded,
    v_tiles,
    warp_size,
)

__all__ = ["RULES", "WORTH", "Rule", "reasons", "unpromising", "violated"]

shared_memory, registers = ESTIMATED = symbols("shared_memory registers")


@dataclass(frozen=True)
class Rule:
    """One condition: a short name that reports count by, the inequality, and what to say.

    says: a format string over the symbols' names, and `device`, `arch` and `config`.
    """

    name: str
    holds: Basic
    says: str


def _tile(size: Any, name: str) -> Rule:
    divides = Eq(Mod(2**16, Max(size, 1)), 0)
    words = f"{name}={{{name}}} is not a power of two of at least 16"
    return Rule("power of two", And(size >= 16, divides), words)


def _one_tile(tiles: Any, size: Any, name: str) -> Rule:
    fits = And(Eq(tiles, 1), size <= 256)
    words = f"use_tma: head dimension {{{name}}} is not one tile of at most 256"
    return Rule("tma", Or(Not(use_tma), fits), words)


# Those of the numbers alone: the others are asked where these hold.
SHAPE: tuple[Rule, ...] = (
    _tile(BLOCK_M, "BLOCK_M"),
    _tile(BLOCK_N, "BLOCK_N"),
    Rule(
        "warps",
        And(num_warps >= 1, Eq(Mod(16, Max(num_warps, 1)), 0)),
        "num_warps={num_warps} is not one of 1, 2, 4, 8, 16",
    ),
    Rule(
        "stages",
        And(num_stages >= 1, num_stages <= 8),
        "num_stages={num_stages} is not between 1 and 8",
    ),
    Rule("splits", num_splits >= 0, "num_splits={num_splits} is below 0"),
    Rule("order", known_order, "the order of {config} is none of those there are"),
)
# A tile never spans two blocks of a mask; it may cover one that no tile divides.
FIT: tuple[Rule, ...] = (
    Rule(
        "mask block",
        Or(Eq(mask_rows, 0), BLOCK_M <= rows_cover),
        "BLOCK_M={BLOCK_M} is wider than the mask's block of {mask_rows}",
    ),
    Rule(
        "mask block",
        Or(Eq(mask_keys, 0), BLOCK_N <= keys_cover),
        "BLOCK_N={BLOCK_N} is wider than the mask's block of {mask_keys}",
    ),
    Rule("tma", Or(Not(use_tma), has_tma), "use_tma: {arch} has no TMA"),
    Rule(
        "tma",
        Or(Not(use_tma), dense_layout),
        "use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes",
    ),
    _one_tile(qk_tiles, qk_padded, "qk_dim"),
    _one_tile(v_tiles, v_padded, "v_dim"),
    Rule(
        "shared memory",
        shared_memory <= shared_limit,
        "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
    ),
    Rule(
        "registers",
        registers <= thread_registers,
        "registers: about {registers} a thread, {arch} has {thread_registers}",
    ),
    # One block must be able to live on an SM.
    Rule(
        "occupancy",
        registers * warp_size * num_warps <= sm_registers,
        "occupancy: about {registers} registers a thread in {num_warps} warps, "
        "an SM of {arch} has {sm_registers}",
    ),
)
RULES = (*SHAPE, *FIT)

_TMA_CAN = And(
    has_tma, dense_layout, Eq(qk_tiles, 1), Eq(v_tiles, 1), qk_padded <= 256, v_padded <= 256
)
# What can run, and is offered to an exhaustive search alone.
WORTH: tuple[Rule, ...] = (
    # The estimate is of mods as heavy as those measured: heavier ones need room.
    Rule(
        "headroom",
        4 * registers <= 3 * thread_registers,
        "headroom: about {registers} registers a thread leave few of {thread_registers}",
    ),
    # Two warps on the same 16 rows pay where the accumulator needs them, and only there.
    Rule(
        "idle warps",
        Or(decodes, num_warps * 16 <= BLOCK_M, v_padded > 128),
        "idle warps: {num_warps} on {BLOCK_M} rows",
    ),
    Rule(
        "slower loads",
        Or(decodes, use_tma, Not(_TMA_CAN)),
        "slower loads: TMA could read the tiles",
    ),
)
_GROUPS = {"shape": SHAPE, "fit": FIT, "worth": WORTH}


def violated(config: Config, structure: Structure, device: Device) -> list[Rule]:
    """The rules that a config breaks for a structure on a device, in their order.

    Where it breaks one of its numbers alone, the others are not asked.
    """
    values = numbers(config, structure, device)
    # The estimates divide by these numbers.
    found = _broken("shape", (*values, 0, 0))
    return found or _broken("fit", (*values, *estimated(values)))


def reasons(config: Config, structure: Structure, device: Device) -> list[str]:
    """Why a config cannot run for a structure on a device; an empty list when it can."""
    found = violated(config, structure, device)
    if not found:
        return []
    values = numbers(config, structure, device)
    known: dict[str, object] = dict(zip(NAMES, values, strict=True))
    if found[0] not in SHAPE:
        known["shared_memory"], known["registers"] = estimated(values)
    known |= {"device": device.name, "arch": device.arch, "config": describe(config)}
    return list(dict.fromkeys(rule.says.format(**known) for rule in found))


def unpromising(config: Config, structure: Structure, device: Device) -> list[Rule]:
    """Of a config that can run: why only an exhaustive search tries it."""
    values = numbers(config, structure, device)
    return _broken("worth", (*values, *estimated(values)))


def _broken(group: str, values: tuple[int, ...]) -> list[Rule]:
    held = _compiled(group)(*values)
    if all(held):
        return []
    return [rule for rule, holds in zip(_GROUPS[group], held, strict=True) if not holds]


@lru_cache(maxsize=3)
def _compiled(group: str) -> Callable[..., list[Any]]:
    """A group of rules as one Python function of the numbers behind the symbols."""
    inequalities = [rule.holds for rule in _GROUPS[group]]
    compiled: Callable[..., list[Any]] = lambdify(
        (*SYMBOLS, *ESTIMATED), inequalities, modules="math"
    )
    return compiled
