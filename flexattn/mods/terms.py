"""Terms: a score_mod as a function of the score plus what each row, key and diagonal adds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flexattn.mods import rules
from flexattn.mods.analysis.dependence import Variables, slope_of
from flexattn.mods.expr import VARS, Expr, Mod, pretty, walk
from flexattn.mods.rules import (
    row_slope,
)
from flexattn.mods.simplify import make, rebuilt

# How many nodes more than twice its own a score_mod's core may be rewritten to.
_GROWTH = 64
# How many applied rules are told.
_TOLD = 64

ALL = frozenset(rules.REWRITES)
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
    inner: Expr = rules.ONE
    outer: Expr = rules.ONE
    row: Expr | None = None
    row_slope: Expr | None = None
    column: Expr | None = None
    diagonal: Expr | None = None
    rest: Expr | None = None
    keep: Expr | None = None
    steps: tuple[AppliedRule, ...] = ()

    @property
    def linear(self) -> bool:
        """Whether the score is only scaled."""
        return self.core is SCORE

    @property
    def leaves_loop(self) -> bool:
        """Whether rows get something back after the loop over keys."""
        return self.row is not None or self.row_slope is not None

    @property
    def added(self) -> tuple[Expr, ...]:
        """The terms that are added to each score inside the loop."""
        terms = (self.column, self.diagonal, self.rest)
        return tuple(term for term in terms if term is not None)

    @property
    def step(self) -> Expr | None:
        """What each key adds more than the one before, where that is the same along a tile.

        None too where the score is more than scaled, or where something else is added in the loop.
        """
        if self.column is None or self.added != (self.column,) or not self.linear:
            return None
        return slope_of(self.column, "kv_idx", Variables()) if self.positive(self.outer) else None

    @property
    def rise(self) -> rules.Rise | None:
        """How scores rise from each key of a row to the next, where they are else only scaled.

        None too where that is known not to be above 0, and where the score_mod masks keys.
        """
        if not self.linear or self.keep is not None or self.diagonal is not None:
            return None
        if not self.positive(self.outer):
            return None
        found = rules.rise(self.added, Variables())
        if found is None or (found.step.op == "const" and not self.positive(found.step)):
            return None
        return found

    def positive(self, number: Expr) -> bool:
        """Whether a factor is known to keep the order of scores."""
        return number.op == "const" and 0 < float(number.value or 0) < math.inf


def _whole(mod: Mod) -> Terms:
    """The score_mod as it is."""
    return Terms(mod.expr)


@lru_cache(maxsize=512)
def split(mod: Mod, allowed: frozenset[str] = ALL) -> Terms:
    """A score_mod's terms, by the rules that are allowed; at most a few milliseconds, once."""
    return _Split(mod, allowed).run()


class _Split:
    def __init__(self, mod: Mod, allowed: frozenset[str]) -> None:
        self.expr, self.allowed = mod.expr, allowed
        self.reads = Variables()
        self.steps: dict[tuple[str, Expr], None] = {}
        self.parts: dict[str, Expr] = {}

    def run(self) -> Terms:
        keep, expr = None, self.expr
        if "mask" in self.allowed:
            keep, expr = rules.masked(expr, self.reads)
        if keep is not None:
            self._applied("mask", keep)
        scored: list[rules.Term] = []
        for term in rules.spread_terms(expr, self.allowed, self.reads, self._applied):
            if "score" in self.reads(term.value):
                scored.append(term)
            else:
                self._add(rules.times(term.factor, term.value))
        core, inner, outer = self._core(scored)
        parts = self.parts
        return Terms(
            core, inner, outer,
            parts.get("row"), parts.get("row_slope"), parts.get("column"), parts.get("diagonal"),
            parts.get("rest"), keep, self._told(),
        )  # fmt: skip

    def _add(self, term: Expr) -> None:
        """Put a term without the score where it is cheapest."""
        where = rules.place(term, self.allowed, self.reads)
        if where != "rest":
            self._applied(where, term)
        sloped = row_slope(term, self.reads) if where == "row_slope" else None
        if sloped is None:
            self._sum(where, term)
        else:
            self._sum("row_slope", sloped.slope)
            self._sum("column", sloped.column)

    def _sum(self, name: str, term: Expr) -> None:
        known = self.parts.get(name)
        self.parts[name] = term if known is None else make("add", rules.FLOAT, (known, term))

    def _applied(self, rule: str, to: Expr) -> None:
        if len(self.steps) < _TOLD:
            self.steps[rule, to] = None

    def _told(self) -> tuple[AppliedRule, ...]:
        steps = (AppliedRule(rule, pretty(to).replace("\n", "; ")) for rule, to in self.steps)
        return tuple(dict.fromkeys(steps))

    def _core(self, scored: list[rules.Term]) -> tuple[Expr | None, Expr, Expr]:
        """(core, inner, outer) of the terms that the score reaches."""
        if not scored:
            return None, rules.ONE, rules.ONE
        factors = [term.factor for term in scored if term.value is SCORE]
        # Without the rule a sign or a second score stays where it is: a bare score has no factor.
        scales = "scale" in self.allowed
        if (scales or factors == [rules.ONE]) and len(factors) == len(scored):
            total = factors[0]
            for factor in factors[1:]:
                total = make("add", rules.FLOAT, (total, factor))
            if total is not rules.ONE:
                self._applied("scale", total)
            return SCORE, rules.ONE, total
        outer = rules.ONE
        if len(scored) == 1 and scales:
            outer, scored = scored[0].factor, [rules.Term(rules.ONE, scored[0].value)]
        core = self._rebuilt(scored[0])
        for term in scored[1:]:
            core = make("add", rules.FLOAT, (core, self._rebuilt(term)))
        core, inner = self._unscaled(core)
        for number in (inner, outer):
            if number is not rules.ONE:
                self._applied("scale", number)
        return core, inner, outer

    def _rebuilt(self, term: rules.Term) -> Expr:
        """The term with what is linear in the score, inside of it, as factor * score + others."""
        done: dict[Expr, Expr] = {}
        for node in walk(term.value):
            args = tuple(done[arg] for arg in node.args)
            new = make(node.op, node.dtype, args, node.value) if args else node
            done[node] = self._linear(new) if new.op in ("mul", "div", "neg") else new
        found = done[term.value]
        if sum(1 for _ in walk(found)) > 2 * len(done) + _GROWTH:  # sums that were shared
            found = term.value
        return rules.times(term.factor, found)

    def _linear(self, node: Expr) -> Expr:
        if "scale" not in self.allowed or "score" not in self.reads(node):
            return node
        terms = rules.spread_terms(node, self.allowed, self.reads, self._applied)
        found: Expr | None = None
        for term in terms:
            new = rules.times(term.factor, term.value)
            found = new if found is None else make("add", rules.FLOAT, (found, new))
        return found or node

    def _unscaled(self, core: Expr) -> tuple[Expr, Expr]:
        """(core of s = inner * score, inner), where every read of the score is that product."""
        if "scale" not in self.allowed:
            return core, rules.ONE
        users = {node for node in walk(core) if SCORE in node.args}
        if len(users) != 1:
            return core, rules.ONE
        (user,) = users
        others = [arg for arg in user.args if arg is not SCORE]
        if user.op != "mul" or len(others) != 1 or self.reads(others[0]) & {"score", "kv_idx"}:
            return core, rules.ONE
        return rebuilt(core, {user: SCORE}.get), others[0]
