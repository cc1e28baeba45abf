"""Affine forms: integers as sums of q_idx, kv_idx and what reads neither, and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexattn.mods.analysis.intervals import Intervals, dtype_range, interval_of
from flexattn.mods.expr import Expr, const, depending, reads, terms_of, walk
from flexattn.mods.ir.intervals import Range
from flexattn.mods.ops import is_int
from flexattn.mods.simplify import applied, make

# Past every key, and so far from the ends of 64 bits that positions can be added.
LARGE = 2**40


@dataclass(frozen=True, slots=True)
class Affine:
    """q * q_idx + kv * kv_idx + number + rest; rest is an int64 Expr of neither, None for 0."""

    q: int = 0
    kv: int = 0
    number: int = 0
    rest: Expr | None = None

    @property
    def relative(self) -> bool:
        """It depends on kv_idx - q_idx alone."""
        return self.q + self.kv == 0

    def plus(self, other: Affine) -> Affine:
        """self + other."""
        rest = self.rest or other.rest
        if self.rest is not None and other.rest is not None:
            rest = applied("add", self.rest, other.rest)
        return Affine(self.q + other.q, self.kv + other.kv, self.number + other.number, rest)

    def times(self, factor: int) -> Affine:
        """factor * self."""
        rest = self.rest
        if rest is not None and factor != 1:
            rest = applied("mul", rest, const(factor, "int64"))
        return Affine(self.q * factor, self.kv * factor, self.number * factor, rest)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A condition as `form op 0`, where op is lt, le or eq."""

    op: str
    form: Affine


@dataclass(frozen=True, slots=True)
class Edge:
    """A bound of the keys that a mask keeps: slope * q_idx + offset + rest.

    lowest: no key below it is kept; else: no key from it on. rest: an int64 Expr that the request
    and captured values decide, never the head; None for 0.
    """

    lowest: bool
    slope: int
    offset: int
    rest: Expr | None


def affine_forms(roots: tuple[Expr, ...], ranges: Mapping[str, Range]) -> dict[Expr, Affine]:
    """The integer nodes that are affine in q_idx and kv_idx, where these stay in their ranges.

    Sums of 64 bits are taken not to wrap; a narrower one has a form where its interval says so.
    """
    nodes = list(walk(*roots))
    moving = depending(nodes, ("score", "q_idx", "kv_idx"))
    interval = Intervals(ranges)
    forms: dict[Expr, Affine] = {}
    for node in nodes:
        if not is_int(node.dtype):
            continue
        if node.op == "const":
            form: Affine | None = Affine(number=int(node.value or 0))
        elif node not in moving:
            form = Affine(rest=make("cast", "int64", (node,)))
        elif node.dtype != "int64" and interval(node) == dtype_range(node.dtype):
            form = None  # it may wrap
        else:
            form = _affine(node, [forms.get(arg) for arg in node.args])
        if form is not None:
            forms[node] = form
    return forms


def _affine(node: Expr, args: list[Affine | None]) -> Affine | None:
    if node.op == "var":
        return Affine(int(node.value == "q_idx"), int(node.value == "kv_idx"))
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    if node.op == "add":
        return known[0].plus(known[1])
    if node.op == "sub":
        return known[0].plus(known[1].times(-1))
    if node.op == "neg":
        return known[0].times(-1)
    if node.op == "mul" and node.args[1].op == "const":
        return known[0].times(known[1].number)
    return known[0] if node.op == "cast" else None


def comparison_of(term: Expr, forms: Mapping[Expr, Affine]) -> Comparison | None:
    """A comparison of two affine integers as one of their difference; forms: of its operands."""
    if term.op not in ("lt", "le", "eq"):
        return None
    left, right = (forms.get(arg) for arg in term.args)
    if left is None or right is None:
        return None
    return Comparison(term.op, left.plus(right.times(-1)))


def edges(mask: Expr, forms: Mapping[Expr, Affine]) -> tuple[Edge, ...]:
    """The bounds that follow from a mask's conjunction of comparisons, each linear in kv_idx.

    Sound and not complete: a term that is anything else bounds nothing. forms: of its nodes.
    """
    return tuple(edge for term in terms_of(mask, "and") for edge in _edges(term, forms))


def free_edges(mask: Expr, forms: Mapping[Expr, Affine]) -> tuple[Edge, ...] | None:
    """Bounds between which a mask keeps every key, None where there may be no such keys."""
    found: dict[Expr, tuple[Edge, ...] | None] = {}
    for node in walk(mask, enter=lambda node: node.op in ("and", "or")):
        if node.op not in ("and", "or") or node.dtype != "bool":
            found[node] = _edges(node, forms) or None
        elif node.op == "or":  # one that holds is enough
            able = (found[term] for term in node.args)
            found[node] = next((each for each in able if each is not None), None)
        else:
            x, y = (found[term] for term in node.args)
            found[node] = None if x is None or y is None else tuple(dict.fromkeys(x + y))
    return found[mask]


def _edges(term: Expr, forms: Mapping[Expr, Affine]) -> tuple[Edge, ...]:
    """The bounds that one comparison makes."""
    found = comparison_of(term, forms)
    if found is None or found.form.kv not in (1, -1):
        return ()
    if found.form.rest is not None and reads(found.form.rest, "h"):
        return ()
    # Below 0, or at most 0, or both it and its negative at most 0.
    strict = int(found.op == "lt")
    both = (found.form, found.form.times(-1))
    return tuple(_edge(form, strict) for form in (both if found.op == "eq" else both[:1]))


def _edge(form: Affine, strict: int) -> Edge:
    if form.kv == -1:
        return Edge(True, form.q, form.number + strict, _bounded(form.rest))
    # kv_idx <= -(q + number + rest): the first key that is out is one more.
    other = form.times(-1)
    return Edge(False, other.q, other.number + 1 - strict, _bounded(other.rest))


def _bounded(rest: Expr | None) -> Expr | None:
    """A rest to which positions can be added in 64 bits: a length may say "no limit" by 2^63 - 1.

    Past LARGE it is past every key on either side.
    """
    found = None if rest is None else interval_of(rest, {})
    if rest is None or (found is not None and -LARGE <= found[0] and found[1] <= LARGE):
        return rest
    high = applied("minimum", rest, const(LARGE, "int64"))
    return applied("maximum", high, const(-LARGE, "int64"))
