"""Launch: everything of one call that its shapes decide, computed once; then tensors in, run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.build import Launcher
from flexattn.counters import counter
from flexattn.descales import NO_DESCALES, Descales
from flexattn.device import Device
from flexattn.dispatch import Choice, Dispatcher
from flexattn.mods import Bound
from flexattn.narrow_values import NarrowValues
from flexattn.options import Options
from flexattn.problem import Problem, Sparsity, out_dtype
from flexattn.reach import Reach, pays
from flexattn.reach import begin as begin_reach
from flexattn.render.arguments import captured_values
from flexattn.runs import known_runs
from flexattn.space.config import GluonPrefillConfig, PrefillConfig
from flexattn.space.terms import skips_far
from flexattn.space.tiles import Geometry, geometry, walks_runs


class Lists(NamedTuple):
    """A BlockMask's lists as a kernel reads them: int32, contiguous, [B, H, q blocks(, width)].

    runs: int32 [B, H, q blocks, 4], what a kernel reads instead where the lists are runs.
    """

    kv_num: Tensor
    kv_idx: Tensor
    full_num: Tensor | None
    full_idx: Tensor | None
    runs: Tensor | None = None

    @classmethod
    def of(cls, mask: BlockMask) -> Lists:
        """The lists of a BlockMask; views of them where they are as kernels read them."""
        full_num, full_idx = mask.full_kv_num_blocks, mask.full_kv_indices
        return cls(
            _list(mask.kv_num_blocks),
            _list(mask.kv_indices),
            None if full_num is None else _list(full_num),
            None if full_idx is None else _list(full_idx),
            known_runs(mask),
        )

    def read(self, runs: bool) -> list[Tensor]:
        """The tensors that a kernel takes, in the order of its arguments."""
        if runs:
            assert self.runs is not None, "a kernel of runs is chosen for a mask that has them"
            return [self.runs]
        return [each for each in self[:4] if each is not None]

    def sparsity(self, block_size: tuple[int, int], group: int) -> Sparsity:
        """What they mean to a kernel's code; `group` query heads share a KV head."""
        per_head = group > 1 and self.kv_num.shape[1] > 1
        return Sparsity(*block_size, self.full_idx is not None, per_head, self.runs is not None)


class Box(NamedTuple):
    """What a tensor descriptor of q, k or v needs beside the address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Outputs(NamedTuple):
    """What a kernel writes: out [B, Hq, q_len, Dv]; lse and max_scores fp32 [B, Hq, q_len]."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


@dataclass(frozen=True, slots=True)
class Launch:
    """A chosen kernel with the arguments that do not change while shapes and strides do not.

    gpu: the device's index, -1 where it is none. dtype, out_shape, out_strides: of the output.
    combine: decode's second kernel, where there are splits to merge. workspace: floats that the
    splits leave for it. runs: the kernel reads a mask's runs, not its lists. counts: its blocks
    take their tiles from a counter. narrow: what V of fp8 passes before it. reach: finds which
    keys are too far to count, where the call is long enough for that.
    """

    choice: Choice
    geometry: Geometry
    device: torch.device
    gpu: int
    dtype: torch.dtype
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    attend: Launcher
    combine: Launcher | None
    workspace: int
    runs: bool
    counts: bool = False
    narrow: NarrowValues | None = None
    reach: Reach | None = None

    @property
    def problem(self) -> Problem:
        """What the kernel was chosen for."""
        return self.choice.problem

    def rest_of(
        self, lists: Lists | None, score: Bound | None, mask: Bound | None
    ) -> tuple[Any, ...]:
        """The arguments that follow the scale: the mask's lists, then what the mods capture.

        They are the same for as long as these tensors have the sizes and strides they have.
        """
        structure = self.choice.problem.structure
        return (
            *(() if lists is None else lists.read(self.runs)),
            *captured_values(structure.score, score),
            *captured_values(structure.mask, mask),
        )

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        rest: Sequence[Any],
        sinks: Tensor | None = None,
        descales: Descales = NO_DESCALES,
    ) -> Outputs:
        """Allocate the outputs and launch on the current stream; rest: what `rest_of` gave."""
        device, structure, shape, gpu = (
            self.device, self.choice.problem.structure, self.out_shape, self.gpu,
        )  # fmt: skip
        if gpu >= 0 and gpu != torch._C._cuda_getDevice():
            with torch.cuda.device(gpu):
                return self.run(q, k, v, scale, rest, sinks, descales)
        stream = raw_stream(gpu) if gpu >= 0 else -1
        out = torch.empty_strided(shape, self.out_strides, dtype=self.dtype, device=device)
        lse = maxima = None
        written: list[Any] = [out]
        if structure.lse:
            lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
            written.append(lse)
        if structure.max_scores:
            maxima = torch.empty(shape[:3], dtype=torch.float32, device=device)
            written.append(maxima)
        if structure.fp8 and self.narrow is None:
            v = v.to(self.dtype, memory_format=torch.contiguous_format)
        given: list[Any] = [q, k, v, *written]
        merged: list[Any] = []
        if self.workspace:
            workspace = torch.empty(self.workspace, dtype=torch.float32, device=device)
            given.append(workspace)
            merged = [workspace, *written]
        if self.counts:
            given.append(counter(device, stream))
        given.append(scale)
        if sinks is not None:
            given.append(sinks)
            merged.append(sinks)
        if descales is not NO_DESCALES:
            given += [each for each in descales if each is not None]
        reaches = None if self.reach is None else self.reach.empty(device)
        if reaches is not None:
            given.append(reaches)
        given += rest
        self._launch(stream, given, merged, reaches, scale, rest)
        return Outputs(out, lse, maxima)

    def _launch(
        self,
        stream: int,
        given: list[Any],
        merged: list[Any],
        reaches: Tensor | None,
        scale: float,
        rest: Sequence[Any],
    ) -> None:
        if self.narrow is not None:
            given[2] = self.narrow.run(given[2], stream)
        if self.reach is not None and reaches is not None:
            self.reach.run(given[0], given[1], reaches, scale, rest, stream)
        self.attend.launch(stream, given)
        if self.combine is not None:
            self.combine.launch(stream, merged)


