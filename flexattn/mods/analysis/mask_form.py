"""mask_form(): all that kernels ask of a mask_mod, as one value. Renderers print it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flexattn.mods.analysis.affine import (
    Comparison,
    Edge,
    affine_forms,
    comparison_of,
    edges,
    free_edges,
)
from flexattn.mods.analysis.intervals import Intervals
from flexattn.mods.analysis.key_span import KeyBound, KeySpan, conjunction, key_bound, key_span
from flexattn.mods.expr import Expr, depending, reads, terms_of, walk
from flexattn.mods.ir.intervals import Range
from flexattn.mods.ops import is_int


@dataclass(frozen=True, slots=True)
class DocumentIds:
    """A condition as row == key and rest: documents, told apart by numbers in captured tensors.

    row: an integer that reads no kv_idx. key: one that reads no q_idx. rest: None if that is all.
    """

    row: Expr
    key: Expr
    rest: Expr | None


@dataclass(frozen=True, slots=True)
class MaskTerm:
    """One of the conditions that a mask asks for together, in the forms that it has.

    bound: as a comparison of kv_idx with what reads no kv_idx. affine: as one of an affine form
    with 0. None where it has no such form. Both are of whole numbers: sums of 64 bits are taken
    not to wrap.
    """

    expr: Expr
    bound: KeyBound | None
    affine: Comparison | None


@dataclass(frozen=True, slots=True)
class MaskForm:
    """A mask_mod as kernels see it.

    span: the first key of each row and one past the last, and what is left to ask between them.
    documents: span.rest as an equality of document ids, None where it is none. terms: the mask
    is their conjunction. edges: affine bounds outside which no key is kept. free_edges: those
    between which every key is kept, None where there may be no such keys. loads_by_key: whether
    it reads memory for each key. rest_loads_keys_alone: whether span.rest does, and each
    time the same for all rows.
    """

    span: KeySpan
    documents: DocumentIds | None
    terms: tuple[MaskTerm, ...]
    edges: tuple[Edge, ...]
    free_edges: tuple[Edge, ...] | None
    loads_by_key: bool
    rest_loads_keys_alone: bool


def mask_form(expr: Expr, ranges: Mapping[str, Range]) -> MaskForm:
    """The form of a mask_mod's expression, worked out once; ranges: what its variables can be."""
    return _mask_form(expr, tuple(ranges.items()))


@lru_cache(maxsize=512)
def _mask_form(expr: Expr, items: tuple[tuple[str, Range], ...]) -> MaskForm:
    ranges = dict(items)
    span = key_span(expr, ranges)
    forms = affine_forms((expr,), ranges)
    # Edges hold at any position: a narrow sum of one, which wraps at some, has none.
    anywhere = affine_forms((expr,), {})
    interval = Intervals(ranges)
    terms = tuple(
        MaskTerm(term, key_bound(term, interval), comparison_of(term, forms))
        for term in terms_of(expr, "and")
    )
    return MaskForm(
        span,
        None if span.rest is None else documents_of(span.rest),
        terms,
        edges(expr, anywhere),
        free_edges(expr, anywhere),
        bool(_loads(expr, "kv_idx")),
        span.rest is not None and _loads_keys_alone(span.rest),
    )


def _loads_keys_alone(expr: Expr) -> bool:
    keyed = _loads(expr, "kv_idx")
    return bool(keyed) and not keyed & _loads(expr, "q_idx")


def _loads(expr: Expr, name: str) -> set[Expr]:
    """What is read from memory at places that depend on a variable."""
    return {node for node in depending(walk(expr), (name,)) if node.op == "load"}


def documents_of(expr: Expr) -> DocumentIds | None:
    """The first equality of a row's number and a key's that a condition has, if it has one."""
    terms = terms_of(expr, "and")
    for place, term in enumerate(terms):
        found = _numbered(term)
        if found is not None:
            return DocumentIds(*found, conjunction(terms[:place] + terms[place + 1 :]))
    return None


def _numbered(expr: Expr) -> tuple[Expr, Expr] | None:
    if expr.op != "eq" or not is_int(expr.args[0].dtype):
        return None
    if not all(any(node.op == "load" for node in walk(arg)) for arg in expr.args):
        return None
    for row, key in (expr.args, expr.args[::-1]):
        row_alone = reads(row, "q_idx") and not reads(row, "kv_idx")
        if row_alone and reads(key, "kv_idx") and not reads(key, "q_idx"):
            return row, key
    return None
