"""Arithmetic: sums, products, quotients, remainders, extremes and powers."""

from __future__ import annotations

from flexattn.mods.ir import intervals
from flexattn.mods.ir.intervals import corners, dividing
from flexattn.mods.ir.op import EVERYWHERE, Nki, Op

__all__ = ["ARITHMETIC"]

# torch hands NaN through minimum and maximum; the hardware's instructions drop it.
_NAN = ", propagate_nan=tl.PropagateNan.ALL)"
_LEAST, _MOST = "{tl}.minimum({0}, {1}", "{tl}.maximum({0}, {1}"

ARITHMETIC = (
    Op(
        name="add",
        gradients=(lambda g, x, y: g, lambda g, x, y: g),
        traced=(),  # flexattn.mods.pointwise has what torch's function does beside it
        on_bool="or",
        commutes=True,
        interval=lambda x, y: (x[0] + y[0], x[1] + y[1]),
        symbol="+",
        triton="({0} + {1})",
        nki=Nki("tensors", "add"),
    ),
    Op(
        name="sub",
        gradients=(lambda g, x, y: g, lambda g, x, y: -g),
        traced=(),
        interval=lambda x, y: (x[0] - y[1], x[1] - y[0]),
        symbol="-",
        triton="({0} - {1})",
        nki=Nki("tensors", "subtract"),
    ),
    Op(
        name="mul",
        gradients=(lambda g, x, y: g * y, lambda g, x, y: g * x),
        on_bool="and",
        commutes=True,
        interval=corners(lambda i, j: i * j),
        symbol="*",
        triton="({0} * {1})",
        nki=Nki("tensors", "multiply"),
    ),
    Op(
        name="div",
        gradients=(lambda g, x, y: g / y, lambda g, x, y: -g * ((x / y) / y)),
        traced=(),
        result="float",
        symbol="/",
        triton="({0} / {1})",
        nki=Nki("steps"),
    ),
    Op(
        name="floor_div",
        gradients=("torch has none of floor_divide", "torch has none of floor_divide"),
        called="floor_divide",
        slow=True,
        interval=dividing(lambda i, j: i // j),
        symbol="//",
        triton="floor_div_float({0}, {1})",
        integers="floor_div_int({0}, {1})",
        nki=Nki("steps"),
    ),
    Op(
        name="trunc_div",
        gradients=(lambda g, x, y: 0.0, lambda g, x, y: 0.0),
        called="div",
        kwargs={"rounding_mode": "trunc"},
        traced=(),
        slow=True,
        interval=dividing(intervals.truncated),
        triton="libdevice.trunc({0} / {1})",
        integers="({0} // {1})",
    ),
    Op(
        name="floor_mod",
        gradients=(lambda g, x, y: g, lambda g, x, y: -g * x.floor_div(y)),
        called="remainder",
        slow=True,
        interval=intervals.floor_mod,
        symbol="%",
        triton="floor_mod_float({0}, {1})",
        integers="floor_mod_int({0}, {1})",
        nki=Nki("steps"),
    ),
    Op(
        name="trunc_mod",
        gradients=(lambda g, x, y: g, lambda g, x, y: -g * x.trunc_div(y)),
        called="fmod",
        slow=True,
        interval=intervals.trunc_mod,
        triton="({0} % {1})",
    ),
    Op(
        name="neg",
        gradients=(lambda g, x: -g,),
        interval=lambda x: (-x[1], -x[0]),
        triton="(-{0})",
        nki=Nki("scalar", "multiply", number="-1.0"),
    ),
    Op(
        name="abs",
        gradients=(lambda g, x: g * x.sign(),),  # 0 at 0
        interval=intervals.absolute,
        triton="{tl}.abs({0})",
        nki=Nki("steps"),
    ),
    Op(
        name="sign",
        gradients=(lambda g, x: 0.0,),
        interval=intervals.sign,
        triton="sign({0})",
        nki=Nki("activation", "sign"),
    ),
    Op(
        name="minimum",
        # Half to each where they are equal.
        gradients=(
            lambda g, x, y: (g * 0.5).where(x == y, g).where(x <= y, 0.0),
            lambda g, x, y: (g * 0.5).where(x == y, g).where(y <= x, 0.0),
        ),
        on_bool="and",
        interval=lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
        rises=EVERYWHERE,
        triton=_LEAST + _NAN,
        integers=_LEAST + ")",
        nki=Nki("tensors", "minimum"),
    ),
    Op(
        name="maximum",
        gradients=(
            lambda g, x, y: (g * 0.5).where(x == y, g).where(x >= y, 0.0),
            lambda g, x, y: (g * 0.5).where(x == y, g).where(y >= x, 0.0),
        ),
        on_bool="or",
        interval=lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
        rises=EVERYWHERE,
        triton=_MOST + _NAN,
        integers=_MOST + ")",
        nki=Nki("tensors", "maximum"),
    ),
    # Of floats alone, and maximum and minimum but for their gradients: all of it to x at the end.
    Op(
        name="clamp_min",
        gradients=(
            lambda g, x, low: g.where(x >= low, 0.0),
            lambda g, x, low: g.where(x < low, 0.0),
        ),
        traced=(),
        rises=EVERYWHERE,
        triton=_MOST + _NAN,
        nki=Nki("tensors", "maximum"),
    ),
    Op(
        name="clamp_max",
        gradients=(
            lambda g, x, high: g.where(x <= high, 0.0),
            lambda g, x, high: g.where(x > high, 0.0),
        ),
        traced=(),
        rises=EVERYWHERE,
        triton=_LEAST + _NAN,
        nki=Nki("tensors", "minimum"),
    ),
    Op(
        name="relu",
        gradients=(lambda g, x: g.where(x > 0.0, 0.0),),  # 0 at 0
        traced=(),
        rises=EVERYWHERE,
        triton="{tl}.maximum({0}, 0.0" + _NAN,
        nki=Nki("scalar", "maximum", number="0.0"),
    ),
    Op(
        name="pow",
        gradients=(
            lambda g, x, y: (g * (y * x.pow(y - 1.0))).where(y != 0.0, 0.0),
            lambda g, x, y: (g * (x.pow(y) * x.log())).where((x != 0.0) | (y < 0.0), 0.0),
        ),
        traced=(),
        slow=True,
        symbol="**",
        triton="libdevice.pow({0}, {1})",
        nki=Nki("tensors", "power"),
    ),
    Op(
        name="reciprocal",
        gradients=(lambda g, x: -g * x.reciprocal() * x.reciprocal(),),
        result="float",
        triton="(1.0 / {0})",
        nki=Nki("steps"),
    ),
)