def _list(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int32:
        tensor = tensor.to(torch.int32)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def raw_stream(index: int) -> int:
    """The handle of a GPU's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(index))


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
    descales: Descales = NO_DESCALES,
) -> Launch:
    """Choose and build the kernel for a problem and compute what its shapes and strides decide."""
    index = device.index if device.type == "cuda" else -1
    begin_reach(problem.structure, target, index)
    choice, kernel, merger = dispatcher.kernels(problem, target, index, options)
    config, structure = choice.config, problem.structure
    grid = geometry(problem, config, target)
    out_shape = (problem.B, problem.Hq, problem.q_len, structure.head_dim_v)
    out_strides = _like(q, out_shape)
    statistics = [None] * (structure.lse + structure.max_scores)
    fixed: list[Any] = [None, None, None, None, *statistics]
    rows = problem.B * problem.Hq * problem.q_len
    split = grid.num_splits > 1
    if merger is not None:
        # A kernel that does not split never touches its workspace.
        fixed.append(None if split else 0)
    fixed += _sizes(problem, q, k, v)
    fixed += out_strides[:3]
    fixed += [problem.Hq, problem.Hq // problem.Hkv, problem.q_len, problem.kv_len]
    fixed.append(grid.num_tiles)
    if isinstance(config, GluonPrefillConfig):
        fixed.append(grid.num_tiles * problem.B * (problem.Hq // config.heads))
    counts = isinstance(config, GluonPrefillConfig) and config.schedule == "dynamic"
    if counts:
        fixed.append(None)
    if merger is not None:
        fixed += [grid.num_splits, rows]
    fixed.append(None)
    runs = walks_runs(structure, config)
    sinks = [None] * bool(structure.sinks)
    fixed += sinks
    if structure.fp8:
        # A factor that is not given has address 0, which the kernel reads as 1.
        fixed += [0 if each is None else None for each in descales] + descales.strides()
    reach = None
    if skips_far(structure, config):
        # Where it would not pay it has address 0, and the same kernel visits all keys; its own
        # kernels are built for every length, so that a longer call compiles nothing.
        before = 0 if lists is None else len(lists.read(runs))
        reach = Reach.of(problem, q, k, before, target, index)
        reach = reach if pays(problem) else None
        fixed.append(0 if reach is None else None)
    if lists is not None:
        fixed += [None] * len(lists.read(runs))
        fixed += _mask_strides(lists, runs)
    captured = len(choice.source.arguments) - len(fixed)
    assert captured >= 0, "a kernel has every argument that a launch gives it"
    fixed += [None] * captured
    boxes, narrow = [], None
    if isinstance(config, GluonPrefillConfig):
        values = _dense(v.shape) if structure.fp8 else _box(v)
        if config.narrow:
            narrow = NarrowValues.of(v, target, index)
            values = _dense(narrow.shape)
        boxes = [_box(q), _box(k), values, Box(out_shape, out_strides)]
    elif isinstance(config, PrefillConfig) and config.use_tma:
        boxes = [_box(q), _box(k), _box(v)]
    combine = None
    if merger is not None and split:
        sizes = [*out_strides[:3], problem.Hq, problem.q_len, grid.num_splits, rows]
        combine = merger.prepare(rows, [None, None, *statistics, *sinks, *sizes], ())
    return Launch(
        choice,
        grid,
        device,
        index,
        out_dtype(q.dtype),
        out_shape,
        out_strides,
        kernel.prepare(grid.programs, fixed, boxes),
        combine,
        rows * grid.num_splits * (structure.head_dim_v + 2) if combine is not None else 0,
        runs,
        counts,
        narrow,
        reach,
    )


def _sizes(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """Strides of q, k and v, as many as the kernel asks for."""
    layout = problem.structure.layout
    return [
        stride
        for tensor, contiguous in (
            (q, layout.q_contiguous),
            (k, layout.k_contiguous),
            (v, layout.v_contiguous),
        )
        for stride in _strides(tensor)[: 3 if contiguous else 4]
    ]


def _mask_strides(lists: Lists, runs: bool) -> list[int]:
    """Rows between batches and heads (0 where the mask broadcasts), and the widths of lists."""
    B, H, blocks = lists.kv_num.shape
    strides = [0 if B == 1 else H * blocks, 0 if H == 1 else blocks]
    return strides if runs else strides + [each.shape[-1] for each in lists.read(runs)[1::2]]


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


def _dense(shape: tuple[int, ...]) -> Box:
    """Of what lies contiguous: fp8's V in bfloat16, or with its keys innermost."""
    _, heads, rows, width = shape
    strides = (heads * rows * width, rows * width, width, 1)
    return Box(tuple(shape), strides)


def _box(tensor: Tensor) -> Box:
    """A descriptor's strides are above 0 and whole 16 bytes, also where they are never stepped."""
    span = max(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span += -span % (16 // tensor.element_size())
    strides = [stride or span for stride in _strides(tensor)]
    strides[-1] = 1
    return Box(tuple(tensor.shape), tuple(strides))
