"""Which keys a mask_mod can keep for a row: what its comparisons of q_idx with kv_idx say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from flexattn.mods.analysis.intervals import Interval, dtype_range, interval_of, intervals_of
from flexattn.mods.expr import Expr, const, depending, walk
from flexattn.mods.numbers import number_of
from flexattn.mods.ops import is_int
from flexattn.mods.simplify import make

__all__ = ["KeyBounds", "Numbers", "key_bounds", "numbers_of"]

KEY = Expr("var", "int64", (), "kv_idx")
# Where whole tiles may still be added to a bound in 32 bits, and where nothing wraps in 64.
SMALL, LARGE = 2**30, 2**40


@dataclass(frozen=True, slots=True)
class KeyBounds:
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


@dataclass(frozen=True, slots=True)
class Numbers:
    """A condition as row == key and rest: documents, told apart by numbers in captured tensors.

    row: an integer that reads no kv_idx. key: one that reads no q_idx. rest: None if that is all.
    """

    row: Expr
    key: Expr
    rest: Expr | None


@dataclass(frozen=True, slots=True)
class _Span:
    """low <= kv_idx < high is implied by a condition; where exact, it is the condition."""

    low: Expr | None = None
    high: Expr | None = None
    exact: bool = False


_OPAQUE = _Span()


def key_bounds(expr: Expr, ranges: Mapping[str, Interval]) -> KeyBounds | None:
    """The bounds of a mask_mod's expression; None where it compares nothing that gives one.

    ranges: what its variables can be. Sound, wrapping of 64-bit integers included: a comparison
    that could wrap gives no bound.
    """
    lows, highs = [], []
    parts: dict[str, list[Expr]] = {"below": [], "above": [], "rest": []}
    for term in _terms(expr, "and"):
        found = _span(term, ranges)
        lows += [found.low] if found.low is not None else []
        highs += [found.high] if found.high is not None else []
        if not found.exact:
            parts["rest"].append(term)
        elif found.high is None:
            parts["below"].append(term)
        elif found.low is None:
            parts["above"].append(term)
        else:
            parts["below"].append(make("le", "bool", (found.low, KEY)))
            parts["above"].append(make("lt", "bool", (KEY, found.high)))
    if not lows and not highs:
        return None
    low, high = _join("maximum", lows, ranges), _join("minimum", highs, ranges)
    conjunctions = {
        name: reduce(lambda x, y: make("and", "bool", (x, y)), terms) if terms else None
        for name, terms in parts.items()
    }
    return KeyBounds(low, high, **conjunctions)


def numbers_of(expr: Expr) -> Numbers | None:
    """The first equality of a row's number and a key's that a condition has, if it has one."""
    terms = _terms(expr, "and")
    for place, term in enumerate(terms):
        found = _numbered(term)
        if found is not None:
            others = terms[:place] + terms[place + 1 :]
            rest = reduce(lambda x, y: make("and", "bool", (x, y)), others) if others else None
            return Numbers(*found, rest)
    return None


def _numbered(expr: Expr) -> tuple[Expr, Expr] | None:
    if expr.op != "eq" or not is_int(expr.args[0].dtype):
        return None
    if not all(any(node.op == "load" for node in walk(arg)) for arg in expr.args):
        return None
    for row, key in (expr.args, expr.args[::-1]):
        if _has_q(row) and _has_key(key) and not _has_key(row) and not _has_q(key):
            return row, key
    return None


def _join(op: str, found: list[Expr], ranges: Mapping[str, Interval]) -> Expr | None:
    if not found:
        return None
    joined = reduce(lambda x, y: make(op, "int64", (x, y)), found)
    return _clamped(joined, (-SMALL, SMALL), ranges)


def _terms(expr: Expr, op: str) -> list[Expr]:
    if expr.op == op and expr.dtype == "bool":
        return [term for arg in expr.args for term in _terms(arg, op)]
    return [expr]


def _span(expr: Expr, ranges: Mapping[str, Interval]) -> _Span:
    if expr.op in ("lt", "le") and is_int(expr.args[0].dtype):
        x, y = expr.args
        return _compared(expr.op, x, y, ranges)
    if expr.op == "and":
        return _both([_span(term, ranges) for term in _terms(expr, "and")])
    if expr.op == "or":
        return _either([_span(term, ranges) for term in _terms(expr, "or")])
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
    if x.op == "abs" and not _has_key(y):
        # |d| < y is -d < y and d < y, but for the one integer whose negative wraps.
        (distance,) = x.args
        if _within(distance, "kv_idx", ranges):
            negative = make("neg", distance.dtype, (distance,))
            return _both([_compared(op, side, y, ranges) for side in (distance, negative)])
    for side, other in ((x, y), (y, x)):
        if _has_key(side):
            if not _within(side, "kv_idx", ranges):
                return _OPAQUE
        elif not _within(side, "q_idx", ranges):
            if not _within(other, "kv_idx", ranges) or _has_q(side):
                return _OPAQUE
            # Past all that the other side can be, numbers compare as the nearest that it can.
            low, high = interval_of(other, ranges) or (0, 0)
            clamped = _clamped(_wide(side), (low - 1, high + 1), ranges)
            x, y = (clamped if each is side else each for each in (x, y))
    terms = _linear(y)
    for term, factor in _linear(x).items():
        terms[term] = terms.get(term, 0) - factor
    # x < y is now 0 < terms.
    factor = terms.pop(KEY, 0)
    if factor not in (1, -1):
        return _OPAQUE
    bound = _sum({term: -factor * count for term, count in terms.items()})
    if bound is None:
        return _OPAQUE
    # kv < bound, or bound < kv; one more where the other bound is the one that is included.
    if (op == "le") is (factor == -1):
        bound = make("add", "int64", (bound, const(1, "int64")))
    return _Span(high=bound, exact=True) if factor == -1 else _Span(low=bound, exact=True)


def _linear(expr: Expr) -> dict[Expr, int]:
    """An integer as a sum of other Exprs, each so many times."""
    if expr.op == "cast" and is_int(expr.args[0].dtype) and (_has_key(expr) or _has_q(expr)):
        return _linear(expr.args[0])
    if expr.op in ("add", "sub", "neg") and (_has_key(expr) or _has_q(expr)):
        signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[expr.op]
        found: dict[Expr, int] = {}
        for sign, arg in zip(signs, expr.args, strict=True):
            for term, factor in _linear(arg).items():
                found[term] = found.get(term, 0) + sign * factor
        return found
    return {_wide(expr): 1}


def _sum(terms: Mapping[Expr, int]) -> Expr | None:
    """The sum of terms; None where it could fall as q_idx grows."""
    total = const(0, "int64")
    for term, factor in sorted(terms.items(), key=lambda each: (-each[1], each[0].order)):
        if factor == 0:
            continue
        if factor not in (1, -1) or _has_key(term) or (factor < 0 and _has_q(term)):
            return None
        if not _rises(term):
            return None
        total = make("add" if factor > 0 else "sub", "int64", (total, term))
    return total


def _rises(expr: Expr) -> bool:
    """Whether an integer never falls as q_idx grows, judged operation by operation."""
    if not _has_q(expr) or expr.op == "var":
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


def _within(expr: Expr, name: str, ranges: Mapping[str, Interval]) -> bool:
    """Whether an expression, and what in it depends on a variable, stays far from wrapping."""
    found = intervals_of(expr, ranges)
    for node in depending(walk(expr), (name,)) | {expr}:
        limits = found[node]
        if limits is None or max(map(abs, limits)) > LARGE:
            return False
        if node.args and node.op != "load" and limits == dtype_range(node.dtype):
            return False  # it may wrap
    return True


def _wide(expr: Expr) -> Expr:
    return expr if expr.dtype == "int64" else make("cast", "int64", (expr,))


def _has_key(expr: Expr) -> bool:
    return _has(expr, "kv_idx")


def _has_q(expr: Expr) -> bool:
    return _has(expr, "q_idx")


def _has(expr: Expr, name: str) -> bool:
    return any(node.op == "var" and node.value == name for node in walk(expr))
