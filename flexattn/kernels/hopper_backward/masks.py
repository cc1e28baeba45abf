"""What the Hopper backward asks of a mask_mod beside its text: bounds on how far keys lie back."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.mods.analysis.mask_form import mask_form
from flexattn.mods.expr import Expr, depending, walk
from flexattn.problem import INDEX_RANGES, Structure


class Band(NamedTuple):
    """A mask that keeps what has low <= q_idx - kv_idx <= high; None where there is no bound."""

    low: int | None
    high: int | None


def band_of(mask: Expr) -> Band | None:
    """The band that a mask is, as of a causal mask or a window; None where it is none."""
    low: int | None = None
    high: int | None = None
    for term in mask_form(mask, INDEX_RANGES).terms:
        found = term.affine
        if found is None or found.op not in ("lt", "le") or found.form.rest is not None:
            return None
        form = found.form
        if not form.relative or abs(form.q) != 1:
            return None
        number = form.number + (found.op == "lt")
        if form.q < 0:
            low = number if low is None else max(low, number)
        else:
            high = -number if high is None else min(high, -number)
    return Band(low, high)


def loads_pairs(structure: Structure) -> bool:
    """Whether a mod reads memory at places of a query and a key, or of a score."""
    for captures in (structure.score, structure.mask):
        if captures is None:
            continue
        nodes = list(walk(captures.mod.expr))
        queries = depending(nodes, ("score", "q_idx"))
        keys = depending(nodes, ("score", "kv_idx"))
        if any(node.op == "load" and node in queries and node in keys for node in nodes):
            return True
    return False
