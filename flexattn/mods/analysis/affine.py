"""The dependence of an Expr on positions: its affine form in them, its slope, its diagonals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce

from flexattn.mods.analysis.intervals import Intervals, dtype_range
from flexattn.mods.expr import Expr, const, integer, reads, terms_of, walk
from flexattn.mods.ops import Range, is_int
from flexattn.mods.simplify import applied, make

# Past every key, and so far from the ends of 64 bits that positions can be added.
LARGE = 2**40
_ROW, KEY = (Expr("var", "int64", (), name) for name in ("q_idx", "kv_idx"))
_MOVING = ("score", "q_idx", "kv_idx")
# A sum of more terms is a term itself: each step of a long chain would copy all before it.
_TERMS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """An integer as a sum of int64 Exprs, each so many times, and a number that is known."""

    terms: Mapping[Expr, int]
    number: int = 0

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """self + times * other."""
        terms = dict(self.terms)
        for term, factor in other.terms.items():
            terms[term] = terms.get(term, 0) + times * factor
        kept = {term: factor for term, factor in terms.items() if factor}
        return Affine(kept, self.number + times * other.number)

    def times(self, factor: int) -> Affine:
        """factor * self."""
        return Affine({}).plus(self, factor)

    @property
    def q(self) -> int:
        """How many times it has q_idx."""
        return self.terms.get(_ROW, 0)

    @property
    def kv(self) -> int:
        """How many times it has kv_idx."""
        return self.terms.get(KEY, 0)

    @property
    def positional(self) -> bool:
        """True if positions reach it by themselves alone: no other term reads one."""
        return not any(reads(term, *_MOVING) for term in self.terms if term not in (_ROW, KEY))

    @property
    def relative(self) -> bool:
        """True if it depends on kv_idx - q_idx alone, where it is positional."""
        return self.q + self.kv == 0

    @property
    def rest(self) -> Expr | None:
        """The terms that are no position; None for 0."""
        rest = {term: factor for term, factor in self.terms.items() if term not in (_ROW, KEY)}
        scaled = (x if n == 1 else applied("mul", x, integer(n)) for x, n in rest.items())
        return reduce(partial(applied, "add"), scaled) if rest else None


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


class Forms:
    """Which sum an integer is; each node is looked at once.

    Sums of 64 bits are taken not to wrap; a narrower one is opened where its interval says that it
    does not. interval: None for forms modulo 2^32, which a sum of 32 bits has though it wraps.
    """

    def __init__(self, interval: Intervals | None) -> None:
        self.interval = interval
        self.known: dict[Expr, Affine] = {}

    def __call__(self, expr: Expr) -> Affine:
        known = self.known
        for node in walk(expr, enter=lambda node: node not in known):
            if node not in known and is_int(node.dtype):
                known[node] = self._form(node)
        return known[expr]

    def _form(self, node: Expr) -> Affine:
        if node.op == "const":
            return Affine({}, int(node.value or 0))
        whole = Affine({make("cast", "int64", (node,)): 1})
        args = [self.known[arg] for arg in node.args if is_int(arg.dtype)]
        opened = reads(node, *_MOVING) and not self._wraps(node) and len(args) == len(node.args)
        if not opened or node.op not in ("add", "sub", "neg", "mul", "cast"):
            return whole
        x, y = args[0], args[-1]
        if node.op == "mul":
            found = whole if y.terms else x.times(y.number)
        elif node.op in ("add", "sub"):
            found = x.plus(y, 1 if node.op == "add" else -1)
        else:
            found = x if node.op == "cast" else x.times(-1)
        return found if len(found.terms) <= _TERMS else whole

    def _wraps(self, node: Expr) -> bool:
        if self.interval is None:
            return node.dtype not in ("int32", "int64")
        return node.dtype != "int64" and self.interval(node) == dtype_range(node.dtype)


def affine_forms(roots: tuple[Expr, ...], ranges: Mapping[str, Range]) -> dict[Expr, Affine]:
    """The integer nodes that are affine in q_idx and kv_idx, where these stay in their ranges."""
    forms = Forms(Intervals(ranges))
    nodes = [node for node in walk(*roots) if is_int(node.dtype)]
    return {node: form for node in nodes if (form := forms(node)).positional}


def _difference(term: Expr, forms: Forms) -> Affine | None:
    """What a comparison of integers compares with 0, if that is affine in positions."""
    if term.op not in _COMPARE or not is_int(term.args[0].dtype):
        return None
    left, right = map(forms, term.args)
    found = left.plus(right, -1)
    return found if found.positional else None


def comparison_of(term: Expr, forms: Forms) -> Comparison | None:
    """A comparison of two integers as one of their difference with 0."""
    form = _difference(term, forms)
    return None if form is None or term.op == "ne" else Comparison(term.op, form)


def edges(mask: Expr, forms: Forms) -> tuple[Edge, ...]:
    """The bounds that follow from a mask's conjunction of comparisons, each linear in kv_idx.

    Sound and not complete: a term that is anything else bounds nothing.
    """
    return tuple(edge for term in terms_of(mask, "and") for edge in _edges(term, forms))


def gap_edges(mask: Expr, forms: Forms) -> tuple[Edge, Edge] | None:
    """Bounds between which a mask keeps no key: that of its first keys, and that of the keys that
    it keeps again, as of a window; None where nothing is known of such. Both may be in any order.
    """
    for term in terms_of(mask, "and"):
        arms = [edges(each, forms) for each in term.args] if term.op == "or" else []
        for first, again in zip(arms, arms[::-1], strict=True):
            high = next((edge for edge in first if not edge.lowest), None)
            low = next((edge for edge in again if edge.lowest), None)
            if high is not None and low is not None:
                return high, low
    return None


def free_edges(mask: Expr, forms: Forms) -> tuple[Edge, ...] | None:
    """Bounds between which a mask keeps every key, None where there may be no such keys."""
    found: dict[Expr, tuple[Edge, ...] | None] = {}
    for node in walk(mask, enter=lambda node: node.op in ("and", "or")):
        if node.op not in ("and", "or") or node.dtype != "bool":
            found[node] = _edges(node, forms) or None
        elif node.op == "or":  # one that holds is enough: a window's, not that of first keys
            able = [each for term in node.args if (each := found[term]) is not None]
            window = gap_edges(node, forms) is not None
            able.sort(key=lambda each: window and not any(edge.lowest for edge in each))
            found[node] = able[0] if able else None
        else:
            x, y = (found[term] for term in node.args)
            found[node] = None if x is None or y is None else tuple(dict.fromkeys(x + y))
    return found[mask]


def _edges(term: Expr, forms: Forms) -> tuple[Edge, ...]:
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
    found = None if rest is None else Intervals({})(rest)
    if rest is None or (found is not None and -LARGE <= found[0] and found[1] <= LARGE):
        return rest
    high = applied("minimum", rest, integer(LARGE))
    return applied("maximum", high, integer(-LARGE))


# What does not change over a tile of one head.
FREE: frozenset[str] = frozenset(("b", "h"))
_COMPARE = ("eq", "ne", "lt", "le")
# 32 times the longest length is past int32.
STEPS = 31


def same_in_tiles(expr: Expr, rows: int, keys: int) -> bool:
    """True if an Expr is one value in every tile of rows x keys that begins at a multiple of both.

    So it is where positions are only divided by numbers that these divide: tables of blocks.
    rows: 0 asks about the keys of each row alone.
    """
    sizes = {"q_idx": rows, "kv_idx": keys} if rows else {"kv_idx": keys}
    for node in walk(expr):
        for place, arg in enumerate(node.args):
            size = sizes.get(str(arg.value)) if arg.op == "var" else None
            if size is not None and not (place == 0 and _divides(size, node)):
                return False
    return expr.op != "var" or str(expr.value) not in sizes


def _divides(size: int, node: Expr) -> bool:
    if node.op != "floor_div" or node.args[1].op != "const":
        return False
    divisor = int(node.args[1].value or 0)
    return divisor > 0 and divisor % size == 0


def slope_of(expr: Expr, name: str) -> Expr | None:
    """The k of expr(x) = expr(x0) + k (x - x0) in the variable `name`; None where there is none.

    k reads no position. It has expr's dtype, and is the constant 0 where expr does not read the
    variable. Exact over the reals: a cast of an integer to a float32 is taken as its value, and
    integers that may wrap are not covered.
    """
    done: dict[Expr, Expr | None] = {}
    for node in walk(expr):
        if name not in node.variables:
            zero = make("cast", node.dtype, (integer(0),))
            done[node] = zero if _is_number(node.dtype) else None
        elif node.op == "var":
            done[node] = const(1, node.dtype)
        else:
            found = _slope(node, [done[arg] for arg in node.args], name)
            done[node] = found if found is None or _stays(node.dtype, found) else None
    return done[expr]


def _stays(dtype: str, slope: Expr) -> bool:
    """True if numbers of a dtype that rise by this much at every position do not wrap or round."""
    if not is_int(dtype):
        return dtype in ("float32", "float64")
    steps = abs(int(slope.value or 0)) if slope.op == "const" else None
    return dtype == "int64" or (dtype == "int32" and steps is not None and steps <= STEPS)


def _slope(node: Expr, slopes: list[Expr | None], name: str) -> Expr | None:
    found = [slope for slope in slopes if slope is not None]
    if len(found) < len(slopes):
        return None
    if node.op in ("add", "sub", "neg"):
        return make(node.op, node.dtype, found)
    if node.op == "cast" and _is_number(node.dtype) and is_int(node.args[0].dtype):
        return make("cast", node.dtype, found)
    if node.op == "mul":
        for i, (x, y) in enumerate((node.args, node.args[::-1])):
            # The other factor must be the same for the whole tile, or the slope would not be.
            if name in x.variables and y.variables <= FREE:
                return make("mul", node.dtype, (found[i], y))
    if node.op == "div" and node.args[1].variables <= FREE and not is_int(node.dtype):
        return make("div", node.dtype, (found[0], node.args[1]))
    return None


def along_diagonals(expr: Expr) -> bool:
    """True if expr depends on positions through q_idx - kv_idx alone, and not on the score.

    By induction over the nodes: each is an integer a q + c k + (what is the same for the tile), or
    has the same value along a diagonal, or neither. A sum a + c of 0 makes the first the second; a
    comparison of two affine nodes is one of their difference.
    """
    forms = Forms(None)
    same: dict[Expr, bool] = {}
    for node in walk(expr):
        form = forms(node) if is_int(node.dtype) else _difference(node, forms)
        if form is not None and form.positional:
            same[node] = form.relative
        else:
            same[node] = node.op != "var" and all(same[arg] for arg in node.args)
    return same[expr]


def _is_number(dtype: str) -> bool:
    return is_int(dtype) or dtype in ("float32", "float64")
