"""Backward: the launches of a call's gradients, prepared once for its shapes; then tensors in.

Every family of the kind "backward" is given the same: q, k, v, the output, its gradient, lse as
the forward writes it and its gradient, and memory for delta, fp32 [B, Hq, q_len], which its first
kernel makes: rowsum(out * its gradient) - lse's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.kernels.base.binding import strides
from flexattn.kernels.base.config import Geometry
from flexattn.kernels.base.family import Around
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.options import Options
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.printers.gradient_printer import grad_name
from flexattn.mods import Bound
from flexattn.mods.expr import walk
from flexattn.problem import Problem
from flexattn.problem.inputs import Dropout
from flexattn.runtime.build import Launcher, builder
from flexattn.runtime.decay_skip import TILES_FOUND, VISITS_ALL, DecayBlocks
from flexattn.runtime.dispatch import Choice, Dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import raw_stream, rest_names, rest_values
from flexattn.runtime.layout import DescriptorBox, box_of, dense_box, input_strides, strides_like

_TILES = ("Q_TILES", "DO_TILES", "K_TILES", "V_TILES")
_GIVEN = (
    "Q", "K", "V", "OUT", "DO", "LSE", "DLSE", "DELTA", "DQ", "DK", "DV", "sm_scale", *_TILES,
    *TILES_FOUND,
)  # fmt: skip
_RESULTS = ("DQ", "DK", "DV")


class Gradients(NamedTuple):
    """Of q, k and v in their shapes; of captured tensors, by the slots of the structure."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: tuple[Tensor, ...]
    delta: Tensor


@dataclass(frozen=True, slots=True)
class _AroundLaunch:
    """What is launched before and after the kernel, and the memory that they share with it.

    before: without and with a gradient of lse. trim: before both.
    """

    before: tuple[Launcher, Launcher]
    after: Launcher | None
    trim: Launcher | None
    scratch: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        around: Around,
        target: Device,
        index: int,
        fixed: dict[str, Any],
        given: Sequence[str],
        trimmed: TrimmedRuns | None,
    ) -> _AroundLaunch:
        def prepared(source: Source, programs: int = around.programs) -> Launcher:
            kernel = builder().kernel(source, target, index)
            return kernel.prepare(programs, fixed, given, spare=(*fixed, *given))

        before, through_lse = map(prepared, around.before)
        after = None if around.after is None else prepared(around.after)
        trim = None
        if around.trim is not None and trimmed is not None:
            trim = prepared(around.trim, trimmed.programs)
        return cls((before, through_lse), after, trim, tuple(x for _, x in around.scratch))

    def allocate(self, device: torch.device) -> list[Tensor]:
        return [torch.empty(x, dtype=torch.float32, device=device) for x in self.scratch]


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """A chosen kernel, and those around it, with what does not change while shapes do not.

    rest: names of what `rest_of` gives. deterministic: whether dq's sums are in order. decay: what
    finds the tiles that have weights, where far ones are proven to have none.
    """

    choice: Choice
    geometry: Geometry
    gpu: int
    around: _AroundLaunch
    attend: Launcher
    runs: bool
    rest: tuple[str, ...]
    deterministic: bool = False
    decay: DecayBlocks | None = None

    @property
    def problem(self) -> Problem:
        """What the kernel was chosen for."""
        return self.choice.problem

    def rest_of(
        self,
        lists: BothLists | None,
        score: Bound | None,
        mask: Bound | None,
        dropout: Dropout | None = None,
    ) -> tuple[Any, ...]:
        """What the mask's lists hold and what the mods capture, as the kernel is given it."""
        read = {} if lists is None else lists.read(self.runs, self.deterministic)
        return rest_values(self.rest, self.problem, read, score, mask, dropout)

    def run(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        grads: tuple[Tensor, Tensor | None],
        scale: float,
        rest: Sequence[Any],
        captured: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
    ) -> Gradients:
        """Allocate the gradients and launch on the current stream.

        inputs: q, k and v. grads: of out, laid out as `fits` asks, and of lse. captured: the
        tensors of the structure's slots. into: where those of q, k and v go, of the strides that
        the launch was prepared for.
        """
        if self.gpu >= 0 and self.gpu != torch._C._cuda_getDevice():
            with torch.cuda.device(self.gpu):
                return self.run(inputs, out, lse, grads, scale, rest, captured, into)
        stream = raw_stream(self.gpu) if self.gpu >= 0 else -1
        dout, dlse = grads
        delta = torch.empty(lse.shape, dtype=torch.float32, device=out.device)
        dq, dk, dv = map(like, inputs) if into is None else into
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=out.device) for x in captured]
        q, k, v = inputs
        around = self.around
        scratch = around.allocate(out.device)
        near = (None,) * 3 if self.decay is None else self.decay.empty(out.device)
        given = (q, k, v, out, dout, lse, dlse, delta, dq, dk, dv, scale, q, dout, k, v)
        given = (*given, *near, *scratch, *rest, *sums)
        if self.decay is not None:
            self.decay.run(given, stream)
        if around.trim is not None:
            around.trim.launch(stream, given)
        around.before[dlse is not None].launch(stream, given)
        self.attend.launch(stream, given)
        if around.after is not None:
            around.after.launch(stream, given)
        found = [total.to(x.dtype) for total, x in zip(sums, captured, strict=True)]
        return Gradients(dq, dk, dv, tuple(found), delta)


