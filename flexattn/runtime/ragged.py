"""Kernels of rows that lengths on the device cut, and the launch of packed sequences by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import BuildError, ConfigError, WrongKernelError
from flexattn.kernels.base.config import Geometry
from flexattn.kernels.base.family import KernelFamily
from flexattn.kernels.base.ragged import TILE_WORDS
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.hopper.family import PREFILL
from flexattn.kernels.hopper.ragged import (
    CUT_WORDS,
    merge_programs,
    part_words,
    render_merge_parts,
    render_row_tiles,
)
from flexattn.kernels.hopper_backward.family import BACKWARD
from flexattn.mods import Bound
from flexattn.problem import DTYPES, Problem, Shape, captures_of, make_problem
from flexattn.problem.facts import layout_of
from flexattn.problem.serving import ServingForm, ServingProblem
from flexattn.runtime.backward import BackwardLaunch, prepare_backward
from flexattn.runtime.build import Kernel, Launcher, Scratch, begin, builder
from flexattn.runtime.candidates import Candidate, Choice
from flexattn.runtime.dispatch import Dispatcher, first_served
from flexattn.runtime.launch import (
    DescriptorBox,
    Launch,
    Outputs,
    box_of,
    raw_stream,
    rest_names,
)
from flexattn.runtime.outcomes import memory
from flexattn.settings import current


class RaggedKernels(NamedTuple):
    """One kernel lists the tiles of rows of a batch, one attends, and one merges parts of keys.

    merge: None where no keys are cut; merges: its programs. words: the numbers in float32 that
    parts take.
    """

    choice: Choice
    attend: Kernel
    row_tiles: Kernel
    grid: Geometry
    merge: Kernel | None = None
    merges: int = 0
    words: int = 0

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """The memory that they share, uninitialised."""
        tiles = self.grid.num_tiles
        found = [
            Scratch("ROW_TILES", (2 + TILE_WORDS * tiles,), torch.int32),
            Scratch("CUT_TILES", (2 + CUT_WORDS * tiles,), torch.int32),
            Scratch("COUNTER", (1,), torch.int32),
        ]
        return (*found, *(Scratch("WORKSPACE", (self.words,)),) * (self.merge is not None))

    def prepare(
        self, requests: int, fixed: Mapping[str, Any], given: Sequence[str], boxes: Any
    ) -> tuple[Launcher, ...]:
        """Their launches, of so many requests; arguments as those of Kernel.prepare."""
        fixed = {**fixed, "capacity": self.grid.num_tiles}
        every = (*fixed, *given)
        ready = (
            self.row_tiles.prepare(max(1, requests), fixed, given, spare=every),
            self.attend.prepare(self.grid.programs, fixed, given, boxes, every),
        )
        if self.merge is None:
            return ready
        return (*ready, self.merge.prepare(self.merges, fixed, given, spare=every))


def ragged_kernels(
    problem: ServingProblem,
    target: Device,
    compiled: Callable[[Source], Kernel],
    family: KernelFamily[Any] = PREFILL,
    beside: Callable[[], object] | None = None,
) -> RaggedKernels | None:
    """The kernels of a problem, by a family's static defaults; None where none serves it.

    beside: builds other kernels, in a thread that starts behind the one that takes longest.
    """
    form = problem.structure

    def key(config: Any) -> tuple[Any, ...]:
        return "row tiles", form, config, target

    def others(config: Any) -> list[Kernel]:
        renders = (render_row_tiles, render_merge_parts)[: 1 + config.splits]
        sources = builder().sources(
            key(config), lambda: tuple(render(form, config, target) for render in renders)
        )
        return list(map(compiled, sources))

    first = next(_configs(family, problem, target, False), None)
    if first is not None and not current().interpret and not builder().rendered.get(key(first)):
        with suppress(Exception):  # whoever needs it gets the error
            source, *_ = Candidate(problem, target, first, "default", "").sources()
            begin(partial(compiled, source))
        begin(partial(others, first))
        if beside is not None:
            begin(beside)
    choice = _served(family, problem, target, compiled)
    if choice is None:
        return None
    config: Any = choice.config
    row_tiles, *merges = others(config)
    found = RaggedKernels(
        choice, choice.kernels[0], row_tiles, family.grid(problem, config, target)
    )
    if not merges:
        return found
    return found._replace(
        merge=merges[0], merges=merge_programs(form, config, target),
        words=part_words(form, config, target),
    )  # fmt: skip


def _served(
    family: KernelFamily[Any],
    problem: Problem,
    target: Device,
    compiled: Callable[[Source], Kernel],
    in_order: bool = False,
) -> Choice | None:
    """The first of a family's static defaults that serves; None where there is none.

    in_order: of those whose sums have the same bits in every run.
    """
    origin = f"static default for {target.arch}"
    able = (
        Candidate(problem, target, config, "default", origin)
        for config in _configs(family, problem, target, in_order)
    )
    try:
        return first_served(able, problem, target, compiled, memory())
    except (BuildError, ConfigError, WrongKernelError):
        return None


def _configs(
    family: KernelFamily[Any], problem: Problem, target: Device, in_order: bool
) -> Iterator[Any]:
    """The static defaults that can run."""
    if not family.offered(target):
        return iter(())
    found = family.able(problem, target)
    if not in_order:
        return found
    made = (family.made_deterministic(each, problem.structure) for each in found)
    return filter(family.can_run(problem, target), (each for each in made if each is not None))


def packed_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: int,
    score: Bound | None,
    mask: Bound | None,
    *,
    lse: bool,
    positive_scale: bool,
    sinks: bool,
) -> ServingProblem:
    """The problem of packed sequences; shapes as those of PackedLaunch."""
    (total_q, Hq, D), (total_k, Hkv, Dv) = q.shape, v.shape
    form = ServingForm(
        dtype=DTYPES[q.dtype],
        kv_dtype=DTYPES[k.dtype],
        head_dim_qk=D,
        head_dim_v=Dv,
        group=Hq // Hkv,
        kv_heads=Hkv,
        page=0,
        # One kernel serves any number of them.
        requests=1,
        rows=0,
        score=captures_of(score),
        mask=captures_of(mask),
        layout=layout_of(q[None], k[None], v[None]),
        lse=lse,
        positive_scale=positive_scale,
        sinks="float32" if sinks else "",
        ragged_kv=True,
    )
    # What lies behind the last sequence is one more.
    return ServingProblem(
        structure=form, B=sequences + 1, Hq=Hq, Hkv=Hkv, q_len=total_q, kv_len=total_k
    )


# What a call passes to its launches, by the names that kernels have for it.
_GIVEN = (
    "Q", "K", "V", "OUT", "OUT_ROWS", "LSE", "SINKS", "sm_scale", "CU_SEQLENS", "CU_SEQLENS_K",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedLaunch(Launch):
    """The launch of packed sequences: q [total_q, Hq, D], k and v [total_k, Hkv, D or Dv].

    cu_seqlens int32 [sequences + 1] are read by the kernels alone: other lengths in as many
    sequences have the same launch.
    """

    kernel_sources: tuple[Source, ...]

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        scale: float,
        rest: tuple[Any, ...] = (),
        sinks: Tensor | None = None,
    ) -> Outputs:
        """Allocate the outputs and launch on the current stream; rest: what `rest_of` gave.

        out [total_q, Hq, Dv], lse fp32 [total_q, Hq].
        """
        gpu, problem = self.gpu, self.problem
        if gpu >= 0 and gpu != torch._C._cuda_getDevice():
            with torch.cuda.device(gpu):
                return self.run(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, rest, sinks)
        stream = raw_stream(gpu) if gpu >= 0 else -1
        form = problem.structure
        out = q.new_empty((problem.q_len, problem.Hq, form.head_dim_v))
        lse = None
        if form.lse:
            lse = q.new_empty((problem.q_len, problem.Hq), dtype=torch.float32)
        given: tuple[Any, ...] = (q, k, v, out, out, lse, sinks, scale, cu_seqlens_q, cu_seqlens_k)
        given += tuple([each.empty(gpu) for each in self.scratch]) + rest
        self.launch(stream, given)
        return Outputs(out, lse, None)


def prepare_packed(
    problem: ServingProblem, target: Device, device: torch.device, q: Tensor, k: Tensor, v: Tensor
) -> PackedLaunch | None:
    """The launch of packed sequences; None where Hopper's forward does not serve them."""
    index, compiled = _compiler(target, device)
    kernels = ragged_kernels(problem, target, compiled)
    if kernels is None:
        return None
    form, Hq, Hkv, Dv = problem.structure, problem.Hq, problem.Hkv, problem.head_dim_v
    rest = rest_names(form, ())
    scratch = kernels.scratch
    names = (*_GIVEN, *(each.name for each in scratch), *rest)
    fixed = {
        "Hq": Hq, "group": form.group, "stride_oh": Dv, "stride_om": Hq * Dv,
        "total_q": problem.q_len, "total_k": problem.kv_len, "num_requests": problem.B,
        "num_sms": target.num_sms,
    }  # fmt: skip
    boxes = {
        "Q": box_of(q.unflatten(1, (Hkv, form.group)).transpose(0, 1)),
        "K": box_of(k.transpose(0, 1)[None]), "V": box_of(v.transpose(0, 1)[None]),
        "OUT": DescriptorBox(
            (Hkv, problem.q_len, form.group, Dv), (form.group * Dv, Hq * Dv, Dv, 1)
        ),
    }  # fmt: skip
    sources = (*kernels.choice.sources, kernels.row_tiles.source)
    return PackedLaunch(
        kernels.prepare(problem.B, fixed, names, boxes), kernels.choice, kernels.grid, device,
        index, scratch, False, rest,
        sources if kernels.merge is None else (*sources, kernels.merge.source),
    )  # fmt: skip


