"""The key span of a row: which keys its mask can keep, by comparisons of q_idx with kv_idx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from flexattn.mods.analysis.conditions import conjunction, reads, terms_of
from flexattn.mods.analysis.intervals import Interval, dtype_range, interval_of, intervals_of
from flexattn.mods.expr import Expr, const, depending, walk
from flexattn.mods.numbers import number_of
from flexattn.mods.ops import is_int
from flexattn.mods.simplify import make

__all__ = ["KeyBound", "KeySpan", "key_bound", "key_span"]

KEY = Expr("var", "int64", (), "kv_idx")
# Where whole tiles may still be added to a bound in 32 bits, and where nothing wraps in 64.
SMALL, LARGE = 2**30, 2**40


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

    So it is of whole numbers: sums of 64 bits are taken not to wrap.
    """

    op: str
    value: Expr


@dataclass(frozen=True, slots=True)
class _Span:
    """low <= kv_idx < high is implied by a condition; where exact, it is the condition."""

    low: Expr | None = None
    high: Expr | None = None
    exact: bool = False


_OPAQUE = _Span()


def key_span(expr: Expr, ranges: Mapping[str, Interval]) -> KeySpan:
    """The span of a mask_mod's expression; all of it is `rest` where no comparison gives a bound.

    ranges: what its variables can be. Sound, wrapping of 64-bit integers included: a comparison
    that could wrap gives no bound.
    """
    lows, highs = [], []
    below, above, rest = [], [], []
    for term in terms_of(expr, "and"):
        found = _span(term, ranges)
        lows += [found.low] if found.low is not None else []
        highs += [found.high] if found.high is not None else []
        if not found.exact:
            rest.append(term)
        elif found.high is None:
            below.append(term)
        elif found.low is None:
            above.append(term)
        else:
            below.append(make("le", "bool", (found.low, KEY)))
            above.append(make("lt", "bool", (KEY, found.high)))
    if not lows and not highs:
        return KeySpan(None, None, None, None, expr)
    low, high = _join("maximum", lows, ranges), _join("minimum", highs, ranges)
    return KeySpan(low, high, conjunction(below), conjunction(above), conjunction(rest))


def key_bound(term: Expr, ranges: Mapping[str, Interval]) -> KeyBound | None:
    """A comparison solved for kv_idx, None where that cannot be."""
    if term.op not in ("lt", "le") or not is_int(term.args[0].dtype):
        return None
    found = _solved(term.args[0], term.args[1], ranges)
    if found is None:
        return None
    upper, terms = found
    op = term.op if upper else {"lt": "gt", "le": "ge"}[term.op]
    return KeyBound(op, _sum(terms))


def _join(op: str, found: list[Expr], ranges: Mapping[str, Interval]) -> Expr | None:
    if not found:
        return None
    joined = reduce(lambda x, y: make(op, "int64", (x, y)), found)
    return _clamped(joined, (-SMALL, SMALL), ranges)


def _span(expr: Expr, ranges: Mapping[str, Interval]) -> _Span:
    if expr.op in ("lt", "le") and is_int(expr.args[0].dtype):
        x, y = expr.args
        return _compared(expr.op, x, y, ranges)
    if expr.op == "and":
        return _both([_span(term, ranges) for term in terms_of(expr, "and")])
    if expr.op == "or":
        return _either([_span(term, ranges) for term in terms_of(expr, "or")])
    return _OPAQUE


def _both(spans: list[_Span]) -> _Span:
    lows = [span.low for span in spans if span.low is not None]
    highs = [span.high for span in spans if span.high is not None]
    return _Span(
        reduce(lambda x, y: make("maximum", "int64", (x, y)), lows) if lows else None,
        reduce(lambda x, y: make("minimum", "int64", (x, y)), highs) if highs else None,
        all(span.exact for span in spans),
    )


def _either(spans: list[_Span]) -> _Span:
    lows = [span.low for span in spans if span.low is not None]
    highs = [span.high for span in spans if span.high is not None]
    low = high = None
    if len(lows) == len(spans):
        low = reduce(lambda x, y: make("minimum", "int64", (x, y)), lows)
    if len(highs) == len(spans):
        high = reduce(lambda x, y: make("maximum", "int64", (x, y)), highs)
    # Half-lines in one direction join to one; two intervals may leave a gap between them.
    exact = all(span.exact for span in spans) and not (lows and highs)
    return _Span(low, high, exact)


def _compared(op: str, x: Expr, y: Expr, ranges: Mapping[str, Interval]) -> _Span:
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
    solved = _solved(x, y, ranges)
    if solved is None or not all(_rising(*each) for each in solved[1].items()):
        return _OPAQUE
    upper, terms = solved
    bound = _sum(terms)
    # kv < bound, or bound < kv; one more where the other bound is the one that is included.
    if (op == "le") is upper:
        bound = make("add", "int64", (bound, const(1, "int64")))
    return _Span(high=bound, exact=True) if upper else _Span(low=bound, exact=True)


def _solved(
    x: Expr, y: Expr, ranges: Mapping[str, Interval]
) -> tuple[bool, dict[Expr, int]] | None:
    """x < y solved for kv_idx, where its factor is 1 or -1.

    Whether the bound is an upper one, and the bound: a sum of terms, each so many times.
    """
    known = intervals_of(x, ranges) | intervals_of(y, ranges)
    terms = _linear(y, known)
    for term, factor in _linear(x, known).items():
        terms[term] = terms.get(term, 0) - factor
    # x < y is now 0 < terms.
    factor = terms.pop(KEY, 0)
    terms = {term: -factor * count for term, count in terms.items() if count}
    if factor not in (1, -1) or any(reads(term, "kv_idx") for term in terms):
        return None
    return factor == -1, terms


def _linear(expr: Expr, known: Mapping[Expr, Interval | None]) -> dict[Expr, int]:
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
    if expr.op in ("mul", "floor_div"):
        x, y = expr.args
        if expr.op == "mul" and _is_positive(x):
            x, y = y, x
        return _rises(x) and _is_positive(y)
    return False


def _is_positive(expr: Expr) -> bool:
    """Whether it is a number above 0, known now or in each call."""
    number = number_of(expr)
    least = expr.value if expr.op == "const" else number[1][0] if number else 0
    return int(least or 0) > 0


def _clamped(expr: Expr, limits: Interval, ranges: Mapping[str, Interval]) -> Expr:
    found = interval_of(expr, ranges)
    if found is not None and limits[0] <= found[0] and found[1] <= limits[1]:
        return expr
    low, high = (const(limit, "int64") for limit in limits)
    return make("minimum", "int64", (make("maximum", "int64", (expr, low)), high))


def _within(expr: Expr, ranges: Mapping[str, Interval]) -> bool:
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
