"""OPS: the pointwise operations of an Expr, one row each, and what dtypes are called.

A row is all that the tracer, the printers, the analyses and the backward know of an operation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch

Range = tuple[int, int]
Interval = Callable[..., Range | None]


def corners(op: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """For an operation that is monotone in each operand."""

    def rule(x: Range, y: Range) -> Range:
        values = [op(i, j) for i in x for j in y]
        return min(values), max(values)

    return rule


def truncated(x: int, y: int) -> int:
    """A quotient, towards zero."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def dividing(op: Callable[[int, int], int]) -> Callable[[Range, Range], Range | None]:
    """For a division."""

    def rule(x: Range, y: Range) -> Range | None:
        # A divisor of either sign reaches its extremes at its ends and next to zero.
        ends = {j for j in (y[0], y[1], -1, 1) if j != 0 and y[0] <= j <= y[1]}
        if y[0] <= 0 <= y[1]:  # the machine decides what a division by zero gives
            return None
        values = [op(i, j) for i in x for j in ends]
        return min(values), max(values)

    return rule


def floor_mod(x: Range, y: Range) -> Range | None:
    """The remainder of a floored division."""
    if y[0] > 0 and x[0] >= 0:
        return x if x[1] < y[0] else (0, min(x[1], y[1] - 1))
    if y[0] > 0:
        return 0, y[1] - 1
    return (y[0] + 1, 0) if y[1] < 0 else None


def trunc_mod(x: Range, y: Range) -> Range | None:
    """The remainder of a truncated division."""
    if y[0] <= 0 <= y[1]:
        return None
    most = max(abs(y[0]), abs(y[1])) - 1
    return max(-most, min(x[0], 0)), min(most, max(x[1], 0))


def meet(x: Range, y: Range) -> Range | None:
    """and."""
    positive = [r for r in (x, y) if r[0] >= 0]
    return (0, min(r[1] for r in positive)) if positive else None


def differ(x: Range, y: Range) -> Range | None:
    """xor."""
    if x[0] < 0 or y[0] < 0:
        return None
    return 0, 2 ** max(x[1].bit_length(), y[1].bit_length()) - 1


def either(x: Range, y: Range) -> Range | None:
    """or."""
    bits = differ(x, y)
    return bits and (max(x[0], y[0]), bits[1])


def shifted(op: Callable[[int, int], int]) -> Callable[[Range, Range], Range | None]:
    """<< and >>."""
    return lambda x, y: corners(op)(x, y) if y[0] >= 0 and y[1] < 64 else None


def sign(x: Range) -> Range:
    """-1, 0 or 1."""
    return (x[0] > 0) - (x[0] < 0), (x[1] > 0) - (x[1] < 0)


# Of (gradient of the result, *operands): values that have torch's operators and methods.
Gradient = Callable[..., Any]
# Where a mod keeps something from autograd: these compute nothing.
DETACH, OWN_GRADIENT = "detach", "own_gradient"


@dataclass(frozen=True, slots=True)
class Op:
    """A pointwise operation: one row of flexattn.mods.ops.OPS.

    Operands have the result's dtype, except those of a predicate and the condition of `where`.

    triton: its text, a format of the operands and of `tl`, the language's module. integers, gluon:
    the text for integers and bools, and in Gluon, where it is another.
    gradients: for each operand, its gradient by torch's conventions, or why there is none.
    called, kwargs: the function in torch that defines it, by default of its name, and its options.
    traced: aten's names that become it as they stand, by default `called` alone.
    result: its dtype. "same": the operands'. "float": integers become floats before. "rounded":
    integers stay what they are. "compared": bool. "classified": bool, and no integer has it.
    on_bool: the operation that torch computes on bools instead.
    commutes: swapping the operands changes no bit. mirrored: what gives the same on swapped ones.
    slow: it takes a kernel many instructions; of "float" nothing need be said.
    interval: which integers it can be; where there is one, the host computes it as a kernel does.
    symbol: Python's infix operator.
    """

    name: str
    triton: str
    gradients: tuple[Gradient | str, ...]
    _: KW_ONLY
    called: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    traced: tuple[str, ...] = ()
    result: Literal["same", "float", "rounded", "compared", "classified"] = "same"
    on_bool: str = ""
    commutes: bool = False
    mirrored: str = ""
    slow: bool = False
    interval: Interval | None = None
    symbol: str = ""
    integers: str = ""
    gluon: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "called", self.called or self.name)
        object.__setattr__(self, "traced", self.traced or (self.called,))

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len(self.gradients)

    @property
    def predicate(self) -> bool:
        """True if the result is bool whatever the operands are."""
        return self.result in ("compared", "classified")

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """torch's function, which takes `kwargs` beside the operands."""
        found: Callable[..., torch.Tensor] = getattr(torch, self.called)
        return found


