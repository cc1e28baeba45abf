"""The lists of a BlockMask whose blocks were chosen by data, made on the device without a wait."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask.classify import FULL, PARTIAL
from flexattn.block_mask.lists import lists_of
from flexattn.device import detect
from flexattn.kernels.base.config import power_above
from flexattn.kernels.block_mask.chosen import (
    MOST_CHOSEN,
    ChosenForm,
    render_by_key,
    render_chosen,
)
from flexattn.problem.mask_lists import dense_blocks
from flexattn.runtime.build import Launcher, builder
from flexattn.runtime.launch import Lists, launches, raw_stream
from flexattn.settings import current


class ChosenBlocks(NamedTuple):
    """Blocks of `keys` keys that each block of `rows` rows chose.

    indices int32 or int64 [B or 1, heads, blocks of rows, k]: in any order; what is below 0, past
    the keys or given twice counts once or not at all. counts int32 [B or 1, heads, blocks of
    rows]: how many of them are valid, or None. heads: 1, or a divisor of Hq. masked: a mask
    decides within blocks; causal: it is q_idx >= kv_idx.
    """

    indices: Tensor
    counts: Tensor | None
    rows: int
    keys: int
    masked: bool
    causal: bool

    def lists(self, Hq: int, lengths: tuple[int, int], by_key: bool) -> tuple[Lists, Lists | None]:
        """Lists by query [B or 1, Hq, blocks of rows] and, if asked for, by key.

        Full blocks are those that a mask cannot change and no length cuts.
        """
        heads = Hq if self.indices.shape[1] > 1 else 1
        if not self._by_kernel:
            return self._by_torch(heads, lengths), None
        device, index = self.indices.device, self.indices.get_device()
        B, _, rows, k = self.indices.shape
        blocks = -(-lengths[1] // self.keys)
        first, second = self._launchers(heads, lengths, index)
        found = _empty((B, heads, rows), k, device)
        counts = () if self.counts is None else (self.counts,)
        _launch(first, index, (self.indices, *counts, *found[:4]))
        if not by_key:
            return found, None
        turned = _empty((B, heads, blocks), rows, device)
        _launch(second, index, (*found[:4], *turned[:4]))
        return found, turned

    @property
    def _by_kernel(self) -> bool:
        if torch.compiler.is_dynamo_compiling():
            return False
        fits = 0 < self.indices.numel() and self.indices.shape[-1] <= MOST_CHOSEN
        return fits and (self.indices.is_cuda or current().interpret)

    def _launchers(
        self, heads: int, lengths: tuple[int, int], index: int
    ) -> tuple[Launcher, Launcher]:
        indices, counts = self.indices, self.counts
        B, given_heads, rows, k = indices.shape
        key = (
            "chosen", indices.shape, indices.dtype, counts is None, *self[2:], heads, lengths,
            index,
        )  # fmt: skip
        found: tuple[Launcher, Launcher] | None = launches.get(key)
        if found is None:
            form = ChosenForm(
                self.rows, self.keys, power_above(k), str(indices.dtype).removeprefix("torch."),
                counts is not None, self.masked, self.causal,
            )  # fmt: skip
            q_len, kv_len = lengths
            blocks, target = -(-kv_len // self.keys), detect(indices.device)
            fixed = {
                "Hq": heads, "heads": given_heads, "rows": rows, "k": k, "kv_blocks": blocks,
                "q_len": q_len, "kv_len": kv_len,
            }  # fmt: skip
            names = ("NUM", "IDX", "FULL_NUM", "FULL_IDX")
            by_query = ("INDICES", *("COUNTS",) * (counts is not None), *names)
            by_key = (*names, "Q_NUM", "Q_IDX", "FULL_Q_NUM", "FULL_Q_IDX")
            kernels = [
                builder().kernel(source, target, index)
                for source in (render_chosen(form, target), render_by_key(form.width, target))
            ]
            few = {name: fixed[name] for name in ("rows", "k", "kv_blocks")}
            found = (
                kernels[0].prepare(B * heads * rows, fixed, by_query),
                kernels[1].prepare(B * heads * blocks, few, by_key),
            )
            launches.put(key, found)
        return found

    def _by_torch(self, heads: int, lengths: tuple[int, int]) -> Lists:
        """The lists by query by plain torch: on the CPU, and of long choices."""
        q_len, kv_len = lengths
        rows, columns = self.indices.shape[2], -(-kv_len // self.keys)
        listed = dense_choices(self.indices, self.counts, columns)
        row = torch.arange(rows, device=listed.device)[:, None] * self.rows
        column = torch.arange(columns, device=listed.device) * self.keys
        whole = (row + self.rows <= q_len) & (column + self.keys <= kv_len)
        whole = whole & (self.causal or not self.masked)
        if self.causal:
            listed = listed & (column < (row + self.rows).clamp(max=q_len))
            whole = whole & (column + self.keys <= row + 1)
        kinds = listed.to(torch.int8) * torch.where(whole, FULL, PARTIAL).to(torch.int8)
        kinds = kinds.repeat_interleave(heads // listed.shape[1], 1)
        B, H, _, _ = kinds.shape
        shape = B, H, rows, columns
        parts = [(0, kinds.reshape(-1, columns))] if kinds.numel() else []
        return Lists(*lists_of(parts, shape, kinds.device))


def dense_choices(indices: Tensor, counts: Tensor | None, columns: int) -> Tensor:
    """Choices as a bool map [B, heads, rows, columns]; see ChosenBlocks for what counts."""
    if counts is None:
        counts = torch.full(indices.shape[:-1], indices.shape[-1], device=indices.device)
    return dense_blocks(counts, indices, columns)


def _empty(shape: tuple[int, int, int], width: int, device: torch.device) -> Lists:
    """Uninitialised lists of partial and full blocks."""
    num, full_num = torch.empty((2, *shape), dtype=torch.int32, device=device).unbind()
    idx, full_idx = torch.empty((2, *shape, width), dtype=torch.int32, device=device).unbind()
    return Lists(num, idx, full_num, full_idx)


def _launch(launcher: Launcher, index: int, given: tuple[Any, ...]) -> None:
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return _launch(launcher, index, given)
    launcher.launch(raw_stream(index) if index >= 0 else -1, given)
