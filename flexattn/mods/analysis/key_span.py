"""The key span of a row: which keys its mask can keep, by comparisons of q_idx with kv_idx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from flexattn.mods.analysis.affine import LARGE
from flexattn.mods.analysis.intervals import dtype_range, interval_of, intervals_of
from flexattn.mods.expr import Expr, const, depending, reads, terms_of, walk
from flexattn.mods.ir.intervals import Range
from flexattn.mods.numbers import number_of
from flexattn.mods.ops import is_int
from flexattn.mods.simplify import make

KEY = Expr("var", "int64", (), "kv_idx")
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
        """Whether a bound reads the head."""
        return any(reads(bound, "h") for bound in (self.low, self.high) if bound is not None)

    @property
    def is_prefix(self) -> bool:
        """Whether a row keeps all keys under `high`, and no others."""
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


def key_span(expr: Expr, ranges: Mapping[str, Range]) -> KeySpan:
    """The span of a mask_mod's expression; all of it is `rest` where no comparison gives a bound.

    ranges: what its variables can be. Sound, wrapping of 64-bit integers included: a comparison
    that could wrap gives no bound.
    """
    spans = {term: _span(term, ranges) for term in terms_of(expr, "and")}
    both = _both(list(spans.values()))
    if both.low is both.high is None:
        return KeySpan(None, None, None, None, expr)
    below, above, rest = [], [], []
    for term, found in spans.items():
        if not found.exact:
            rest.append(term)
        elif found.high is None:
            below.append(term)
        elif found.low is None:
            above.append(term)
        else:
            below.append(make("le", "bool", (found.low, KEY)))
            above.append(make("lt", "bool", (KEY, found.high)))
    low, high = (
        None if bound is None else _clamped(bound, (-_SMALL, _SMALL), ranges)
        for bound in (both.low, both.high)
    )
    return KeySpan(low, high, conjunction(below), conjunction(above), conjunction(rest))


def key_bound(term: Expr, ranges: Mapping[str, Range]) -> KeyBound | None:
    """A comparison solved for kv_idx, None where that cannot be."""
    if term.op not in ("lt", "le") or not is_int(term.args[0].dtype):
        return None
    return _solved(term.op, term.args[0], term.args[1], ranges)


def conjunction(terms: list[Expr]) -> Expr | None:
    """The terms joined by "and"; None where there are none."""
    return reduce(lambda x, y: make("and", "bool", (x, y)), terms) if terms else None


def _span(expr: Expr, ranges: Mapping[str, Range]) -> _Span:
    if expr.op in ("lt", "le") and is_int(expr.args[0].dtype):
        x, y = expr.args
        return _compared(expr.op, x, y, ranges)
    if expr.op == "and":
        return _both([_span(term, ranges) for term in terms_of(expr, "and")])
    if expr.op == "or":
        return _either([_span(term, ranges) for term in terms_of(expr, "or")])
    return _OPAQUE


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
    return reduce(lambda x, y: make(op, "int64", (x, y)), known) if known else None


def _compared(op: str, x: Expr, y: Expr, ranges: Mapping[str, Range]) -> _Span:
    """x < y or x <= y, solved for kv_idx where its factor is 1 or -1."""
    if x.op == "abs" and not reads(y, "kv_idx"):
        # |d| < y is -d < y and d < y, but for the one integer whose negative wraps.
        (distance,) = x.args
        if _within(distance, ranges):
            negative = make("neg", distance.dtype, (distance,))
            return _both([_compared(op, side, y, ranges) for side in (distance, negative)])
    for side, other in ((x, y), (y, x)):
        if reads(side, "kv_idx"):
            if not _within(side, ranges):
                return _OPAQUE
        elif not _within(side, ranges):
            if not _within(other, ranges) or reads(side, "q_idx"):
                return _OPAQUE
            # Past all that the other side can be, numbers compare as the nearest that it can.
            low, high = interval_of(other, ranges) or (0, 0)
            clamped = _clamped(_wide(side), (low - 1, high + 1), ranges)
            x, y = (clamped if each is side else each for each in (x, y))
    found = _solved(op, x, y, ranges)
    if found is None or not found.rises:
        return _OPAQUE
    bound = found.value
    if found.op in ("le", "gt"):
        bound = make("add", "int64", (bound, const(1, "int64")))
    upper = found.op in ("lt", "le")
    return _Span(high=bound, exact=True) if upper else _Span(low=bound, exact=True)


def _solved(op: str, x: Expr, y: Expr, ranges: Mapping[str, Range]) -> KeyBound | None:
    """x < y or x <= y as a bound of kv_idx, where its factor is 1 or -1."""
    known = intervals_of(x, ranges) | intervals_of(y, ranges)
    terms = _linear(y, known)
    for term, factor in _linear(x, known).items():
        terms[term] = terms.get(term, 0) - factor
    # x < y is now 0 < terms.
    factor = terms.pop(KEY, 0)
    terms = {term: -factor * count for term, count in terms.items() if count}
    if factor not in (1, -1) or any(reads(term, "kv_idx") for term in terms):
        return None
    rises = all(_rising(term, count) for term, count in terms.items())
    return KeyBound(op if factor == -1 else {"lt": "gt", "le": "ge"}[op], _sum(terms), rises)


def _linear(expr: Expr, known: Mapping[Expr, Range | None]) -> dict[Expr, int]:
    """An integer as a sum of Exprs, each so many times; a narrow sum that may wrap is one."""
    wraps = expr.dtype != "int64" and known[expr] == dtype_range(expr.dtype)
    if wraps or not reads(expr, "q_idx", "kv_idx"):
        return {_wide(expr): 1}
    if expr.op == "cast" and is_int(expr.args[0].dtype):
        return _linear(expr.args[0], known)
    signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}.get(expr.op)
    if signs is None:
        return {_wide(expr): 1}
    found: dict[Expr, int] = {}
    for sign, arg in zip(signs, expr.args, strict=True):
        for term, factor in _linear(arg, known).items():
            found[term] = found.get(term, 0) + sign * factor
    return found


def _sum(terms: Mapping[Expr, int]) -> Expr:
    total = const(0, "int64")
    for term, factor in sorted(terms.items(), key=lambda each: (-each[1], each[0].order)):
        if factor not in (1, -1):
            term = make("mul", "int64", (term, const(abs(factor), "int64")))
        total = make("add" if factor > 0 else "sub", "int64", (total, term))
    return total


def _rising(term: Expr, factor: int) -> bool:
    """Whether a term so many times never falls as q_idx grows."""
    return factor in (1, -1) and _rises(term) and not (factor < 0 and reads(term, "q_idx"))


def _rises(expr: Expr) -> bool:
    """Whether an integer never falls as q_idx grows, judged operation by operation."""
    if not reads(expr, "q_idx") or expr.op == "var":
        return True
    if expr.op in ("add", "minimum", "maximum", "cast"):
        return all(is_int(arg.dtype) and _rises(arg) for arg in expr.args)
    if expr.op not in ("mul", "floor_div"):
        return False
    x, y = expr.args
    if expr.op == "mul" and _is_positive(x):
        x, y = y, x
    return _rises(x) and _is_positive(y)


def _is_positive(expr: Expr) -> bool:
    """Whether it is a number above 0, known now or in each call."""
    number = number_of(expr)
    least = expr.value if expr.op == "const" else number[1][0] if number else 0
    return int(least or 0) > 0


def _clamped(expr: Expr, limits: Range, ranges: Mapping[str, Range]) -> Expr:
    found = interval_of(expr, ranges)
    if found is not None and limits[0] <= found[0] and found[1] <= limits[1]:
        return expr
    low, high = (const(limit, "int64") for limit in limits)
    return make("minimum", "int64", (make("maximum", "int64", (expr, low)), high))


def _within(expr: Expr, ranges: Mapping[str, Range]) -> bool:
    """Whether an expression, and what in it depends on positions, stays far from wrapping."""
    found = intervals_of(expr, ranges)
    for node in depending(walk(expr), ("q_idx", "kv_idx")) | {expr}:
        limits = found[node]
        if limits is None or max(map(abs, limits)) > LARGE:
            return False
        if node.args and node.op != "load" and limits == dtype_range(node.dtype):
            return False  # it may wrap
    return True


def _wide(expr: Expr) -> Expr:
    return expr if expr.dtype == "int64" else make("cast", "int64", (expr,))