def _float(name: str, gradient: Gradient | str, triton: str = "", **more: Any) -> Op:
    """A function of one operand, of which integers become floats before.

    triton: its text, where it is no function of libdevice by that name.
    """
    text = triton or f"libdevice.{name}({{0}})"
    return Op(name, text, (gradient,), result="float", **more)


def _shared(first: Callable[[Any, Any], Any]) -> tuple[Gradient, Gradient]:
    """The gradients of an extreme, half to each where they are equal; first: where it is x."""

    def part(g: Any, x: Any, y: Any) -> Any:
        return (g * 0.5).where(x == y, g).where(first(x, y), 0.0)

    return part, lambda g, x, y: part(g, y, x)


# torch hands NaN through minimum and maximum; the hardware's instructions drop it.
_NAN = ", propagate_nan=tl.PropagateNan.ALL)"
_LEAST, _MOST = "{tl}.minimum({0}, {1}", "{tl}.maximum({0}, {1}"

ARITHMETIC = (
    Op(
        "add",
        "({0} + {1})",
        (lambda g, x, y: g, lambda g, x, y: g),
        on_bool="or",
        commutes=True,
        interval=lambda x, y: (x[0] + y[0], x[1] + y[1]),
        symbol="+",
    ),
    Op(
        "sub",
        "({0} - {1})",
        (lambda g, x, y: g, lambda g, x, y: -g),
        interval=lambda x, y: (x[0] - y[1], x[1] - y[0]),
        symbol="-",
    ),
    Op(
        "mul",
        "({0} * {1})",
        (lambda g, x, y: g * y, lambda g, x, y: g * x),
        on_bool="and",
        commutes=True,
        interval=corners(operator.mul),
        symbol="*",
    ),
    Op(
        "div",
        "({0} / {1})",
        (lambda g, x, y: g / y, lambda g, x, y: -g * ((x / y) / y)),
        result="float",
        symbol="/",
    ),
    Op(
        "floor_div",
        "floor_div_float({0}, {1})",
        ("torch has none of floor_divide", "torch has none of floor_divide"),
        called="floor_divide",
        slow=True,
        interval=dividing(operator.floordiv),
        symbol="//",
        integers="floor_div_int({0}, {1})",
    ),
    Op(
        "trunc_div",
        "libdevice.trunc({0} / {1})",
        (lambda g, x, y: 0.0, lambda g, x, y: 0.0),
        called="div",
        kwargs={"rounding_mode": "trunc"},
        slow=True,
        interval=dividing(truncated),
        integers="({0} // {1})",
    ),
    Op(
        "floor_mod",
        "floor_mod_float({0}, {1})",
        (lambda g, x, y: g, lambda g, x, y: -g * x.floor_div(y)),
        called="remainder",
        slow=True,
        interval=floor_mod,
        symbol="%",
        integers="floor_mod_int({0}, {1})",
    ),
    Op(
        "trunc_mod",
        "trunc_mod_float({0}, {1})",
        (lambda g, x, y: g, lambda g, x, y: -g * x.trunc_div(y)),
        called="fmod",
        slow=True,
        interval=trunc_mod,
        integers="({0} % {1})",
    ),
    Op("neg", "(-{0})", (lambda g, x: -g,), interval=lambda x: (-x[1], -x[0])),
    Op(
        "abs",
        "{tl}.abs({0})",
        (lambda g, x: g * x.sign(),),  # 0 at 0
        interval=lambda x: (max(x[0], -x[1], 0), max(abs(x[0]), abs(x[1]))),
    ),
    Op("sign", "sign({0})", (lambda g, x: 0.0,), interval=sign),
    Op(
        "minimum",
        _LEAST + _NAN,
        _shared(lambda x, y: x <= y),
        on_bool="and",
        interval=lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
        integers=_LEAST + ")",
    ),
    Op(
        "maximum",
        _MOST + _NAN,
        _shared(lambda x, y: x >= y),
        on_bool="or",
        interval=lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
        integers=_MOST + ")",
    ),
    # Of floats alone, and maximum and minimum but for their gradients: all of it to x at the end.
    Op(
        "clamp_min",
        _MOST + _NAN,
        (
            lambda g, x, low: g.where(x >= low, 0.0),
            lambda g, x, low: g.where(x < low, 0.0),
        ),
    ),
    Op(
        "clamp_max",
        _LEAST + _NAN,
        (
            lambda g, x, high: g.where(x <= high, 0.0),
            lambda g, x, high: g.where(x > high, 0.0),
        ),
    ),
    Op(
        "relu",
        "{tl}.maximum({0}, 0.0" + _NAN,
        (lambda g, x: g.where(x > 0.0, 0.0),),  # 0 at 0
    ),
    Op(
        "pow",
        "libdevice.pow({0}, {1})",
        (
            lambda g, x, y: (g * (y * x.pow(y - 1.0))).where(y != 0.0, 0.0),
            lambda g, x, y: (g * (x.pow(y) * x.log())).where((x != 0.0) | (y < 0.0), 0.0),
        ),
        slow=True,
        symbol="**",
    ),
    _float("reciprocal", lambda g, x: -g * x.reciprocal() * x.reciprocal(), "(1.0 / {0})"),
)


