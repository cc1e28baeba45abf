"""Calls of packed sequences on Hopper's kernels, which read cu_seqlens where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexattn.device import detect
from flexattn.errors import FlexAttnError, WrongKernelError
from flexattn.frontend.autograd import of_sinks
from flexattn.frontend.call import PLAIN, bind_on, functorch, identity, is_traced
from flexattn.frontend.gradients import AskedGradients, BackwardPlan, Inputs, run_backward
from flexattn.frontend.launch_cache import launch_cache
from flexattn.frontend.plan import judged_apart
from flexattn.kernels.choose.options import NONE
from flexattn.mods import Bound
from flexattn.mods.derivative import without_stops
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.problem.facts import facts_of
from flexattn.runtime.backward import Gradients, slots_of
from flexattn.runtime.launch import Outputs
from flexattn.runtime.ragged import (
    PackedBackward,
    PackedLaunch,
    packed_backward_problem,
    packed_problem,
    prepare_packed,
)
from flexattn.settings import current
from flexattn.verify.first_use import Attended, LaunchedKernels, Way, accepted, judge_rows
from flexattn.verify.gate import Verdict
from flexattn.verify.made_up import borders_of

PACKED_DTYPES = (torch.bfloat16, torch.float16)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | Bound | None,
    scale: float,
    sinks: Tensor | None,
    lse: bool,
    as_documents: Callable[[Tensor, Tensor, Tensor], Attended],
    in_order: bool = False,
) -> Outputs | None:
    """out [total_q, Hq, Dv], and lse [total_q, Hq] where asked for; None if it does not serve.

    Mods see the number of a sequence, and positions from its first query and key. as_documents:
    the same call with a document mask, by which a kernel's first launch is judged. in_order:
    gradients have the same bits in every run.
    """
    if not (_is_plain(q, k, v, *cu_seqlens, sinks) and is_readable(q, k, v, *cu_seqlens, sinks)):
        return None
    every = (q, k, v) if sinks is None else (q, k, v, sinks)
    try:
        score, mask = (
            None if fn is None else bind_on(fn, kind, q)[0]
            for fn, kind in ((score_mod, "score"), (mask_mod, "mask"))
        )
    except FlexAttnError:  # the call with a document mask says what is wrong
        return None
    slots: tuple[int, ...] = ()
    if score is not None and any(x.requires_grad for x in score.tensors):
        slots = slots_of(score)
    graded = bool(slots) or any(x.requires_grad for x in every)
    graded = graded and torch.is_grad_enabled()
    cu_q = as_offsets(cu_seqlens[0])
    cu_k = cu_q if cu_seqlens[1] is cu_seqlens[0] else as_offsets(cu_seqlens[1])
    in_order = in_order or torch.are_deterministic_algorithms_enabled()
    sequences = cu_q.shape[0] - 1
    known = _facts((q, k, v), sequences)
    call = Pack(score, mask, scale, as_documents, in_order, slots, known)
    if graded and not call.has_gradients((q, k, v), sequences):
        return None
    found = call.attended((q, k, v), (cu_q, cu_k), sinks, lse or graded)
    if found is None or not graded:
        return found
    apply: Any = _Attention.apply
    out, sums = apply(call, found, q, k, v, sinks, cu_q, cu_k, *call.learned())
    return Outputs(out, sums if lse else None, None)


class Pack(NamedTuple):
    """The bound mods and the scale of a call, and the same call with a document mask.

    in_order: sums of gradients have the same bits in every run. slots: of the score_mod's tensors
    that get a gradient. known: `_facts` of q, k and v, () where they are found anew. inputs:
    q [total_q, Hq, D], k [total_k, Hkv, D] and v [total_k, Hkv, Dv]. They, and cu_seqlens int32
    [sequences + 1], have passed `is_readable`.
    """

    score: Bound | None
    mask: Bound | None
    scale: float
    as_documents: Callable[[Tensor, Tensor, Tensor], Attended]
    in_order: bool = False
    slots: tuple[int, ...] = ()
    known: tuple[Any, ...] = ()

    def learned(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [] if self.score is None else [self.score.tensors[slot] for slot in self.slots]

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that the mods read."""
        return tuple(x for mod in (self.score, self.mask) if mod is not None for x in mod.tensors)

    def attended(
        self, inputs: Inputs, cu: tuple[Tensor, Tensor], sinks: Tensor | None, lse: bool
    ) -> Outputs | None:
        """out, and lse [total_q, Hq] where asked for; None where no kernel is right."""
        score, mask = self.score and without_stops(self.score), self.mask
        known = self.known or _facts(inputs, cu[0].shape[0] - 1)
        while True:
            made = _launch(inputs, known, score, mask, self.scale, sinks, lse)
            if made is None:
                return None
            launch, subject = made
            rest = launch.rest_of(None, score, mask)
            found = launch.run(*inputs, *cu, self.scale, rest, sinks)
            if accepted(subject, self._ways(launch, found, inputs)):
                return found

    def _ways(self, launch: PackedLaunch, found: Outputs, inputs: Inputs) -> Iterator[Way]:
        """The check of a first launch. It is called only if a check is due."""
        if not judged_apart(inputs[0]):
            yield partial(_judge, launch, found, partial(self.as_documents, *inputs))

    def gradients(
        self,
        inputs: Inputs,
        results: tuple[Tensor, Tensor],
        grads: tuple[Tensor | None, Tensor | None],
        cu: tuple[Tensor, Tensor],
        sinks: Tensor | None = None,
    ) -> Gradients:
        """Those of q, k and v in their shapes, of `learned`, and delta [1, Hq, total_q].

        results: out and lse [1, Hq, total_q]; grads: theirs, None where nothing depends on one.
        """
        sequences = cu[0].shape[0] - 1
        out, lse = results
        # Saved tensors may come back with other strides.
        call = self._replace(known=_facts(inputs, sequences))
        dout, dlse = grads
        dout = torch.zeros_like(out) if dout is None else dout

        def planned(*tensors: Tensor) -> BackwardPlan:
            chosen = call._backward(inputs, sequences)
            if chosen is None:
                raise WrongKernelError(
                    "no kernel of Hopper's backward is right for these packed sequences",
                    "each gave other gradients than plain torch",
                    "FLEXATTN_VERIFY=off checks nothing",
                )
            facts = (*call.known, *map(facts_of, tensors[3:]))
            key = ("packed backward", chosen.choice.source.hash, *facts)
            launch = launch_cache.prepared(key, lambda: chosen.prepare(*tensors))
            return BackwardPlan(launch, (*cu, *launch.rest_of(None, self.score, self.mask)))

        q, k, v = map(_heads, inputs)
        found = run_backward(
            planned, (q, k, v), _heads(out), lse, (_heads(dout), dlse),
            self.scale, self.learned(), partial(self._asked, inputs, sequences), sinks,
        )  # fmt: skip
        return found._replace(dq=_rows(found.dq), dk=_rows(found.dk), dv=_rows(found.dv))

    def has_gradients(self, inputs: Inputs, sequences: int) -> bool:
        """True if a kernel of gradients serves."""
        return self._backward(inputs, sequences) is not None

    def _backward(self, inputs: Inputs, sequences: int) -> PackedBackward | None:
        """The kernel of the gradients, found or chosen; None where none serves."""

        def prepared() -> tuple[PackedBackward | None]:
            where = inputs[0].device
            problem = packed_backward_problem(
                *inputs, sequences, self.score, self.mask, self.slots
            )
            return (PackedBackward.of(problem, detect(where), where, self.in_order),)

        key = (
            "packed gradients", *(self.known or _facts(inputs, sequences)), identity(self.score),
            identity(self.mask), self.in_order, self.slots,
        )  # fmt: skip
        return launch_cache.prepared(key, prepared)[0]

    def _asked(self, inputs: Inputs, sequences: int) -> AskedGradients:
        """The call with a document mask; without one where nothing is judged by it."""
        pack = self.score, self.mask
        if judged_apart(inputs[0]) and self.has_gradients(inputs, sequences):
            return AskedGradients(None, None, None, self.scale, NONE, self.slots, pack=pack)
        call = self.as_documents(*inputs)
        score = call.score_mod and bind_on(call.score_mod, "score", inputs[0])[0]
        given = score, None, call.block_mask, self.scale, NONE, self.slots
        return AskedGradients(*given, pack=pack)


