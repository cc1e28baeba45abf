"""mask_form(): all that kernels ask of a mask_mod, as one value. Renderers print it.

Its key span says which keys of a row the mask can keep, by comparisons of q_idx with kv_idx.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce

from flexattn.mods.analysis.affine import (
    KEY,
    LARGE,
    Affine,
    Comparison,
    Edge,
    Forms,
    comparison_of,
    edges,
    free_edges,
    gap_edges,
)
from flexattn.mods.analysis.intervals import Intervals, dtype_range
from flexattn.mods.expr import Expr, integer, once, reads, terms_of, walk
from flexattn.mods.numbers import number_of
from flexattn.mods.ops import Range, is_int
from flexattn.mods.simplify import applied, make

# Where whole tiles may still be added to a bound in 32 bits.
_SMALL = 2**30


@dataclass(frozen=True, slots=True)
class KeySpan:
    """A mask_mod as bounds on kv_idx, each an Expr without it that never falls as q_idx grows.

    low, high: no row keeps a key below low, or from high on; None where nothing is known.
    below, above, rest: mask_mod is their conjunction, None where there is no such part. Keys from
    low on pass `below`, keys under high pass `above`.
    """

    low: Expr | None
    high: Expr | None
    below: Expr | None
    above: Expr | None
    rest: Expr | None

    @property
    def per_head(self) -> bool:
        """True if a bound reads the head."""
        return any(reads(bound, "h") for bound in (self.low, self.high) if bound is not None)

    @property
    def is_prefix(self) -> bool:
        """True if a row keeps all keys under `high`, and no others."""
        return self.high is not None and self.low is self.below is self.rest is None


@dataclass(frozen=True, slots=True)
class KeyBound:
    """A condition as `kv_idx op value`, where op is lt, le, gt or ge and value reads no kv_idx.

    rises: value is known never to fall as q_idx grows. Sums of 64 bits are taken not to wrap.
    """

    op: str
    value: Expr
    rises: bool


@dataclass(frozen=True, slots=True)
class _Span:
    """low <= kv_idx < high is implied by a condition; where exact, it is the condition."""

    low: Expr | None = None
    high: Expr | None = None
    exact: bool = False


_OPAQUE = _Span()


def key_span(expr: Expr, interval: Intervals) -> KeySpan:
    """The span of a mask_mod's expression; all of it is `rest` where no comparison gives a bound.

    Sound, wrapping of 64-bit integers included: a comparison that could wrap gives no bound.
    """
    found = _Spans(interval)
    spans = {term: found.of(term) for term in terms_of(expr, "and")}
    both = _both(list(spans.values()))
    if both.low is both.high is None:
        return KeySpan(None, None, None, None, expr)
    below, above, rest = [], [], []
    for term, span in spans.items():
        if not span.exact:
            rest.append(term)
        elif span.high is None:
            below.append(term)
        elif span.low is None:
            above.append(term)
        else:
            below.append(applied("le", span.low, KEY))
            above.append(applied("lt", KEY, span.high))
    low, high = (
        None if bound is None else found.interval.limited(bound, -_SMALL, _SMALL)
        for bound in (both.low, both.high)
    )
    return KeySpan(low, high, conjunction(below), conjunction(above), conjunction(rest))


def key_bound(term: Expr, forms: Forms) -> KeyBound | None:
    """A comparison solved for kv_idx, None where that cannot be."""
    if term.op not in ("lt", "le") or not is_int(term.args[0].dtype):
        return None
    return _solved(term.op, term.args[0], term.args[1], forms)


def conjunction(terms: list[Expr]) -> Expr | None:
    """The terms joined by "and"; None where there are none."""
    return reduce(partial(applied, "and"), terms) if terms else None


class _Spans:
    """The spans of conditions; each node is looked at once."""

    def __init__(self, interval: Intervals) -> None:
        self.interval, self.forms = interval, Forms(interval)
        self.known: dict[Expr, _Span] = {}
        self.near: dict[Expr, bool] = {}

    def of(self, expr: Expr) -> _Span:
        known = self.known
        for node in walk(expr, enter=lambda node: node.op in ("and", "or") and node not in known):
            if node in known:
                continue
            if node.op in ("and", "or") and node.dtype == "bool":
                parts = [known[arg] for arg in node.args]
                known[node] = _both(parts) if node.op == "and" else _either(parts)
            elif node.op in ("lt", "le") and is_int(node.args[0].dtype):
                known[node] = self._compared(node.op, *node.args)
            else:
                known[node] = _OPAQUE
        return known[expr]

    def _compared(self, op: str, x: Expr, y: Expr) -> _Span:
        """x < y or x <= y, solved for kv_idx where its factor is 1 or -1."""
        if x.op == "abs" and not reads(y, "kv_idx"):
            # |d| < y is -d < y and d < y, except for the one integer whose negative wraps.
            (distance,) = x.args
            if self._within(distance):
                negative = make("neg", distance.dtype, (distance,))
                return _both([self._solved(op, side, y) for side in (distance, negative)])
        return self._solved(op, x, y)

    def _solved(self, op: str, x: Expr, y: Expr) -> _Span:
        for side, other in ((x, y), (y, x)):
            if reads(side, "kv_idx"):
                if not self._within(side):
                    return _OPAQUE
            elif not self._within(side):
                if not self._within(other) or reads(side, "q_idx"):
                    return _OPAQUE
                # Past all that the other side can be, numbers compare as the nearest that it can.
                low, high = self.interval(other) or (0, 0)
                clamped = self.interval.limited(_wide(side), low - 1, high + 1)
                x, y = (clamped if each is side else each for each in (x, y))
        found = _solved(op, x, y, self.forms)
        if found is None or not found.rises:
            return _OPAQUE
        bound = found.value
        if found.op in ("le", "gt"):
            bound = applied("add", bound, integer(1))
        upper = found.op in ("lt", "le")
        return _Span(high=bound, exact=True) if upper else _Span(low=bound, exact=True)

    def _within(self, expr: Expr) -> bool:
        """True if an expression, and what in it depends on positions, stays far from wrapping."""
        near = self.near
        for node in walk(expr, enter=lambda node: node not in near):
            if node not in near:
                moving = [arg for arg in node.args if reads(arg, "q_idx", "kv_idx")]
                near[node] = self._limited(node) and all(near[arg] for arg in moving)
        return near[expr]

    def _limited(self, node: Expr) -> bool:
        limits = self.interval(node)
        if limits is None or max(map(abs, limits)) > LARGE:
            return False
        # At its dtype's limits it may wrap.
        return not node.args or node.op == "load" or limits != dtype_range(node.dtype)


def _both(spans: list[_Span]) -> _Span:
    return _Span(
        _folded("maximum", [span.low for span in spans]),
        _folded("minimum", [span.high for span in spans]),
        all(span.exact for span in spans),
    )


def _either(spans: list[_Span]) -> _Span:
    lows, highs = [span.low for span in spans], [span.high for span in spans]
    # Half-lines in one direction join to one; two intervals may leave a gap between them.
    one_way = not any(lows) or not any(highs)
    return _Span(
        None if None in lows else _folded("minimum", lows),
        None if None in highs else _folded("maximum", highs),
        one_way and all(span.exact for span in spans),
    )


def _folded(op: str, bounds: list[Expr | None]) -> Expr | None:
    known = [bound for bound in bounds if bound is not None]
    return reduce(partial(applied, op), known) if known else None


def _solved(op: str, x: Expr, y: Expr, forms: Forms) -> KeyBound | None:
    """x < y or x <= y as a bound of kv_idx, where its factor is 1 or -1."""
    found = forms(y).plus(forms(x), -1)
    # x < y is now 0 < found.
    factor = found.kv
    value = found.times(-factor).plus(Affine({KEY: 1}))
    if factor not in (1, -1) or any(reads(term, "kv_idx") for term in value.terms):
        return None
    rises = all(_rising(term, count) for term, count in value.terms.items())
    return KeyBound(op if factor == -1 else {"lt": "gt", "le": "ge"}[op], _sum(value), rises)


def _sum(form: Affine) -> Expr:
    """A form as one Expr, what is added before what is taken away."""
    terms = [*form.terms.items(), (integer(abs(form.number)), 1 if form.number > 0 else -1)]
    total = integer(0)
    for term, factor in sorted(terms, key=lambda each: (-each[1], each[0].order)):
        if factor not in (1, -1):
            term = applied("mul", term, integer(abs(factor)))
        total = applied("add" if factor > 0 else "sub", total, term)
    return total


def _rising(term: Expr, factor: int) -> bool:
    """True if a term so many times never falls as q_idx grows."""
    return _rises(term) and (factor > 0 or not reads(term, "q_idx"))


def _rises(expr: Expr) -> bool:
    """True if an integer never falls as q_idx grows, judged operation by operation."""
    found: dict[Expr, bool] = {}
    for node in walk(expr):
        if not reads(node, "q_idx") or node.op == "var":
            found[node] = True
        elif node.op in ("add", "minimum", "maximum", "cast"):
            found[node] = all(is_int(arg.dtype) and found[arg] for arg in node.args)
        elif node.op in ("mul", "floor_div"):
            x, y = node.args
            if node.op == "mul" and _is_positive(x):
                x, y = y, x
            found[node] = found[x] and _is_positive(y)
        else:
            found[node] = False
    return found[expr]


def _is_positive(expr: Expr) -> bool:
    """True if it is a number above 0, known now or in each call."""
    number = number_of(expr)
    least = expr.value if expr.op == "const" else number[1][0] if number else 0
    return int(least or 0) > 0


def _wide(expr: Expr) -> Expr:
    return expr if expr.dtype == "int64" else make("cast", "int64", (expr,))


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
    between which every key is kept, None where there may be no such keys; gap_edges: those of keys
    of which none is kept, before others that are. loads_by_key: whether
    it reads memory for each key. rest_loads_keys_alone: whether span.rest does, and each
    time the same for all rows.
    """

    span: KeySpan
    documents: DocumentIds | None
    terms: tuple[MaskTerm, ...]
    edges: tuple[Edge, ...]
    free_edges: tuple[Edge, ...] | None
    gap_edges: tuple[Edge, Edge] | None
    loads_by_key: bool
    rest_loads_keys_alone: bool