_BITS = "it works on bits"
_STEP = "a condition has no gradient"


def _comparison(name: str, symbol: str, mirrored: str) -> Op:
    return Op(
        name,
        f"({{0}} {symbol} {{1}})",
        (_STEP, _STEP),
        result="compared",
        commutes=not mirrored,
        mirrored=mirrored,
        symbol=symbol,
    )


def _bits(name: str, symbol: str, called: str, dunder: str, interval: Interval) -> Op:
    return Op(
        name,
        f"({{0}} {symbol} {{1}})",
        (_BITS, _BITS),
        called=called,
        traced=(called, dunder),
        commutes=symbol in "&|^",
        interval=interval,
        symbol=symbol,
    )


LOGIC = (
    _bits("and", "&", "bitwise_and", "__and__", meet),
    _bits("or", "|", "bitwise_or", "__or__", either),
    _bits("xor", "^", "bitwise_xor", "__xor__", differ),
    _bits("shl", "<<", "bitwise_left_shift", "__lshift__", shifted(operator.lshift)),
    _bits("shr", ">>", "bitwise_right_shift", "__rshift__", shifted(operator.rshift)),
    Op("not", "(~{0})", (_BITS,), called="bitwise_not", interval=lambda x: (~x[1], ~x[0])),
    _comparison("eq", "==", ""),
    _comparison("ne", "!=", ""),
    _comparison("lt", "<", "gt"),
    _comparison("le", "<=", "ge"),
    _comparison("gt", ">", "lt"),
    _comparison("ge", ">=", "le"),
    Op("isnan", "({0} != {0})", (_STEP,), result="classified"),
    Op("isinf", '({tl}.abs({0}) == float("inf"))', (_STEP,), result="classified"),
    Op(
        "where",
        "{tl}.where({0}, {1}, {2})",
        (_STEP, lambda g, c, x, y: g.where(c, 0.0), lambda g, c, x, y: g.where(~c, 0.0)),
        interval=lambda x, y: (min(x[0], y[0]), max(x[1], y[1])),
    ),
)


_LN2, _LN10 = math.log(2.0), math.log(10.0)
_ERF = 2.0 / math.sqrt(math.pi)