def like(tensor: Tensor) -> Tensor:
    """Memory for a gradient, dense in the order of its tensor's dimensions."""
    strides = strides_like(tensor, tuple(tensor.shape))
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def stride_step(width: int, itemsize: int) -> int:
    """What strides of a gradient with rows of a width are multiples of, in elements.

    Those of a dense one are of its width, and a kernel may have been compiled for that.
    """
    return max(gcd(16, width), 16 // itemsize)


def fits(tensor: Tensor) -> bool:
    """Whether kernels can read an output or its gradient as it lies: dense, rows aligned."""
    if tensor.data_ptr() % 16 or tensor.stride(-1) != 1:
        return False
    return tensor.stride() == strides_like(tensor, tuple(tensor.shape))


def prepare_backward(
    problem: Problem,
    target: Device,
    device: torch.device,
    dispatcher: Dispatcher,
    options: Options,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    dout: Tensor,
    lists: BothLists | None,
    into: Sequence[Tensor] | None = None,
) -> BackwardLaunch:
    """Choose and build the kernels for a problem.

    inputs: q, k and v. out and dout: laid out as `fits` asks. into: where gradients of the inputs
    go: rows contiguous, all else in whole 16 bytes and whole `stride_step`s; None where they are
    allocated.
    """
    index = device.index if device.type == "cuda" else -1
    choice, kernel, _ = dispatcher.kernels(problem, target, index, options)
    config, structure = choice.config, problem.structure
    family = family_of(config)
    grid = family.grid(problem, config, target)
    q, k, v = inputs
    dq, dk, dv = (
        [strides_like(x, tuple(x.shape)) for x in inputs]
        if into is None
        else [x.stride() for x in into]
    )
    fixed: dict[str, Any] = {
        **input_strides(problem, q, k, v),
        **strides("stride_o", "bhm", out),
        **strides("stride_do", "bhm", dout),
        **_named("stride_dq", "bhm", dq),
        **_named("stride_dk", "bhn", dk),
        **_named("stride_dv", "bhn", dv),
        "Hq": problem.Hq, "group": problem.Hq // problem.Hkv,
        "q_len": problem.q_len, "kv_len": problem.kv_len,
        **family.bind(problem, config, grid),
    }  # fmt: skip
    names = {each.name: each for each in choice.source.arguments}
    runs = not names.keys().isdisjoint(("KV_RUNS", "Q_RUNS", TRIMMED))
    deterministic = "Q_ORDER" in names
    if lists is not None:
        fixed |= _mask_strides(lists, runs, deterministic)
    rest = rest_names(structure, () if lists is None else lists.read(runs, deterministic))
    boxes = {name: box_of(x) for name, x in zip("QKV", inputs, strict=True)}
    boxes |= {f"{name}_TILES": box for name, box in boxes.items()}
    boxes |= {"DO": box_of(dout), "DO_TILES": box_of(dout)}
    boxes |= {
        name: DescriptorBox(tuple(x.shape), steps)
        for name, x, steps in zip(_RESULTS, inputs, (dq, dk, dv), strict=True)
    }
    around = family.around(problem, config, target)
    assert around is not None
    trimmed = None
    if around.trim is not None:
        assert lists is not None
        trimmed = TrimmedRuns.of(problem, grid, lists)
        fixed |= trimmed.told
        around = around._replace(scratch=(*around.scratch, (TRIMMED, trimmed.shape)))
    given = (
        *_GIVEN,
        *(name for name, _ in around.scratch),
        *rest,
        *map(grad_name, structure.grads),
    )
    boxes |= {name: dense_box(shape) for name, shape in around.scratch}
    decay = None
    if around.blocks is not None:
        decay = DecayBlocks.of(problem, around.blocks, inputs, fixed, given, target, index)
        # Where nothing is left out their addresses are 0, and the same kernel visits all tiles.
        fixed |= VISITS_ALL if decay is None else {}
    launched = _AroundLaunch.of(around, target, index, fixed, given, trimmed)
    boxes = {name: box for name, box in boxes.items() if name in names and names[name].described}
    return BackwardLaunch(
        choice,
        grid,
        index,
        launched,
        kernel.prepare(grid.programs, fixed, given, boxes, spare=(*fixed, *given)),
        runs,
        rest,
        deterministic,
        decay,
    )


def _named(prefix: str, axes: str, steps: Sequence[int]) -> dict[str, int]:
    return {f"{prefix}{axis}": step for axis, step in zip(axes, steps, strict=False)}


def _mask_strides(lists: BothLists, runs: bool, deterministic: bool) -> dict[str, int]:
    """Rows between batches and heads, 0 where the mask broadcasts, and the widths of lists."""
    found: dict[str, int] = {}
    for name, each in (("kv", lists.by_query), ("q", lists.by_key)):
        B, H, blocks = each.kv_num.shape
        found[f"stride_{name}_mask_b"] = 0 if B == 1 else H * blocks
        found[f"stride_{name}_mask_h"] = 0 if H == 1 else blocks
    if deterministic:
        found["Q_ORDER_WIDTH"] = lists.by_query.kv_num.shape[-1]
    if not runs:
        found |= {
            key.replace("IDX", "WIDTH"): tensor.shape[-1]
            for key, tensor in lists.read(runs).items()
            if key.endswith("IDX")
        }
    return found


TRIMMED = "M_RUNS"


class TrimmedRuns(NamedTuple):
    """M_RUNS of one problem: its shape, the programs that fill it, what kernels are told."""

    shape: tuple[int, ...]
    programs: int
    told: dict[str, int]

    @classmethod
    def of(cls, problem: Problem, grid: Geometry, lists: BothLists) -> TrimmedRuns:
        """Of as many heads and batches as a mask's lists have, or as its mask_mod tells apart."""
        assert problem.structure.mask is not None
        names = {x.value for x in walk(problem.structure.mask.mod.expr) if x.op == "var"}
        listed = lists.by_key.kv_num.shape
        batches, heads = (
            size if name in names or listed[axis] > 1 else 1
            for axis, (name, size) in enumerate((("b", problem.B), ("h", problem.Hq)))
        )
        tiles = grid.num_tiles
        told = {
            "mask_heads": heads,
            "stride_m_runs_b": heads * tiles if batches > 1 else 0,
            "stride_m_runs_h": tiles if heads > 1 else 0,
        }
        return cls((batches, heads, tiles, 4), batches * heads * tiles, told)
