"""Functions of floats, and rounding."""

from __future__ import annotations

import math

from flexattn.mods.ir.op import EVERYWHERE, Nki, Op

__all__ = ["FUNCTIONS"]

_LN2, _LN10 = math.log(2.0), math.log(10.0)
_ERF = 2.0 / math.sqrt(math.pi)

FUNCTIONS = (
    Op(
        name="exp",
        gradients=(lambda g, x: g * x.exp(),),
        result="float",
        rises=EVERYWHERE,
        triton="{tl}.exp({0})",
        nki=Nki("activation", "exp"),
    ),
    Op(
        name="exp2",
        gradients=(lambda g, x: g * x.exp2() * _LN2,),
        result="float",
        rises=EVERYWHERE,
        triton="{tl}.exp2({0})",
        nki=Nki("activation", "exp", inside=_LN2),
    ),
    Op(
        name="expm1",
        gradients=(lambda g, x: g * (x.expm1() + 1.0),),
        result="float",
        triton="libdevice.expm1({0})",
    ),
    Op(
        name="log",
        gradients=(lambda g, x: g / x,),
        result="float",
        rises=0.0,
        triton="{tl}.log({0})",
        nki=Nki("activation", "log"),
    ),
    Op(
        name="log2",
        gradients=(lambda g, x: g / (x * _LN2),),
        result="float",
        rises=0.0,
        triton="{tl}.log2({0})",
        nki=Nki("activation", "log", outside=1.0 / _LN2),
    ),
    Op(
        name="log10",
        gradients=(lambda g, x: g / (x * _LN10),),
        result="float",
        triton="libdevice.log10({0})",
    ),
    Op(
        name="log1p",
        gradients=(lambda g, x: g / (x + 1.0),),
        result="float",
        triton="libdevice.log1p({0})",
    ),
    Op(
        name="sqrt",
        gradients=(lambda g, x: g / (x.sqrt() * 2.0),),
        result="float",
        rises=0.0,
        triton="{tl}.sqrt({0})",
        nki=Nki("scalar", "power", number="0.5"),
    ),
    Op(
        name="rsqrt",
        gradients=(lambda g, x: g * -0.5 * x.rsqrt() * x.rsqrt() * x.rsqrt(),),
        result="float",
        triton="{tl}.rsqrt({0})",
        nki=Nki("scalar", "power", number="-0.5"),
    ),
    Op(
        name="sin",
        gradients=(lambda g, x: g * x.cos(),),
        result="float",
        triton="{tl}.sin({0})",
    ),
    Op(
        name="cos",
        gradients=(lambda g, x: -g * x.sin(),),
        result="float",
        triton="{tl}.cos({0})",
    ),
    Op(
        name="tan",
        gradients=(lambda g, x: g * (x.tan() * x.tan() + 1.0),),
        result="float",
        triton="libdevice.tan({0})",
    ),
    Op(
        name="asin",
        gradients=(lambda g, x: g * (1.0 - x * x).rsqrt(),),
        result="float",
        triton="libdevice.asin({0})",
    ),
    Op(
        name="acos",
        gradients=(lambda g, x: -g * (1.0 - x * x).rsqrt(),),
        result="float",
        triton="libdevice.acos({0})",
    ),
    Op(
        name="atan",
        gradients=(lambda g, x: g / (x * x + 1.0),),
        result="float",
        triton="libdevice.atan({0})",
    ),
    Op(
        name="atan2",
        gradients=(
            # 0 where both are 0.
            lambda g, x, y: (g * y / (x * x + y * y)).where((x != 0.0) | (y != 0.0), 0.0),
            lambda g, x, y: (-g * x / (x * x + y * y)).where((x != 0.0) | (y != 0.0), 0.0),
        ),
        result="float",
        triton="libdevice.atan2({0}, {1})",
    ),
    Op(
        name="sinh",
        gradients=(lambda g, x: g * x.cosh(),),
        result="float",
        triton="libdevice.sinh({0})",
    ),
    Op(
        name="cosh",
        gradients=(lambda g, x: g * x.sinh(),),
        result="float",
        triton="libdevice.cosh({0})",
    ),
    Op(
        name="tanh",
        gradients=(lambda g, x: g * (1.0 - x.tanh() * x.tanh()),),
        result="float",
        triton="libdevice.tanh({0})",
        nki=Nki("activation", "tanh"),
    ),
    Op(
        name="sigmoid",
        gradients=(lambda g, x: g * (1.0 - x.sigmoid()) * x.sigmoid(),),
        result="float",
        triton="{tl}.sigmoid({0})",
        gluon="sigmoid({0})",
        nki=Nki("activation", "sigmoid"),
    ),
    Op(
        name="erf",
        gradients=(lambda g, x: g * _ERF * (-x * x).exp(),),
        result="float",
        triton="{tl}.erf({0})",
        nki=Nki("activation", "erf"),
    ),
    Op(
        name="erfc",
        gradients=(lambda g, x: -g * _ERF * (-x * x).exp(),),
        result="float",
        triton="libdevice.erfc({0})",
    ),
    Op(
        name="floor",
        gradients=(lambda g, x: 0.0,),
        result="rounded",
        rises=EVERYWHERE,
        triton="{tl}.floor({0})",
        nki=Nki("steps"),
    ),
    Op(
        name="ceil",
        gradients=(lambda g, x: 0.0,),
        result="rounded",
        rises=EVERYWHERE,
        triton="{tl}.ceil({0})",
        nki=Nki("steps"),
    ),
    Op(
        name="round",
        gradients=(lambda g, x: 0.0,),
        result="rounded",
        triton="libdevice.rint({0})",
        nki=Nki("steps"),
    ),
    Op(
        name="trunc",
        gradients=(lambda g, x: 0.0,),
        result="rounded",
        triton="libdevice.trunc({0})",
    ),
)