class _Attention(torch.autograd.Function):
    """(out, lse) of (call, what its forward gave, q, k, v, sinks, cu_seqlens of both, learned)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Pack,
        found: Outputs,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_q: Tensor,
        cu_k: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert found.lse is not None
        ctx.save_for_backward(q, k, v, found.out, found.lse, sinks, cu_q, cu_k, *call.tensors())
        ctx.set_materialize_grads(False)
        ctx.call = call
        return found.out, found.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        """Gradients in the order of forward's arguments."""
        wanted, call = ctx.needs_input_grad[2:6], ctx.call
        if dout is None and dlse is None:
            return (None,) * (8 + len(call.slots))
        *inputs, out, lse, sinks, cu_q, cu_k = ctx.saved_tensors[:8]
        sums = lse.T[None]
        grads = dout, None if dlse is None else dlse.T[None]
        found = call.gradients(tuple(inputs), (out, sums), grads, (cu_q, cu_k), sinks)
        dsinks = of_sinks(sinks, sums, found.delta) if wanted[3] else None
        given = (x if want else None for x, want in zip((*found[:3], dsinks), wanted, strict=True))
        return (None, None, *given, None, None, *found.captured)


def as_offsets(cu: Tensor) -> Tensor:
    """cu_seqlens as kernels read them, which most are."""
    return cu if cu.dtype is torch.int32 and cu.is_contiguous() else cu.int().contiguous()


