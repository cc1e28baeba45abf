"""Dialect: what a printed mod is written in: Triton, or Gluon with a template's layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexattn.kernels.printers.triton_ops import triton_type
from flexattn.mods.ops import Op, is_float


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor as a template names its sizes, and the layout that Gluon wants said."""

    shape: str
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How statements are spelled in one kind of template.

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


TRITON = Dialect()
