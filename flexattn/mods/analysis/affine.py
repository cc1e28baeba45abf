"""The dependence of an Expr on positions: its affine form in them, its slope, its diagonals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexattn.mods.analysis.intervals import Intervals, dtype_range
from flexattn.mods.expr import Expr, const, integer, reads, terms_of, walk
from flexattn.mods.ops import Range, is_int
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
            rest = applied("mul", rest, integer(factor))
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


def affine_forms(
    roots: tuple[Expr, ...], ranges: Mapping[str, Range] | None
) -> dict[Expr, Affine]:
    """The integer nodes that are affine in q_idx and kv_idx, where these stay in their ranges.

    Sums of 64 bits are taken not to wrap; a narrower one has a form where its interval says so.
    ranges: None for forms modulo 2^32, which a sum of 32 bits has though it wraps.
    """
    interval = None if ranges is None else Intervals(ranges)

    def wraps(node: Expr) -> bool:
        if interval is None:
            return node.dtype not in ("int32", "int64")
        return node.dtype != "int64" and interval(node) == dtype_range(node.dtype)

    forms: dict[Expr, Affine] = {}
    for node in walk(*roots):
        if not is_int(node.dtype):
            continue
        if node.op == "const":
            form: Affine | None = Affine(number=int(node.value or 0))
        elif not reads(node, "score", "q_idx", "kv_idx"):
            form = Affine(rest=make("cast", "int64", (node,)))
        elif wraps(node):
            form = None
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
    """
    sizes = {"q_idx": rows, "kv_idx": keys}
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
    nothing is said of integers that may wrap.
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
    forms = affine_forms((expr,), None)
    same: dict[Expr, bool] = {}
    for node in walk(expr):
        compared = [forms.get(arg) for arg in node.args] if node.op in _COMPARE else [None]
        if node in forms:
            same[node] = forms[node].relative
        elif None not in compared:
            same[node] = len({form.q + form.kv for form in compared if form}) == 1
        else:
            same[node] = node.op != "var" and all(same[arg] for arg in node.args)
    return same[expr]


def _is_number(dtype: str) -> bool:
    return is_int(dtype) or dtype in ("float32", "float64")