def _facts(inputs: Inputs, sequences: int) -> tuple[Any, ...]:
    """The facts of a pack's tensors that decide which launch is used."""
    q, k, v = inputs
    return facts_of(q), facts_of(k), facts_of(v), sequences


def _heads(x: Tensor) -> Tensor:
    """Rows [length, heads, D] as one batch [1, heads, length, D], as dense as they are."""
    (length, heads, width), (row, head, step) = x.shape, x.stride()
    # Half the time of two views.
    return x.as_strided((1, heads, length, width), (length * row, head, row, step))


def _rows(x: Tensor) -> Tensor:
    """One batch as rows [length, heads, D]."""
    (_, heads, length, width), (_, head, row, step) = x.shape, x.stride()
    return x.as_strided((length, heads, width), (row, head, step))


def _launch(
    inputs: Inputs,
    known: tuple[Any, ...],
    score: Bound | None,
    mask: Bound | None,
    scale: float,
    sinks: Tensor | None,
    lse: bool,
) -> tuple[PackedLaunch, LaunchedKernels] | None:
    """The launch by all that decides it, found or prepared, and who is judged with it first.

    None where no kernel serves.
    """

    def prepared() -> tuple[tuple[PackedLaunch, LaunchedKernels] | None]:
        problem = packed_problem(
            *inputs, known[3], score, mask, lse=lse, positive_scale=scale > 0,
            sinks=sinks is not None,
        )  # fmt: skip
        where = inputs[0].device
        launch = prepare_packed(problem, detect(where), where, *inputs)
        if launch is None:
            return (None,)
        subject = LaunchedKernels.of(launch.choice)
        return ((launch, replace(subject, sources=launch.kernel_sources)),)

    key = (
        "packed", *known, identity(score), identity(mask), scale > 0, sinks is not None, lse,
    )  # fmt: skip
    return launch_cache.prepared(key, prepared)[0]


def _is_plain(*tensors: Tensor | None) -> bool:
    """True of tensors that nothing traces, transforms or casts."""
    return (
        PLAIN.issuperset(map(type, tensors))
        and not torch.is_autocast_enabled("cuda")
        and forward_ad._current_level < 0
        and functorch.peek_interpreter_stack() is None
        and not is_traced()
    )


def is_readable(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """True of tensors on one Hopper GPU, of dtypes and shapes that kernels of packs may read.

    others: cu_seqlens and sinks.
    """
    sinks = others[-1]
    return (
        q.is_cuda
        and q.dtype in PACKED_DTYPES
        and q.dtype is k.dtype is v.dtype
        and k.shape[:2] == v.shape[:2]
        and q.shape[2] == k.shape[2]
        and 0 < k.shape[1] <= q.shape[1]
        and q.shape[1] % k.shape[1] == 0
        and min(q.numel(), k.numel(), v.numel()) > 0
        and all(x is None or (x.device == q.device and not x.is_neg()) for x in (k, v, *others))
        and not q.is_neg()
        and (sinks is None or _are_sinks(sinks, q))
        and not refuses_packs()
        and detect(q.device).has_wgmma
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def reads_packs(device: torch.device) -> bool:
    """True of a device with kernels that read cu_seqlens."""
    return device.type == "cuda" and bool(detect(device).has_wgmma) and not refuses_packs()


def refuses_packs() -> bool:
    """True if settings ask for what no kernel of packs has."""
    settings = current()
    return settings.check or settings.batch_invariant


def _are_sinks(sinks: Tensor, q: Tensor) -> bool:
    """True of sinks as the kernel reads them."""
    return sinks.dtype is torch.float32 and sinks.shape == q.shape[1:2] and sinks.is_contiguous()


def _judge(launch: PackedLaunch, found: Outputs, as_documents: Callable[[], Attended]) -> Verdict:
    sums: Any = None if found.lse is None else found.lse.T[None]
    got = Outputs(found.out.transpose(0, 1)[None], sums, None)
    return judge_rows(as_documents(), got, borders_of(launch.choice)[0])
