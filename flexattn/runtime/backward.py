"""Backward: the launches of a call's gradients, prepared once for its shapes; then tensors in.

Every family of the kind "backward" is given the same: q, k, v, the output, its gradient, lse as
the forward writes it and its gradient, and memory for delta, fp32 [B, Hq, q_len], which its first
kernel makes: rowsum(out * its gradient) - lse's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.kernels.base.binding import strides
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.options import Options
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.printers.gradient_printer import grad_name
from flexattn.mods import Bound
from flexattn.mods.derivative import loaded_floats
from flexattn.mods.expr import walk
from flexattn.problem import Problem
from flexattn.problem.problem import captures_of
from flexattn.runtime.build import Before, Launcher, Scratch, builder
from flexattn.runtime.decay_skip import TILES_FOUND, VISITS_ALL, decay_tiles
from flexattn.runtime.dispatch import Dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import (
    DescriptorBox,
    Launch,
    box_of,
    dense_box,
    input_strides,
    raw_stream,
    rest_names,
    strides_like,
    widths,
)

_TILES = ("Q_TILES", "DO_TILES", "K_TILES", "V_TILES")
_GIVEN = (
    "Q", "K", "V", "OUT", "DO", "LSE", "DLSE", "DELTA", "DQ", "DK", "DV", "sm_scale", *_TILES,
    "DK_ROWS", "DV_ROWS",
)  # fmt: skip
_RESULTS = ("DQ", "DK", "DV")


class Gradients(NamedTuple):
    """The gradients of q, k, v in their shapes; of captured tensors, by the structure's slots."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: tuple[Tensor, ...]
    delta: Tensor


@dataclass(frozen=True, slots=True)
class BackwardLaunch(Launch):
    """The launch of a call's gradients; through_lse: its kernels where lse has a gradient too."""

    through_lse: tuple[Launcher, ...]

    def run(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        grads: tuple[Tensor, Tensor | None],
        scale: float,
        rest: Sequence[Any],
        captured: Sequence[Tensor],
    ) -> Gradients:
        """Allocate the gradients and launch on the current stream.

        inputs: q, k and v, of packed sequences as one batch. rest: what `rest_of` gave, behind
        cu_seqlens int32 of both. lse: contiguous, of packed sequences as `by_rows` lays it out.
        grads: of out, laid out as `fits` asks, and of lse. captured: the tensors of the
        structure's slots.
        """
        if self.gpu >= 0 and self.gpu != torch._C._cuda_getDevice():
            with torch.cuda.device(self.gpu):
                return self.run(inputs, out, lse, grads, scale, rest, captured)
        stream = raw_stream(self.gpu) if self.gpu >= 0 else -1
        dout, dlse = grads
        lse = by_rows(lse) if self.problem.structure.ragged_kv else lse
        delta = torch.empty(lse.shape, dtype=torch.float32, device=out.device)
        dq, dk, dv = map(like, inputs)
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=out.device) for x in captured]
        q, k, v = inputs
        given = (
            q, k, v, out, dout, lse, dlse, delta, dq, dk, dv, scale, q, dout, k, v, dk, dv,
            *[each.empty(self.gpu) for each in self.scratch], *rest, *sums,
        )  # fmt: skip
        for each in self.kernels if dlse is None else self.through_lse:
            each.launch(stream, given)
        found = [total.to(x.dtype) for total, x in zip(sums, captured, strict=True)]
        return Gradients(dq, dk, dv, tuple(found), delta)


def like(tensor: Tensor) -> Tensor:
    """Memory for a gradient, dense in the order of its tensor's dimensions."""
    strides = strides_like(tensor, tuple(tensor.shape))
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def by_rows(lse: Tensor) -> Tensor:
    """lse [1, Hq, length] as the forward of packed sequences lays it out: rows of heads."""
    if lse.mT.is_contiguous() and lse.data_ptr() % 16 == 0:
        return lse
    return lse.mT.clone(memory_format=torch.contiguous_format).mT


