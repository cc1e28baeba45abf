"""Facts about mods that Hopper's backward needs beside their text: a mask's band, stray scores."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from flexattn.kernels.printers.gradient_printer import learned_loads, reads_by_diagonal
from flexattn.mods.analysis.affine import Comparison, same_in_tiles
from flexattn.mods.analysis.mask_form import conjunction, mask_form
from flexattn.mods.expr import Expr, depending, reads, walk
from flexattn.mods.ops import OPS, is_float
from flexattn.problem import INDEX_RANGES, Structure

# Of functions of floats those that are finite where their operand is.
_BOUNDED = frozenset(("sin", "cos", "atan", "tanh", "sigmoid", "erf", "erfc"))
_DIVISIONS = frozenset(("div", "floor_div", "trunc_div", "floor_mod", "trunc_mod"))
# Past the distance of any two positions, and still added to one in 32 bits.
_FAR = 2**30


class Band(NamedTuple):
    """A mask that keeps what has low <= q_idx - kv_idx <= high; None where there is no bound."""

    low: int | None
    high: int | None


def band_of(mask: Expr) -> Band | None:
    """The band that a mask is, as of a causal mask or a window; None where it is none."""
    band, rest = band_and_rest(mask)
    return band if rest is None else None


def band_and_rest(mask: Expr) -> tuple[Band | None, Expr | None]:
    """The band of a mask, and the rest of its conditions; None for a part that is not there.

    Bounds that exclude each other stay in the rest: one unsigned comparison needs low <= high.
    """
    low: int | None = None
    high: int | None = None
    rest: list[Expr] = []
    for term in mask_form(mask, INDEX_RANGES).terms:
        found = term.affine
        if found is None or not _is_bound(found):
            rest.append(term.expr)
            continue
        number = min(max(found.form.number + (found.op == "lt"), -_FAR), _FAR)
        if found.form.q < 0:
            low = number if low is None else max(low, number)
        else:
            high = -number if high is None else min(high, -number)
    if rest and low is not None and high is not None and high < low:
        return None, mask
    band = None if low is None and high is None else Band(low, high)
    return band, conjunction(rest)


def _is_bound(found: Comparison) -> bool:
    """True if a comparison bounds q_idx - kv_idx by a number."""
    form = found.form
    bounds = found.op in ("lt", "le") and form.rest is None
    return bounds and form.relative and abs(form.q) == 1


def loads_pairs(structure: Structure, keys: int = 0) -> bool:
    """True if a mod reads memory at places of a query and a key, or of a score.

    But what score_mod reads along diagonals of a tile, and a mask that a tile of so many keys asks
    once for each of its rows.
    """
    for captures in (structure.score, structure.mask):
        if captures is None or (captures is structure.mask and asked_by_row(structure, keys)):
            continue
        nodes = list(walk(captures.mod.expr))
        queries = depending(nodes, ("score", "q_idx"))
        keyed = depending(nodes, ("score", "kv_idx"))
        pairs = (node for node in nodes if node.op == "load" and node in queries and node in keyed)
        if any(captures is structure.mask or not reads_by_diagonal(node) for node in pairs):
            return True
    return False


def asked_by_row(structure: Structure, keys: int) -> bool:
    """True if a mask reads memory for each query and key, but the same for a tile of 64 keys.

    So it is where rows choose blocks of 64 keys or more.
    """
    if keys != 64 or structure.mask is None or structure.ragged_kv:
        return False
    _, rest = band_and_rest(structure.mask.mod.expr)
    loads = rest is not None and loads_pairs(replace(structure, score=None))
    return loads and rest is not None and same_in_tiles(rest, 0, keys)


def reads_diagonals(structure: Structure) -> bool:
    """True if a score_mod reads something along diagonals of a tile."""
    return structure.score is not None and any(
        map(reads_by_diagonal, walk(structure.score.mod.expr))
    )


def sums_gradients(structure: Structure) -> bool:
    """True if all that gets a gradient is read along diagonals of a tile, or by heads of packs."""
    if structure.score is None:
        return not structure.grads
    return all(
        reads_by_diagonal(load)
        or (structure.ragged_kv and not reads(load, "score", "q_idx", "kv_idx"))
        for load in learned_loads(structure)
    )


def sums_heads(structure: Structure) -> bool:
    """True if something that gets a gradient has one place for all scores of a head."""
    return not all(map(reads_by_diagonal, learned_loads(structure)))


def may_be_no_number(score: Expr) -> bool:
    """True if a modified score may be NaN or infinite in a row behind the last one.

    There the product is 0, and what is read by the row is 0 or whatever lies behind. -inf does no
    harm, as which `where` removes scores.
    """
    nodes = list(walk(score))
    by_row = depending(nodes, ("score", "q_idx"))
    return any(_is_infinite(node) or (node in by_row and _may_end(node, by_row)) for node in nodes)


def _is_infinite(node: Expr) -> bool:
    value = node.value
    return isinstance(value, float) and (math.isnan(value) or value == math.inf)


def _may_end(node: Expr, by_row: set[Expr]) -> bool:
    """True if finite operands may give NaN or infinity; divisors that no row decides do not."""
    if not is_float(node.dtype):
        return False
    if node.op in _DIVISIONS:
        return node.args[1] in by_row
    if node.op in ("load", "pow"):
        return True
    return node.op in OPS and OPS[node.op].result == "float" and node.op not in _BOUNDED
