"""Launch: everything of one call that its shapes decide, computed once; then tensors in, run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.build import Kernel
from flexattn.device import Device
from flexattn.dispatch import Choice, Dispatcher, Geometry, geometry
from flexattn.mods import Bound
from flexattn.options import Options
from flexattn.problem import Problem
from flexattn.render.arguments import captured_values, tma_block
from flexattn.space.config import PrefillConfig


class Lists(NamedTuple):
    """A BlockMask's lists as a kernel reads them: int32, contiguous, [B, H, q blocks(, width)]."""

    kv_num: Tensor
    kv_idx: Tensor
    full_num: Tensor | None
    full_idx: Tensor | None


class Box(NamedTuple):
    """What a tensor descriptor of K or V needs beside the address."""

    shape: list[int]
    strides: list[int]
    block: list[int]


class Outputs(NamedTuple):
    """What a kernel writes: out [B, Hq, q_len, Dv]; lse and max_scores fp32 [B, Hq, q_len]."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


@dataclass(frozen=True, slots=True)
class Launch:
    """A chosen kernel with the arguments that do not change while shapes and strides do not."""

    choice: Choice
    kernel: Kernel
    combine: Kernel | None
    geometry: Geometry
    device: torch.device
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    boxes: tuple[Box, Box] | None
    sizes: tuple[int, ...]
    mask_strides: tuple[int, ...]

    @property
    def problem(self) -> Problem:
        """What the kernel was chosen for."""
        return self.choice.problem

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        lists: Lists | None,
        score: Bound | None,
        mask: Bound | None,
    ) -> Outputs:
        """Allocate the outputs and launch on the current stream."""
        outputs = self._outputs(q.dtype)
        stats = [each for each in outputs[1:] if each is not None]
        keys: list[Any] = [k, v]
        if self.boxes is not None:
            keys = [_descriptor(k, self.boxes[0]), _descriptor(v, self.boxes[1])]
        args: list[Any] = [q, *keys, outputs.out, *stats]
        workspace = None
        if self.combine is not None:
            workspace = self._workspace()
            args.append(workspace)
        args += self.sizes
        args.append(scale)
        if lists is not None:
            args += [each for each in lists if each is not None]
            args += self.mask_strides
        structure = self.problem.structure
        args += captured_values(structure.score, score)
        args += captured_values(structure.mask, mask)
        index = self.device.index if self.device.type == "cuda" else -1
        if index < 0:
            self._launch(-1, args, workspace, outputs, stats)
        elif index == torch.cuda.current_device():
            self._launch(
                torch._C._cuda_getCurrentRawStream(index), args, workspace, outputs, stats
            )
        else:
            with torch.cuda.device(index):
                stream = torch._C._cuda_getCurrentRawStream(index)
                self._launch(stream, args, workspace, outputs, stats)
        return outputs

    def _launch(
        self,
        stream: int,
        args: Sequence[Any],
        workspace: Tensor | None,
        outputs: Outputs,
        stats: list[Tensor],
    ) -> None:
        self.kernel.launch(self.geometry.programs, stream, args)
        if self.combine is not None and self.geometry.num_splits > 1:
            problem = self.problem
            rows = problem.B * problem.Hq * problem.q_len
            strides = self.out_strides[:3]
            merged = [workspace, outputs.out, *stats, *strides, problem.Hq, problem.q_len]
            self.combine.launch(rows, stream, [*merged, self.geometry.num_splits, rows])

    def _outputs(self, dtype: torch.dtype) -> Outputs:
        structure = self.problem.structure
        out = torch.empty_strided(
            self.out_shape, self.out_strides, dtype=dtype, device=self.device
        )
        rows = self.out_shape[:3]
        lse = torch.empty(rows, device=self.device) if structure.lse else None
        maxima = torch.empty(rows, device=self.device) if structure.max_scores else None
        return Outputs(out, lse, maxima)

    def _workspace(self) -> Tensor:
        """Partial values, maxima and sums in fp32: rows * splits * (head dimension of v + 2)."""
        problem = self.problem
        slots = problem.B * problem.Hq * problem.q_len * self.geometry.num_splits
        words = slots * (problem.structure.head_dim_v + 2) if self.geometry.num_splits > 1 else 4
        return torch.empty(words, device=self.device)


def prepare(
    problem: Problem,
    target: Device,
    device: torch.device,
    dispatcher: Dispatcher,
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists | None,
) -> Launch:
    """Choose and build the kernel for a problem and compute what its shapes and strides decide."""
    index = device.index if device.type == "cuda" else -1
    choice, kernel, combine = dispatcher.kernels(problem, target, index, options)
    config = choice.config
    grid = geometry(problem, config, target)
    structure = problem.structure
    out_shape = (problem.B, problem.Hq, problem.q_len, structure.head_dim_v)
    out_strides = _like(q, out_shape)
    layout = structure.layout
    sizes: list[int] = []
    for tensor, contiguous in (
        (q, layout.q_contiguous),
        (k, layout.k_contiguous),
        (v, layout.v_contiguous),
    ):
        sizes += _strides(tensor)[: 3 if contiguous else 4]
    sizes += out_strides[:3]
    group = problem.Hq // problem.Hkv
    sizes += [problem.Hq, group, problem.q_len, problem.kv_len, grid.num_tiles]
    if combine is not None:
        sizes += [grid.num_splits, problem.B * problem.Hq * problem.q_len]
    boxes = None
    if isinstance(config, PrefillConfig) and config.use_tma:
        boxes = (
            _box(k, tma_block(config, structure.head_dim_qk)),
            _box(v, tma_block(config, structure.head_dim_v)),
        )
    return Launch(
        choice,
        kernel,
        combine,
        grid,
        device,
        out_shape,
        out_strides,
        boxes,
        tuple(sizes),
        _mask_strides(lists),
    )


def _mask_strides(lists: Lists | None) -> tuple[int, ...]:
    """Rows between batches and heads (0 where the mask broadcasts), and the lists' widths."""
    if lists is None:
        return ()
    B, H, blocks = lists.kv_num.shape
    strides = [0 if B == 1 else H * blocks, 0 if H == 1 else blocks, lists.kv_idx.shape[-1]]
    if lists.full_idx is not None:
        strides.append(lists.full_idx.shape[-1])
    return tuple(strides)


def _like(q: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for the output in the order of q's dimensions, the last one innermost."""
    order = sorted(range(3), key=lambda dim: (q.stride(dim), -dim), reverse=True)
    strides, step = [0, 0, 0, 1], shape[3]
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _strides(tensor: Tensor) -> list[int]:
    """Strides with 0 where a dimension has one element, whatever torch keeps there."""
    return [
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]


def _box(tensor: Tensor, block: tuple[int, ...]) -> Box:
    """A descriptor's strides must be above 0, also along dimensions that are never stepped."""
    span = max(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    strides = [stride or span for stride in _strides(tensor)]
    strides[-1] = 1
    return Box(list(tensor.shape), strides, list(block))


def _descriptor(tensor: Tensor, box: Box) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, *box)
