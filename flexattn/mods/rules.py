"""The named rules that make a score_mod cheaper, each with its proof, and the terms they leave.

They hold over the reals with both infinities, except for rounding: what stands in a proof as equal
may differ in the last bits, which the accuracy gate judges. `flexattn render --explain` prints
those that were applied; kernel_options["RULES_OFF"] takes names of rules, or "all".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from flexattn.mods.analysis.affine import FREE, along_diagonals, same_in_tiles, slope_of
from flexattn.mods.expr import VARS, Expr, Mod, const, in_a_line, once, walk
from flexattn.mods.ops import OPS
from flexattn.mods.simplify import make, rebuilt

FLOAT = "float32"
_Place = Literal["row", "column", "row_slope", "diagonal", "rest"]
# Told of each rule that is applied, and to what.
Note = Callable[[str, Expr], None]
ONE = const(1.0, FLOAT)

REWRITES = {
    "mask": "where(c, x, -inf) is a mask c over x",
    "scale": "factors of the score, the softmax scale and log2(e) are one number",
    "reciprocal": "x / c is x * (1 / c)",
    "distribute": "c * (x + y) is c * x + c * y, where x or y has the score",
    "row": "what a row adds to all its scores leaves the loop and returns in lse and max_scores",
    "row_slope": "a term linear in q_idx is its value at a tile's first row, and a slope by row",
    "column": "what depends on kv_idx alone is computed once per key of a tile",
    "diagonal": "what depends on q_idx - kv_idx alone is computed once per diagonal of a tile",
    "decay_skip": "tiles of keys whose weights are proven to vanish in float32 are not visited",
}
# How many terms an expression is taken apart into, and in how many steps.
_TERMS, _STEPS = 32, 256
_COSTLY = frozenset(("load", *(op.name for op in OPS.values() if op.slow or op.result == "float")))


@dataclass(frozen=True, slots=True)
class Term:
    """factor * value: the factor reads neither the score nor a key."""

    factor: Expr
    value: Expr


@dataclass(frozen=True, slots=True)
class Rise:
    """The step from each key's term to the next one's.

    span: no number on the way to a term is larger; in it, q_idx and kv_idx are the lengths.
    """

    step: Expr
    span: Expr


def total(known: Expr | None, term: Expr) -> Expr:
    """A sum in float32 with one more term; known: of those before, None of none."""
    return term if known is None else make("add", FLOAT, (known, term))


def times(x: Expr, y: Expr) -> Expr:
    """x * y in float32; a factor of 1 is left out."""
    return y if x is ONE else x if y is ONE else make("mul", FLOAT, (x, y))


def masked(expr: Expr) -> tuple[Expr | None, Expr]:
    """Rule "mask": (where the score is kept, the score there).

    A lane of -inf has weight exp(-inf) = 0, and so has one that a mask removes; a row of nothing
    else gives zeros and an lse of -inf in both forms. The condition must not read the score: a
    mask is decided before there is one.
    """
    kept: Expr | None = None
    while expr.op == "where" and "score" not in expr.args[0].variables:
        condition, x, y = expr.args
        if _is_minus_infinity(x):
            condition, x, y = make("not", "bool", (condition,)), y, x
        if not _is_minus_infinity(y):
            break
        kept = condition if kept is None else make("and", "bool", (kept, condition))
        expr = x
    return kept, expr


def _reciprocal(divisor: Expr) -> Expr:
    """Rule "reciprocal": 1 / divisor, computed once.

    x / c = x * (1 / c) for every c but 0, where both are an infinity or NaN alike, and infinities,
    where both are 0 or NaN alike. It rounds twice instead of once.
    """
    return make("div", FLOAT, (ONE, divisor))


def spread_terms(expr: Expr, allowed: frozenset[str], note: Note) -> list[Term]:
    """Rules "scale" and "distribute": expr as a sum of terms, of which only values read the score.

    Sums and differences that the score reaches are taken apart. With "scale", a factor or divisor
    (rule "reciprocal") that reads neither score nor key goes to the term's factor, for
    c * (d * x) = (c * d) * x; over a sum of several terms only with "distribute". For c finite and
    not 0, c * (x + y) = c * x + c * y on the extended reals, NaN where either is; for other c too
    where the score is finite, except x + y = 0 times an infinity. What does not read the score is
    never taken apart: its own sums may cancel, and torch has rounded them so. An expr of more than
    32 terms stays whole: sums of sums that share theirs would have as many as 2 to their number.
    """
    pending = [Term(ONE, expr)]
    found: list[Term] = []
    noted: list[tuple[str, Expr]] = []
    for _ in range(_STEPS):
        if not pending or len(found) > _TERMS:
            break
        term = pending.pop()
        factor, node = term.factor, term.value
        opened = None
        if "score" in node.variables and node.dtype == FLOAT:
            opened = _opened(node, factor, allowed, lambda *told: noted.append(told))
        if opened is None:
            found.append(term)
        else:
            pending += reversed(opened)
    if pending or len(found) > _TERMS:
        return [Term(ONE, expr)]
    for told in noted:
        note(*told)
    return found


def _opened(node: Expr, factor: Expr, allowed: frozenset[str], note: Note) -> list[Term] | None:
    if node.op in ("add", "sub") and (factor is ONE or "distribute" in allowed):
        if factor is not ONE:
            note("distribute", times(factor, node))
        x, y = node.args
        sign = make("neg", FLOAT, (factor,)) if node.op == "sub" else factor
        return [Term(factor, x), Term(sign, y)]
    if "scale" not in allowed:
        return None
    if node.op == "neg":
        return [Term(make("neg", FLOAT, (factor,)), node.args[0])]
    if node.op == "mul":
        for x, y in (node.args, node.args[::-1]):
            if _leaves(y) and "score" in x.variables:
                return [Term(times(factor, y), x)]
    if node.op == "div" and "reciprocal" in allowed and _leaves(node.args[1]):
        note("reciprocal", node)
        return [Term(times(factor, _reciprocal(node.args[1])), node.args[0])]
    return None


def _leaves(factor: Expr) -> bool:
    return not factor.variables & {"score", "kv_idx"}


def place(term: Expr, allowed: frozenset[str]) -> _Place:
    """Rules "row" and "column", and which other one takes a term that does not read the score.

    "row": a term r that reads no key is the same for all scores of a row, and softmax does not see
    it: exp(x + r) / sum exp(y + r) = exp(x) / sum exp(y) for finite r. The row's maximum and
    log-sum-exp are those of x, plus r. For r = -inf every score is -inf: an empty row. For r = inf
    or NaN every score is inf or NaN, and so torch's row is NaN. A score of -inf in every lane that
    the mask keeps is an empty row whatever r is; there torch has NaN where r is inf or NaN.
    "column": a term that reads no query is computed and multiplied by log2(e) once for each key
    of a tile, and added by the instruction that scales the score: a * x + c in one rounding.
    """
    read = term.variables
    if "kv_idx" not in read:
        return "row" if "row" in allowed else "rest"
    if "q_idx" not in read:
        return "column" if "column" in allowed else "rest"
    if {"row_slope", "row", "column"} <= allowed and row_slope(term) is not None:
        return "row_slope"
    return "diagonal" if "diagonal" in allowed and diagonal(term) else "rest"


def row_slope(term: Expr) -> Expr | None:
    """Rule "row_slope": the s of t(q, k) = t(r, k) + s (q - r), which reads no position.

    r is any row. For a t that is affine in q. The first part is a value for each key, the second
    is constant over a row, so softmax does not see it: exp(x + c) / sum exp(y + c) = exp(x) / sum
    exp(y). With r a row of the tile the numbers stay as small as torch's own: for the keys that
    matter to q, t(r, k) differs from t(q, k) by at most s times the tile's height, so the
    exponent's error is 2^-24 s BLOCK_M, far below what rounding P to 16 bits costs. In float32 it
    would count, so the rule is for 16-bit inputs alone. A slope of an infinity or NaN makes its
    rows NaN.
    """
    slope = slope_of(term, "q_idx")
    return None if slope is None else make("cast", FLOAT, (slope,))


def rise(terms: Iterable[Expr]) -> Rise | None:
    """Rule "decay_skip": how much more each key adds to its row's score than the key before it.

    Where it is above 0, as ALiBi's slope is, keys far behind one that the row keeps count nothing.
    In base 2 let s(r, k) = c (q_r . k_k) + d k + f(r) with d > 0, and a be a key that row r keeps.
    By Cauchy and Schwarz |c (q_r . k_k)| <= N = |c| max|q| max|k|, so s(r, a) >= d a - N + f(r)
    and s(r, e) <= d e + N + f(r): beside its row's maximum e weighs at most
    2^(2 N - d (a - e)). Where d (a - e) > 2 N + 150 that is below 2^-150, which is 0 in float32,
    and beside the maximum's own weight of 1 the row's sum and its weighted values are without it
    what they are with it. If a is kept by all rows of a tile, keys below a - (2 N + 150) / d need
    not be visited; nor by a backward, whose weights exp(S' - lse) are no larger than beside the
    maximum. N is measured in each call, for each head, with one percent for rounding; a NaN
    or an infinity in q, k or d, and d <= 0, leave every key where it is. What is not visited is
    not read: NaN and infinities of V there do not reach the output.

    Terms are rounded, too: where their span is below 2^24 by less than 2^5, which leaves 2^-86 of
    the bound. For that they are affine in both positions.
    """
    step: Expr | None = None
    span: Expr | None = None
    for term in terms:
        slope = slope_of(term, "kv_idx")
        if slope is None or slope_of(term, "q_idx") is None:
            return None
        step, span = total(step, make("cast", FLOAT, (slope,))), total(span, _span(term))
    return None if step is None or span is None else Rise(step, span)


def _span(term: Expr) -> Expr:
    """An affine term as a sum of what is added on the way to it, none of which is larger."""

    def added(node: Expr, args: Sequence[Expr]) -> Expr:
        if node.op == "var" or not node.variables & {"q_idx", "kv_idx"}:
            return make("abs", FLOAT, (make("cast", FLOAT, (node,)),))
        if node.op in ("neg", "cast"):
            return args[0]
        return make("add" if node.op == "sub" else node.op, FLOAT, args)

    return rebuilt(term, added)


def diagonal(term: Expr) -> bool:
    """Rule "diagonal": whether a tile's strip of diagonals should hold the term's values.

    A tile of M rows and N keys has M + N - 1 differences q - k, so a t(q - k) has as many values,
    computed (and read, and checked against the table's bounds) once each instead of M N times, and
    t(q - k) is then read from shared memory. Nothing is rounded. Worth it only for what costs more
    than that read.
    """
    if not along_diagonals(term):
        return False
    pending, seen = [term], {term}
    while pending:
        node = pending.pop()
        if node.variables <= FREE:
            continue
        if node.op in _COSTLY:
            return True
        fresh = [arg for arg in node.args if arg not in seen]
        seen.update(fresh)
        pending += fresh
    return False


def _is_minus_infinity(node: Expr) -> bool:
    return node.op == "const" and node.value == -math.inf


# How many nodes more than twice its own a score_mod's core may be rewritten to.
_GROWTH = 64
# How many applied rules are told.
_TOLD = 64

ALL = frozenset(REWRITES)
SCORE = Expr("var", VARS["score"], (), "score")


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rule that was applied, and to what."""

    rule: str
    to: str


@dataclass(frozen=True, slots=True)
class Terms:
    """A score_mod as outer * core(inner * score) + row + row_slope * (q_idx - r) + column + ....

    r is any row; the kernels take the first of a tile. core reads `score`, which stands for
    inner * score, and may read all else; None: the score is not read. inner, outer: read neither
    the score nor a key. row: reads no key. row_slope: reads no position. column: reads no score,
    and q_idx stands for r in it. diagonal: the same along a diagonal. rest: all other terms.
    keep: a bool that reads no score; where it is false the score is -inf. None: no such term.
    """

    core: Expr | None
    inner: Expr = ONE
    outer: Expr = ONE
    row: Expr | None = None
    row_slope: Expr | None = None
    column: Expr | None = None
    diagonal: Expr | None = None
    rest: Expr | None = None
    keep: Expr | None = None
    steps: tuple[AppliedRule, ...] = ()

    @property
    def linear(self) -> bool:
        """True if the score is only scaled."""
        return self.core is SCORE

    @property
    def capped(self) -> bool:
        """True if the loop does no more with scores than cap them by tanh."""
        core = self.core
        return core is not None and core.op == "tanh" and core.args == (SCORE,) and not self.added

    @property
    def leaves_loop(self) -> bool:
        """True if rows get something back after the loop over keys."""
        return self.row is not None or self.row_slope is not None

    @property
    def added(self) -> tuple[Expr, ...]:
        """The terms that are added to each score inside the loop."""
        terms = (self.column, self.diagonal, self.rest)
        return tuple(term for term in terms if term is not None)

    @property
    def rise(self) -> Rise | None:
        """The rise of scores from each key of a row to the next, where they are else only scaled.

        None too where that is known not to be above 0, and where the score_mod masks keys.
        """
        if not self.linear or self.keep is not None or self.diagonal is not None:
            return None
        if not self.positive(self.outer):
            return None
        found = rise(self.added)
        if found is None or (found.step.op == "const" and not self.positive(found.step)):
            return None
        return found

    def of_blocks(self, rows: int, keys: int) -> tuple[Terms, Expr]:
        """Terms without the score's factor that is one number in each tile of rows x keys, and it.

        The factor is ONE where there is none that reads a key.
        """
        factor, node = ONE, SCORE
        while self.core is not None and self.keep is None:
            users = [each for each in walk(self.core) if node in each.args]
            if [(each.op, each.dtype) for each in users] != [("mul", FLOAT)]:
                break
            x, y = users[0].args
            other = y if x is node else x
            if "score" in other.variables or not same_in_tiles(other, rows, keys):
                break
            factor, node = times(factor, other), users[0]
        if self.core is None or "kv_idx" not in factor.variables:
            return self, ONE
        core = rebuilt(self.core, lambda each, _: SCORE if each is node else None)
        return replace(self, core=core), factor

    def positive(self, number: Expr) -> bool:
        """True if a factor is known to keep the order of scores."""
        return number.op == "const" and 0 < float(number.value or 0) < math.inf


@once
def split(mod: Mod, allowed: frozenset[str] = ALL) -> Terms:
    """A score_mod's terms, by the rules that are allowed; at most a few milliseconds, once."""
    return _Split(mod, allowed).run()


class _Split:
    def __init__(self, mod: Mod, allowed: frozenset[str]) -> None:
        self.expr, self.allowed = mod.expr, allowed
        self.steps: dict[tuple[str, Expr], None] = {}
        self.parts: dict[str, Expr] = {}

    def run(self) -> Terms:
        keep, expr = None, self.expr
        if "mask" in self.allowed:
            keep, expr = masked(expr)
        if keep is not None:
            self._applied("mask", keep)
        scored: list[Term] = []
        for term in spread_terms(expr, self.allowed, self._applied):
            if "score" in term.value.variables:
                scored.append(term)
            else:
                self._add(times(term.factor, term.value))
        core, inner, outer = self._core(scored)
        return Terms(core, inner, outer, keep=keep, steps=self._told(), **self.parts)

    def _add(self, term: Expr) -> None:
        """Put a term without the score where it is cheapest."""
        where = place(term, self.allowed)
        if where != "rest":
            self._applied(where, term)
        slope = row_slope(term) if where == "row_slope" else None
        if slope is not None:
            self._sum("row_slope", slope)
        self._sum(where if slope is None else "column", term)

    def _sum(self, name: str, term: Expr) -> None:
        self.parts[name] = total(self.parts.get(name), term)

    def _applied(self, rule: str, to: Expr) -> None:
        if len(self.steps) < _TOLD:
            self.steps[rule, to] = None

    def _told(self) -> tuple[AppliedRule, ...]:
        steps = (AppliedRule(rule, in_a_line(to)) for rule, to in self.steps)
        return tuple(dict.fromkeys(steps))

    def _core(self, scored: list[Term]) -> tuple[Expr | None, Expr, Expr]:
        """(core, inner, outer) of the terms that the score reaches."""
        if not scored:
            return None, ONE, ONE
        factors = [term.factor for term in scored if term.value is SCORE]
        # Without the rule a sign or a second score stays where it is: a bare score has no factor.
        scales = "scale" in self.allowed
        if (scales or factors == [ONE]) and len(factors) == len(scored):
            scale = reduce(total, factors)
            if scale is not ONE:
                self._applied("scale", scale)
            return SCORE, ONE, scale
        outer = ONE
        if len(scored) == 1 and scales:
            outer, scored = scored[0].factor, [Term(ONE, scored[0].value)]
        core, inner = self._unscaled(reduce(total, map(self._rebuilt, scored)))
        for number in (inner, outer):
            if number is not ONE:
                self._applied("scale", number)
        return core, inner, outer

    def _rebuilt(self, term: Term) -> Expr:
        """The term with what is linear in the score, inside of it, as factor * score + others."""
        found = rebuilt(term.value, self._linear)
        size, before = (sum(1 for _ in walk(each)) for each in (found, term.value))
        if size > 2 * before + _GROWTH:  # sums that were shared
            found = term.value
        return times(term.factor, found)

    def _linear(self, node: Expr, args: Sequence[Expr]) -> Expr:
        node = make(node.op, node.dtype, args, node.value)
        scaled = node.op in ("mul", "div", "neg") and "score" in node.variables
        if not scaled or "scale" not in self.allowed:
            return node
        terms = spread_terms(node, self.allowed, self._applied)
        return reduce(total, [times(term.factor, term.value) for term in terms])

    def _unscaled(self, core: Expr) -> tuple[Expr, Expr]:
        """(core of s = inner * score, inner), where every read of the score is that product."""
        if "scale" not in self.allowed:
            return core, ONE
        users = {node for node in walk(core) if SCORE in node.args}
        if len(users) != 1:
            return core, ONE
        (user,) = users
        others = [arg for arg in user.args if arg is not SCORE]
        if user.op != "mul" or len(others) != 1 or others[0].variables & {"score", "kv_idx"}:
            return core, ONE
        return rebuilt(core, lambda node, _: SCORE if node is user else None), others[0]
