"""Arithmetic: sums, products, quotients, remainders, extremes and powers."""

from __future__ import annotations

from flexattn.mods.ir import intervals
from flexattn.mods.ir.intervals import corners, dividing
from flexattn.mods.ir.op import EVERYWHERE, Op

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
        interval=corners(lambda i, j: i * j),
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
        interval=dividing(lambda i, j: i // j),
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
        interval=dividing(intervals.truncated),
        integers="({0} // {1})",
    ),
    Op(
        "floor_mod",
        "floor_mod_float({0}, {1})",
        (lambda g, x, y: g, lambda g, x, y: -g * x.floor_div(y)),
        called="remainder",
        slow=True,
        interval=intervals.floor_mod,
        symbol="%",
        integers="floor_mod_int({0}, {1})",
    ),
    Op(
        "trunc_mod",
        "trunc_mod_float({0}, {1})",
        (lambda g, x, y: g, lambda g, x, y: -g * x.trunc_div(y)),
        called="fmod",
        slow=True,
        interval=intervals.trunc_mod,
        integers="({0} % {1})",
    ),
    Op(
        "neg",
        "(-{0})",
        (lambda g, x: -g,),
        interval=lambda x: (-x[1], -x[0]),
    ),
    Op(
        "abs",
        "{tl}.abs({0})",
        (lambda g, x: g * x.sign(),),  # 0 at 0
        interval=intervals.absolute,
    ),
    Op(
        "sign",
        "sign({0})",
        (lambda g, x: 0.0,),
        interval=intervals.sign,
    ),
    Op(
        "minimum",
        _LEAST + _NAN,
        # Half to each where they are equal.
        (
            lambda g, x, y: (g * 0.5).where(x == y, g).where(x <= y, 0.0),
            lambda g, x, y: (g * 0.5).where(x == y, g).where(y <= x, 0.0),
        ),
        on_bool="and",
        interval=lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
        rises=EVERYWHERE,
        integers=_LEAST + ")",
    ),
    Op(
        "maximum",
        _MOST + _NAN,
        (
            lambda g, x, y: (g * 0.5).where(x == y, g).where(x >= y, 0.0),
            lambda g, x, y: (g * 0.5).where(x == y, g).where(y >= x, 0.0),
        ),
        on_bool="or",
        interval=lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
        rises=EVERYWHERE,
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
        rises=EVERYWHERE,
    ),
    Op(
        "clamp_max",
        _LEAST + _NAN,
        (
            lambda g, x, high: g.where(x <= high, 0.0),
            lambda g, x, high: g.where(x > high, 0.0),
        ),
        rises=EVERYWHERE,
    ),
    Op(
        "relu",
        "{tl}.maximum({0}, 0.0" + _NAN,
        (lambda g, x: g.where(x > 0.0, 0.0),),  # 0 at 0
        rises=EVERYWHERE,
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
    Op(
        "reciprocal",
        "(1.0 / {0})",
        (lambda g, x: -g * x.reciprocal() * x.reciprocal(),),
        result="float",
    ),
)