def mask_form(expr: Expr, ranges: Mapping[str, Range]) -> MaskForm:
    """The form of a mask_mod's expression, worked out once; ranges: what its variables can be."""
    return _mask_form(expr, tuple(ranges.items()))


@once
def _mask_form(expr: Expr, items: tuple[tuple[str, Range], ...]) -> MaskForm:
    interval = Intervals(dict(items))
    span, forms = key_span(expr, interval), Forms(interval)
    # Edges hold at any position: a narrow sum of one, which wraps at some, has none.
    anywhere = Forms(Intervals({}))
    terms = tuple(
        MaskTerm(term, key_bound(term, forms), comparison_of(term, forms))
        for term in terms_of(expr, "and")
    )
    return MaskForm(
        span,
        None if span.rest is None else documents_of(span.rest),
        terms,
        edges(expr, anywhere),
        free_edges(expr, anywhere),
        gap_edges(expr, anywhere),
        bool(_loads(expr, "kv_idx")),
        span.rest is not None and _loads_keys_alone(span.rest),
    )


def _loads_keys_alone(expr: Expr) -> bool:
    keyed = _loads(expr, "kv_idx")
    return bool(keyed) and not keyed & _loads(expr, "q_idx")


def _loads(expr: Expr, name: str) -> set[Expr]:
    """The loads at places that depend on a variable."""
    return {node for node in walk(expr) if node.op == "load" and reads(node, name)}


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
