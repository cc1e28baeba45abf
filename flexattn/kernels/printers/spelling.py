"""The spelling of kernels' texts: dtypes, constants, names of arguments, base 2, and dialects."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from flexattn.mods.expr import Expr
from flexattn.mods.numbers import divisor_of
from flexattn.mods.ops import Op, Range, is_float

# Computed in float32.
HALVES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Of these, what numpy has no dtype for.
NARROW = HALVES[1:]

# What triton.language names otherwise than torch.
_NAMED = {"bool": "int1", "float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}
# What a kernel's signature writes for a kind of numbers.
_SIGNED = {"bfloat": "bf", "float": "fp", "uint": "u", "int": "i"}


def triton_type(dtype: str, module: str = "tl") -> str:
    """`tl.float32` for "float32", in a module of that name."""
    return f"{module}.{_NAMED.get(dtype, dtype)}"


def signature_type(dtype: str) -> str:
    """`fp32` for "float32", as a kernel's signature names it."""
    kind, rest = re.split(r"(?=\d)", _NAMED.get(dtype, dtype), maxsplit=1)
    return _SIGNED[kind] + rest


def itemsize(dtype: str) -> int:
    """Bytes of an element in memory."""
    bits = re.search(r"\d+", signature_type(dtype))
    return max(1, int(bits[0]) // 8) if bits else 1


def literal(value: object, dtype: str) -> str:
    """A constant as Triton source, non-finite numbers included."""
    if dtype == "bool":
        return str(bool(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def is_literal(text: str) -> bool:
    """True if a printed operand is a constant."""
    return text.replace(".", "").replace("-", "").replace("e", "").isdigit() or text.startswith(
        ("float(", "True", "False")
    )


def buffer_names(kind: str, slot: int, rank: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The kernel's argument names for one captured tensor: pointer, sizes, strides."""
    base = f"{kind}_buf{slot}"
    return (
        base,
        tuple(f"{base}_size{d}" for d in range(rank)),
        tuple(f"{base}_stride{d}" for d in range(rank)),
    )


def scalar_name(kind: str, slot: int) -> str:
    """The kernel's argument name for one captured Python number."""
    return f"{kind}_scalar{slot}"


def invariant_names(kind: str, slot: int) -> tuple[str, str]:
    """The kernel's arguments that divide by a captured number: its multiplier and its shift."""
    return f"{kind}_scalar{slot}_multiplier", f"{kind}_scalar{slot}_shift"


def by_invariant(node: Expr, kind: str, numerator: Range | None) -> str:
    """A quotient or remainder as Triton source, to be filled with numerator and divisor.

    numerator: what it can be. "" where the divisor is no positive number of 32 bits, or where the
    numerator may have more.
    """
    slot = divisor_of(node)
    if slot is None or numerator is None or max(map(abs, numerator)) > 2**31 - 1:
        return ""
    name = "fast_div" if numerator[0] >= 0 else f"fast_{node.op.replace('mod', 'div')}"
    quotient = f"{name}({{0}}, {', '.join(invariant_names(kind, slot))})"
    return quotient if node.op.endswith("div") else f"({{0}} - {quotient} * {{1}})"


# Softmax has its scores in base 2. A score beyond 2.36e38, like finfo(float32).min, times log2(e)
# is none that float32 holds. Where scores can be that far, what lies beyond 2^127 rises by half
# its own rise instead: no order changes, weights of such scores are 0 or equal in any case, and
# all that is finite stays finite.
# 2^127 (log2(e) - 1/2), as an odd multiple of 2^104: finfo.max comes back as a finite number.
_BEYOND = 1.6039124662230744e38
# What an infinite sink is: above all finite scores, and infinite again in the natural logarithm.
_FINITE = 3.4028234663852886e38


def in_base_2(text: str, far: bool, tl: str = "tl") -> str:
    """A natural score in base 2; far: it may be beyond 2^127. Infinities and NaN stay."""
    if not far:
        return f"{text} * LOG2E"
    near = f"{tl}.maximum({text} * LOG2E, {text} * 0.5 - {_BEYOND})"
    return f"{tl}.minimum({near}, {text} * 0.5 + {_BEYOND})"


def natural(text: str, far: bool, tl: str = "tl") -> str:
    """The inverse."""
    if not far:
        return f"{text} * LN2"
    near = f"{tl}.maximum({text} * LN2, ({text} - {_BEYOND}) * 2.0)"
    return f"{tl}.minimum({near}, ({text} + {_BEYOND}) * 2.0)"


def finite(text: str, tl: str = "tl") -> str:
    """The nearest finite number."""
    return f"{tl}.minimum({tl}.maximum({text}, -{_FINITE}), {_FINITE})"


def sink_in_base_2(text: str, tl: str = "tl") -> str:
    """A sink's logit in base 2, finite where it is +inf."""
    return f"{tl}.minimum({in_base_2(text, True, tl)}, {_FINITE})"


class TensorForm(NamedTuple):
    """A tensor as a template names its sizes, and the layout that Gluon wants said."""

    shape: str
    layout: str = ""


class Dialect(NamedTuple):
    """The spelling of statements in one kind of template.

    module: the language's name. jit: its decorator. gluon: whether it is Gluon.
    rows: the number of rows of a tile. tile, key, row, diagonal: tensors with an element for each
    score, key, row and diagonal of it. over_rows, over_keys, over_diagonals: layouts of ranges.
    guarded: format of a selection behind a condition. walked: the index that the template's loop
    walks. within: whether any of a tile's are inside. end: the index behind a tile's last one,
    where a load by that index alone needs no comparisons in tiles that end inside; "" has them in
    all tiles.
    """

    module: str = "tl"
    jit: str = "triton.jit"
    gluon: bool = False
    rows: str = "BLOCK_M"
    tile: TensorForm = TensorForm("[BLOCK_M, BLOCK_N]")
    key: TensorForm = TensorForm("[1, BLOCK_N]")
    row: TensorForm = TensorForm("[BLOCK_M]")
    diagonal: TensorForm = TensorForm("[STRIP]")
    over_rows: str = ""
    over_keys: str = ""
    over_diagonals: str = ""
    guarded: str = "{0}"
    walked: str = "kv_idx"
    within: str = "start_n < kv_len"
    end: str = ""

    def type(self, dtype: str) -> str:
        """The language's name of a dtype."""
        return triton_type(dtype, self.module)

    def zeros(self, tensor: TensorForm, dtype: str) -> str:
        """A tensor of zeros."""
        layout = f", {tensor.layout}" if tensor.layout else ""
        return f"{self.module}.zeros({tensor.shape}, {self.type(dtype)}{layout})"

    def arange(self, size: str, layout: str) -> str:
        """The numbers below a size; layout: one of those over something."""
        return f"{self.module}.arange(0, {size}{f', {layout}' if layout else ''})"

    def computed(self, op: Op, dtype: str, operands: Sequence[str]) -> str:
        """An operation in a dtype, as its row spells it."""
        text = op.triton if is_float(dtype) else op.integers or op.triton
        if self.gluon:
            text = op.gluon or text
        return text.format(*operands, tl=self.module)


def gluon_dialect(layout: str, **more: Any) -> Dialect:
    """Gluon's dialect of a consumer's tile of scores [ROWS, BLOCK_N], in a layout of this name.

    A selection behind a condition stays there. more: other fields of the dialect.
    """
    return Dialect(
        "gl",
        "gluon.jit",
        gluon=True,
        rows="ROWS",
        tile=TensorForm("[ROWS, BLOCK_N]", layout),
        key=TensorForm("[1, BLOCK_N]", layout),
        row=TensorForm("[ROWS]", "BY_ROW"),
        over_rows="BY_ROW",
        over_keys="BY_KEY",
        guarded="keep_branch({0})",
        **more,
    )


TRITON = Dialect()
