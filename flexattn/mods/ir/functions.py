"""Functions of floats, and rounding."""

from __future__ import annotations

import math

from flexattn.mods.ir.op import EVERYWHERE, Op

_LN2, _LN10 = math.log(2.0), math.log(10.0)
_ERF = 2.0 / math.sqrt(math.pi)

FUNCTIONS = (
    Op(
        "exp",
        "{tl}.exp({0})",
        (lambda g, x: g * x.exp(),),
        result="float",
        rises=EVERYWHERE,
    ),
    Op(
        "exp2",
        "{tl}.exp2({0})",
        (lambda g, x: g * x.exp2() * _LN2,),
        result="float",
        rises=EVERYWHERE,
    ),
    Op("expm1", "libdevice.expm1({0})", (lambda g, x: g * (x.expm1() + 1.0),), result="float"),
    Op(
        "log",
        "{tl}.log({0})",
        (lambda g, x: g / x,),
        result="float",
        rises=0.0,
    ),
    Op(
        "log2",
        "{tl}.log2({0})",
        (lambda g, x: g / (x * _LN2),),
        result="float",
        rises=0.0,
    ),
    Op("log10", "libdevice.log10({0})", (lambda g, x: g / (x * _LN10),), result="float"),
    Op("log1p", "libdevice.log1p({0})", (lambda g, x: g / (x + 1.0),), result="float"),
    Op(
        "sqrt",
        "{tl}.sqrt({0})",
        (lambda g, x: g / (x.sqrt() * 2.0),),
        result="float",
        rises=0.0,
    ),
    Op(
        "rsqrt",
        "{tl}.rsqrt({0})",
        (lambda g, x: g * -0.5 * x.rsqrt() * x.rsqrt() * x.rsqrt(),),
        result="float",
    ),
    Op("sin", "{tl}.sin({0})", (lambda g, x: g * x.cos(),), result="float"),
    Op("cos", "{tl}.cos({0})", (lambda g, x: -g * x.sin(),), result="float"),
    Op("tan", "libdevice.tan({0})", (lambda g, x: g * (x.tan() * x.tan() + 1.0),), result="float"),
    Op("asin", "libdevice.asin({0})", (lambda g, x: g * (1.0 - x * x).rsqrt(),), result="float"),
    Op("acos", "libdevice.acos({0})", (lambda g, x: -g * (1.0 - x * x).rsqrt(),), result="float"),
    Op("atan", "libdevice.atan({0})", (lambda g, x: g / (x * x + 1.0),), result="float"),
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
    Op("asinh", "libdevice.asinh({0})", (lambda g, x: g * (x * x + 1.0).rsqrt(),), result="float"),
    Op("acosh", "libdevice.acosh({0})", (lambda g, x: g * (x * x - 1.0).rsqrt(),), result="float"),
    Op("atanh", "libdevice.atanh({0})", (lambda g, x: g / (1.0 - x * x),), result="float"),
    Op("sinh", "libdevice.sinh({0})", (lambda g, x: g * x.cosh(),), result="float"),
    Op("cosh", "libdevice.cosh({0})", (lambda g, x: g * x.sinh(),), result="float"),
    Op(
        "tanh",
        "libdevice.tanh({0})",
        (lambda g, x: g * (1.0 - x.tanh() * x.tanh()),),
        result="float",
    ),
    Op(
        "sigmoid",
        "{tl}.sigmoid({0})",
        (lambda g, x: g * (1.0 - x.sigmoid()) * x.sigmoid(),),
        result="float",
        gluon="sigmoid({0})",
    ),
    Op(
        "erf",
        "{tl}.erf({0})",
        (lambda g, x: g * _ERF * (-x * x).exp(),),
        result="float",
    ),
    Op("erfc", "libdevice.erfc({0})", (lambda g, x: -g * _ERF * (-x * x).exp(),), result="float"),
    Op(
        "erfinv",
        "libdevice.erfinv({0})",
        (lambda g, x: g / _ERF * (x.erfinv() * x.erfinv()).exp(),),
        result="float",
    ),
    Op("lgamma", "libdevice.lgamma({0})", ("it is digamma, which Triton lacks",), result="float"),
    Op(
        "floor",
        "{tl}.floor({0})",
        (lambda g, x: 0.0,),
        result="rounded",
        rises=EVERYWHERE,
    ),
    Op(
        "ceil",
        "{tl}.ceil({0})",
        (lambda g, x: 0.0,),
        result="rounded",
        rises=EVERYWHERE,
    ),
    Op("round", "libdevice.rint({0})", (lambda g, x: 0.0,), result="rounded"),
    Op("trunc", "libdevice.trunc({0})", (lambda g, x: 0.0,), result="rounded"),
    # Where a mod keeps something from autograd (mods/stops.py): they compute nothing.
    Op("detach", "({0})", ("it is detached",), rises=EVERYWHERE),
    Op(
        "own_gradient",
        "({0})",
        ("an autograd Function or a hook decides it",),
        called="clone",
        rises=EVERYWHERE,
    ),
)