FUNCTIONS = (
    _float("exp", lambda g, x: g * x.exp(), "{tl}.exp({0})"),
    _float("exp2", lambda g, x: g * x.exp2() * _LN2, "{tl}.exp2({0})"),
    _float("expm1", lambda g, x: g * (x.expm1() + 1.0)),
    _float("log", lambda g, x: g / x, "{tl}.log({0})"),
    _float("log2", lambda g, x: g / (x * _LN2), "{tl}.log2({0})"),
    _float("log10", lambda g, x: g / (x * _LN10)),
    _float("log1p", lambda g, x: g / (x + 1.0)),
    _float("sqrt", lambda g, x: g / (x.sqrt() * 2.0), "{tl}.sqrt({0})"),
    _float("rsqrt", lambda g, x: g * -0.5 * x.rsqrt() * x.rsqrt() * x.rsqrt(), "{tl}.rsqrt({0})"),
    _float("sin", lambda g, x: g * x.cos(), "{tl}.sin({0})"),
    _float("cos", lambda g, x: -g * x.sin(), "{tl}.cos({0})"),
    _float("tan", lambda g, x: g * (x.tan() * x.tan() + 1.0)),
    _float("asin", lambda g, x: g * (1.0 - x * x).rsqrt()),
    _float("acos", lambda g, x: -g * (1.0 - x * x).rsqrt()),
    _float("atan", lambda g, x: g / (x * x + 1.0)),
    Op(
        "atan2",
        "libdevice.atan2({0}, {1})",
        (
            # 0 where both are 0.
            lambda g, x, y: (g * y / (x * x + y * y)).where((x != 0.0) | (y != 0.0), 0.0),
            lambda g, x, y: (-g * x / (x * x + y * y)).where((x != 0.0) | (y != 0.0), 0.0),
        ),
        result="float",
    ),
    Op(
        "hypot",
        "libdevice.hypot({0}, {1})",
        (
            lambda g, x, y: g * (x / x.hypot(y)),
            lambda g, x, y: g * (y / x.hypot(y)),
        ),
    ),
    Op(
        "copysign",
        "libdevice.copysign({0}, {1})",
        (lambda g, x, y: (g * (x.copysign(y) / x)).where(x != 0.0, 0.0), lambda g, x, y: 0.0),
        result="float",
    ),
    _float("asinh", lambda g, x: g * (x * x + 1.0).rsqrt()),
    _float("acosh", lambda g, x: g * (x * x - 1.0).rsqrt()),
    _float("atanh", lambda g, x: g / (1.0 - x * x)),
    _float("sinh", lambda g, x: g * x.cosh()),
    _float("cosh", lambda g, x: g * x.sinh()),
    _float("tanh", lambda g, x: g * (1.0 - x.tanh() * x.tanh())),
    _float(
        "sigmoid",
        lambda g, x: g * (1.0 - x.sigmoid()) * x.sigmoid(),
        "{tl}.sigmoid({0})",
        gluon="sigmoid({0})",
    ),
    _float("erf", lambda g, x: g * _ERF * (-x * x).exp(), "{tl}.erf({0})"),
    _float("erfc", lambda g, x: -g * _ERF * (-x * x).exp()),
    _float("erfinv", lambda g, x: g / _ERF * (x.erfinv() * x.erfinv()).exp()),
    _float("lgamma", "it is digamma, which Triton lacks"),
    Op("floor", "{tl}.floor({0})", (lambda g, x: 0.0,), result="rounded"),
    Op("ceil", "{tl}.ceil({0})", (lambda g, x: 0.0,), result="rounded"),
    Op("round", "libdevice.rint({0})", (lambda g, x: 0.0,), result="rounded"),
    Op("trunc", "libdevice.trunc({0})", (lambda g, x: 0.0,), result="rounded"),
    Op("detach", "({0})", ("it is detached",)),
    Op(
        "own_gradient",
        "({0})",
        ("an autograd Function or a hook decides it",),
        called="clone",
    ),
)


OPS = {op.name: op for op in (*ARITHMETIC, *LOGIC, *FUNCTIONS)}


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def name_of(dtype: torch.dtype) -> str:
    """The name of one of torch's dtypes in an Expr."""
    return str(dtype).removeprefix("torch.")


def is_float(dtype: str) -> bool:
    """True if a dtype's name says floating point."""
    return dtype.startswith(("float", "bfloat"))


def is_int(dtype: str) -> bool:
    """True if a dtype's name says integer; bool is none."""
    return dtype.startswith(("int", "uint"))