def fits(tensor: Tensor) -> bool:
    """True if kernels can read an output or its gradient as it lies: dense, rows aligned."""
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
) -> BackwardLaunch:
    """Choose and build the kernels for a problem.

    inputs: q, k and v. out and dout: laid out as `fits` asks.
    """
    index = device.index if device.type == "cuda" else -1
    choice = dispatcher.choose(problem, target, index, options)
    config, structure = choice.config, problem.structure
    family = family_of(config)
    grid = family.grid(problem, config, target)
    q, k, v = inputs
    dq, dk, dv = (strides_like(x, tuple(x.shape)) for x in inputs)
    fixed = {
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
    around = family.around(problem, config, target)
    assert around is not None
    names = {each.name: each for each in choice.source.arguments}
    runs = not names.keys().isdisjoint(("KV_RUNS", "Q_RUNS", TRIMMED))
    read: dict[str, Tensor] = {}
    if lists is not None:
        read = lists.read(runs, "Q_ORDER" in names)
        fixed |= {**lists.by_query.strides("kv_mask"), **lists.by_key.strides("q_mask")}
        fixed |= widths(read)
        if "Q_ORDER" in names:
            fixed["Q_ORDER_WIDTH"] = lists.by_query.kv_num.shape[-1]
    rest = rest_names(structure, read)
    boxes = {name: box_of(x) for name, x in zip("QKV", inputs, strict=True)}
    boxes |= {f"{name}_TILES": box for name, box in boxes.items()}
    boxes |= {"DO": box_of(dout), "DO_TILES": box_of(dout)}
    boxes |= {
        name: DescriptorBox(tuple(x.shape), steps)
        for name, x, steps in zip(_RESULTS, inputs, (dq, dk, dv), strict=True)
    }
    scratch = [
        Scratch(name, shape, torch.int32 if name in _LISTED else torch.float32)
        for name, shape in around.scratch
    ]
    boxes |= {each.name: dense_box(each.shape) for each in scratch}
    trims = 0
    cut = PACKED if structure.ragged_kv else ()
    if structure.ragged_kv:
        trims = problem.B
    elif around.trim is not None:
        assert lists is not None
        (batches, heads), told = trimmed_for(problem, lists, grid.num_tiles)
        trims, fixed = batches * heads * grid.num_tiles, fixed | told
        scratch.append(Scratch(TRIMMED, (batches, heads, grid.num_tiles, 4)))
    behind = (*(each.name for each in scratch), *cut, *rest, *map(grad_name, structure.grads))
    given, before = (*_GIVEN, *behind), Before()
    if around.blocks is not None:
        longer = (*_GIVEN, *TILES_FOUND, *behind)
        found = decay_tiles(problem, around.blocks, inputs, fixed, longer, target, index)
        if found is None:
            # Their addresses are 0, and the same kernel visits all tiles.
            fixed |= VISITS_ALL
        else:
            before, given = found, longer

    def prepared(source: Source | None, programs: int = around.programs) -> tuple[Launcher, ...]:
        if source is None:
            return ()
        made = builder().kernel(source, target, index)
        return (made.prepare(programs, fixed, given, spare=(*fixed, *given)),)

    first = (*before.kernels, *prepared(around.trim, trims))
    boxes = {name: box for name, box in boxes.items() if name in names and names[name].described}
    attend = choice.kernels[0].prepare(grid.programs, fixed, given, boxes, spare=(*fixed, *given))
    last = (attend, *prepared(around.after), *(prepared(*around.sums) if around.sums else ()))
    plain, through_lse = ((*first, *prepared(each), *last) for each in around.before)
    return BackwardLaunch(
        plain,
        choice,
        grid,
        device,
        index,
        (*before.scratch, *scratch),
        runs,
        rest,
        through_lse,
    )


def _named(prefix: str, axes: str, steps: Sequence[int]) -> dict[str, int]:
    return {f"{prefix}{axis}": step for axis, step in zip(axes, steps, strict=False)}


# Of packed sequences, what calls give in front of `rest`.
PACKED = ("CU_SEQLENS", "CU_SEQLENS_K")
# And what is listed of their tiles.
_LISTED = ("KEY_TILES", "ROW_TILES")
# The ends of a backward's walks, where a mask's runs are trimmed to its tiles.
TRIMMED = "M_RUNS"


def trimmed_for(
    problem: Problem, lists: BothLists, tiles: int
) -> tuple[tuple[int, int], dict[str, int]]:
    """Batches and heads of TRIMMED, [batches, heads, tiles, 4], and what kernels are told of it.

    As many as a mask's lists have, or as its mask_mod tells apart.
    """
    assert problem.structure.mask is not None
    names = {x.value for x in walk(problem.structure.mask.mod.expr) if x.op == "var"}
    listed = lists.by_key.kv_num.shape
    batches, heads = (
        size if name in names or listed[axis] > 1 else 1
        for axis, (name, size) in enumerate((("b", problem.B), ("h", problem.Hq)))
    )
    return (batches, heads), {
        "mask_heads": heads,
        "stride_m_runs_b": heads * tiles if batches > 1 else 0,
        "stride_m_runs_h": tiles if heads > 1 else 0,
    }


def slots_among(tensors: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[int, ...]:
    """The slots of those tensors that are wanted."""
    return tuple(s for s, x in enumerate(tensors) if any(x is each for each in wanted))


def slots_of(score: Bound | None) -> tuple[int, ...]:
    """The slots of a score_mod's tensors that require a gradient."""
    if score is None or captures_of(score) is None:
        return ()
    return tuple(s for s in loaded_floats(score.mod) if score.tensors[s].requires_grad)
