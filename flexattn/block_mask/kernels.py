"""The kernel that classifies the blocks of a mask on a GPU, and what each call gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.device import Device, detect
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.base.source import Source
from flexattn.kernels.block_mask.bounds_printer import table_values
from flexattn.kernels.block_mask.source import STRIP, render_block_mask
from flexattn.mods import Bound
from flexattn.mods.algebra import Extremes, bounds_of, tables_of
from flexattn.problem import Captures
from flexattn.runtime.build import builder
from flexattn.util.lru import Lru

_sources: Lru[tuple[Any, ...], Source] = Lru(256)


class BlockClassifier:
    """The kernel of one mask, with what it captures now and the tables that its bounds read.

    On the CPU the kernel runs in Triton's interpreter.
    """

    def __init__(
        self,
        bound: Bound,
        sizes: tuple[int, int, int, int],
        block: tuple[int, int],
        device: torch.device,
    ) -> None:
        # A number on the CPU may stand for a captured tensor without dimensions.
        bound = bound._replace(tensors=tuple(each.to(device) for each in bound.tensors))
        self._target, self._index = _place(device)
        self._captures = Captures(bound.mod, tuple(t.stride()[-1:] == (1,) for t in bound.tensors))
        self._source = _mask_source(self._captures, block, self._target)
        _, heads, q_len, kv_len = sizes
        bounds = bounds_of(bound.mod)
        self._tables: tuple[Extremes, ...] = tables_of(bounds.tables, bound.tensors, block)
        self._given: dict[str, Any] = {
            "H": heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "q_blocks": -(-q_len // block[0]),
            "kv_blocks": -(-kv_len // block[1]),
            **captured_values(self._captures, bound),
        }
        for number, (use, table) in enumerate(zip(bounds.tables, self._tables, strict=True)):
            self._given |= table_values(number, use, table)

    def run(self, kinds: Tensor, first_row: int) -> None:
        """Write kinds int8 [rows, kv blocks], contiguous; rows are counted over B, H, q blocks."""
        rows, columns = kinds.shape
        programs = rows * -(-columns // STRIP)
        given = {"KINDS": kinds, "first_row": first_row, **self._given}
        _launch(self._source, self._target, self._index, programs, given)


def _mask_source(captures: Captures, block: tuple[int, int], target: Device) -> Source:
    key = (captures.mod.fingerprint, captures.contiguous, block, target.name)
    found = _sources.get(key)
    if found is None:
        found = render_block_mask(captures, *block, target)
        _sources.put(key, found)
    return found


def _place(device: torch.device) -> tuple[Device, int]:
    if device.type != "cuda":
        return detect(device), -1
    return detect(device), torch.cuda.current_device() if device.index is None else device.index


def _launch(
    source: Source, target: Device, index: int, programs: int, given: dict[str, Any]
) -> None:
    kernel = builder().kernel(source, target, index)
    launcher, values = kernel.prepare(programs, {}, list(given)), list(given.values())
    if index < 0:
        launcher.launch(-1, values)
        return
    with torch.cuda.device(index):
        launcher.launch(torch.cuda.current_stream(index).cuda_stream, values)
