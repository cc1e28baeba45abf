"""How an Expr depends on positions: the variables it reads, its slope in one, its diagonals."""

from __future__ import annotations

from flexattn.mods.expr import Expr, const, walk
from flexattn.mods.ops import is_int
from flexattn.mods.simplify import make

# What does not change over a tile of one head.
FREE: frozenset[str] = frozenset(("b", "h"))
_COMPARE = ("eq", "ne", "lt", "le")
# 32 times the longest length is past int32.
STEPS = 31


class Variables:
    """The variables that reach an Expr."""

    def __call__(self, expr: Expr) -> frozenset[str]:
        return expr.variables


def same_in_tiles(expr: Expr, rows: int, keys: int) -> bool:
    """Whether an Expr is one value in every tile of rows x keys that begins at a multiple of both.

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


def slope_of(expr: Expr, name: str, reads: Variables) -> Expr | None:
    """The k of expr(x) = expr(x0) + k (x - x0) in the variable `name`; None where there is none.

    k reads no position. It has expr's dtype, and is the constant 0 where expr does not read the
    variable. Exact over the reals: a cast of an integer to a float32 is taken as its value, and
    nothing is said of integers that may wrap.
    """
    done: dict[Expr, Expr | None] = {}
    for node in walk(expr):
        if name not in reads(node):
            done[node] = _zero(node.dtype) if _is_number(node.dtype) else None
        elif node.op == "var":
            done[node] = const(1, node.dtype)
        else:
            found = _slope(node, [done[arg] for arg in node.args], name, reads)
            done[node] = found if found is None or _stays(node.dtype, found) else None
    return done[expr]


def _stays(dtype: str, slope: Expr) -> bool:
    """Whether numbers of a dtype that rise by this much at every position are what they say."""
    if not is_int(dtype):
        return dtype in ("float32", "float64")
    steps = abs(int(slope.value or 0)) if slope.op == "const" else None
    return dtype == "int64" or (dtype == "int32" and steps is not None and steps <= STEPS)


def _slope(node: Expr, slopes: list[Expr | None], name: str, reads: Variables) -> Expr | None:
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
            if name in reads(x) and reads(y) <= FREE:
                return make("mul", node.dtype, (found[i], y))
    if node.op == "div" and reads(node.args[1]) <= FREE and not is_int(node.dtype):
        return make("div", node.dtype, (found[0], node.args[1]))
    return None


def along_diagonals(expr: Expr) -> bool:
    """Whether expr depends on q_idx and kv_idx through q_idx - kv_idx alone, and not on the score.

    By induction over the nodes: each is an integer a q + c k + (what is the same for the tile), or
    has the same value along a diagonal, or neither. A sum a + c of 0 makes the first the second; a
    comparison of two affine nodes is one of their difference.
    """
    found: dict[Expr, tuple[int, int] | bool] = {}
    for node in walk(expr):
        found[node] = _diagonal(node, [found[arg] for arg in node.args])
    return _same_along(found[expr])


def _diagonal(node: Expr, args: list[tuple[int, int] | bool]) -> tuple[int, int] | bool:
    """Coefficients of q and k; or whether the value is the same along a diagonal."""
    if node.op == "var":
        places = {"q_idx": (1, 0), "kv_idx": (0, 1), "b": (0, 0), "h": (0, 0)}
        return places.get(str(node.value), False)
    if not args:
        return (0, 0)
    affine = [arg for arg in args if isinstance(arg, tuple)]
    if len(affine) == len(args) and is_int(node.args[0].dtype):
        if node.op == "add":
            return affine[0][0] + affine[1][0], affine[0][1] + affine[1][1]
        if node.op in ("sub", *_COMPARE):
            rest = affine[0][0] - affine[1][0], affine[0][1] - affine[1][1]
            return rest if node.op == "sub" else sum(rest) == 0
        if node.op == "neg":
            return -affine[0][0], -affine[0][1]
        if node.op == "cast" and node.dtype in ("int32", "int64"):  # narrower ones wrap
            return affine[0]
        if node.op == "mul":
            for x, y in (affine, affine[::-1]):
                factor = node.args[affine.index(y)]
                if factor.op == "const":
                    return x[0] * int(factor.value or 0), x[1] * int(factor.value or 0)
    return all(map(_same_along, args))


def _same_along(found: tuple[int, int] | bool) -> bool:
    return sum(found) == 0 if isinstance(found, tuple) else found


def _zero(dtype: str) -> Expr:
    return const(0, dtype) if is_int(dtype) else const(0.0, dtype)


def _is_number(dtype: str) -> bool:
    return is_int(dtype) or dtype in ("float32", "float64")