def _compiler(target: Device, device: torch.device) -> tuple[int, Callable[[Source], Kernel]]:
    """The index of a GPU, -1 of none, and what makes kernels for it."""
    index = device.index if device.type == "cuda" else -1
    return index, lambda source: builder().kernel(source, target, index)


def packed_backward_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: int,
    score: Bound | None,
    mask: Bound | None,
    slots: tuple[int, ...] = (),
) -> Problem:
    """The problem of the gradients of packed sequences; shapes as those of PackedLaunch.

    slots: of the score_mod's tensors that get a gradient.
    """
    (total_q, Hq, D), (total_k, Hkv, Dv) = q.shape, v.shape
    problem = make_problem(
        "backward", DTYPES[q.dtype], Shape(1, Hq, Hkv, total_q, total_k, D, Dv), score, mask, None,
        layout_of(q[None], k[None], v[None]), grads=slots,
    )  # fmt: skip
    # What lies behind the last sequence is one more.
    structure = replace(problem.structure, ragged_kv=True)
    return replace(problem, structure=structure, B=sequences + 1)


class PackedBackward(NamedTuple):
    """The kernel that dispatch chose for the gradients of packed sequences."""

    choice: Choice

    @classmethod
    def of(
        cls, problem: Problem, target: Device, device: torch.device, in_order: bool
    ) -> PackedBackward | None:
        """None if Hopper's backward cannot run; in_order: with the same bits in every run."""
        choice = _served(BACKWARD, problem, target, _compiler(target, device)[1], in_order)
        return None if choice is None else cls(choice)

    def choose(self, *_: object) -> Choice:
        """As Dispatcher.choose."""
        return self.choice

    def prepare(self, *tensors: Tensor) -> BackwardLaunch:
        """The launch for q, k, v, out and dout of one batch, [1, heads, length, D]."""
        chosen, fixed = self.choice, cast(Dispatcher, self)
        q, k, v, out, dout = tensors
        return prepare_backward(
            chosen.problem, chosen.device, out.device, fixed, NONE, (q, k, v), out, dout, None
        )
