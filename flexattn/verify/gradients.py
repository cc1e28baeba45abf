"""The gate of gradients: autograd through the oracle, whole heads, a slice of rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.kernels.choose.options import Options
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.mods.expr import MaskMod
from flexattn.problem import Problem
from flexattn.reference import Precision, attention
from flexattn.runtime.backward import Gradients, prepare_backward
from flexattn.runtime.dispatch import Dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.verify.gate import Verdict, badness, judge_named
from flexattn.verify.oracle import (
    WHOLE_SCORES,
    Place,
    block_mask_of,
    gradient_like,
    kept_lanes,
    make_inputs,
    moved,
)

# Of the oracle: scores that are made at a time, each in some twenty tensors of float64.
SLICE_SCORES = 2**25

GradientJudge: TypeAlias = Callable[[Gradients], Verdict]
Heads: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Differentiated:
    """A call's inputs with the gradient of its output, and which of its gradients are judged.

    q [B, Hq, L, E], k [B or 1, Hkv, S, E], v [B or 1, Hkv, S, Ev], dout [B, Hq, L, Ev]. mask_mod:
    which lanes are attended, whatever blocks are listed. heads: batches and KV heads whose
    gradients are judged. slots: of the score_mod's tensors that get a gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    scale: float
    score: Bound | None
    mask_mod: MaskMod | None
    heads: Heads
    slots: tuple[int, ...]

    @property
    def captured(self) -> list[Tensor]:
        """The score_mod's tensors that get a gradient."""
        return [] if self.score is None else [self.score.tensors[slot] for slot in self.slots]

    def rows(self, kv_head: int) -> slice:
        """The query heads of a KV head."""
        group = self.q.shape[1] // self.k.shape[1]
        return slice(kv_head * group, (kv_head + 1) * group)

    @contextlib.contextmanager
    def judged_alone(self) -> Iterator[None]:
        """The gradient of out is zero in all heads but those that are judged.

        So what heads and batches share, such as the gradient of a captured tensor, has the parts
        of these alone, which is what the oracle has computed.
        """
        whole = self.dout.clone()
        self.dout.zero_()
        for b, kv_head in self.heads:
            rows = self.rows(kv_head)
            self.dout[b, rows] = whole[b, rows]
        try:
            yield
        finally:
            self.dout.copy_(whole)


def judged_heads(B: int, Hq: int, Hkv: int, L: int, S: int) -> Heads:
    """Batches and KV heads that are judged: all, or of a large shape three that stand for them."""
    if B * Hq * L * S <= WHOLE_SCORES:
        return tuple((b, h) for b in range(B) for h in range(Hkv))
    return tuple(sorted({(0, 0), (B // 2, Hkv // 2), (B - 1, Hkv - 1)}))


@dataclass(frozen=True)
class Saved:
    """A differentiated call with what its forward saved: out, fp32 lse, and the mask's lists."""

    call: Differentiated
    out: Tensor
    lse: Tensor
    mask: Bound | None
    lists: BothLists | None

    def prepare(
        self, problem: Problem, device: Device, kernels: Dispatcher, options: Options
    ) -> Callable[[], Gradients]:
        """The launches that are chosen, delta and all, as a call that allocates the gradients."""
        call, lists = self.call, self.lists
        inputs, where = (call.q, call.k, call.v), call.q.device
        launch = prepare_backward(
            problem, device, where, kernels, options, inputs, self.out, call.dout, lists
        )
        rest = launch.rest_of(lists, call.score, self.mask)
        if problem.structure.ragged_kv:
            ends = [(0, x.shape[2]) for x in inputs[:2]]
            rest = (*torch.tensor(ends, dtype=torch.int32, device=where), *rest)
        return partial(
            launch.run, inputs, self.out, self.lse, (call.dout, None), call.scale, rest,
            call.captured,
        )  # fmt: skip


def make_saved(
    problem: Problem,
    where: torch.device,
    scale: float,
    score: Bound | None,
    mask: Bound | None,
    lists: BothLists | None,
    heads: Heads,
) -> Saved:
    """Normal random q, k, v and gradient of out, and what a kernel's forward makes of them.

    lists: on the device.
    """
    q, k, v = make_inputs(problem, where)
    if problem.broadcast_kv:
        k, v = k[:1], v[:1]
    score, mask = moved(score, where), moved(mask, where)
    mask_mod, block_mask, sparsity = mask_callable(mask), None, problem.structure.sparsity
    if lists is not None and sparsity is not None:
        lengths = problem.q_len, problem.kv_len
        block_mask = block_mask_of(lists.by_query, sparsity, mask_mod, lengths)
        mask_mod = kept_lanes(lists.by_query, sparsity, mask_mod, problem.kv_len)
    elif mask_mod is not None:  # packed sequences have no lists
        every = Place(0, 0, 0, problem.q_len)
        block_mask = every.block_mask(mask_mod, problem.kv_len, where)
    with torch.no_grad():
        forward = attention(
            q, k, v, score_mod=score_callable(score), block_mask=block_mask, scale=scale,
            precision=Precision.STORED,
        )  # fmt: skip
    out, slots = forward.out.contiguous(), problem.structure.grads
    call = Differentiated(q, k, v, gradient_like(out), scale, score, mask_mod, heads, slots)
    return Saved(call, out, forward.lse.contiguous(), mask, lists)


def judge_of(call: Differentiated) -> GradientJudge:
    """The judge of the gradients of `judged_alone`: the oracle's are computed here, once.

    Of a large shape each KV head is judged by itself, with its query heads; the worst counts.
    """
    exact, rounded = (_oracle(call, each) for each in (Precision.ORACLE, Precision.ROUNDED))

    def judged(got: Gradients) -> Verdict:
        named = _by_place(call, got.dq, got.dk, got.dv, got.captured)
        verdicts = [judge_named(named[place], exact[place], rounded[place]) for place in named]
        return max(verdicts, key=badness)

    return judged


_Places: TypeAlias = dict[tuple[int, int], Mapping[str, Tensor]]


def _by_place(
    call: Differentiated, dq: Tensor, dk: Tensor, dv: Tensor, captured: tuple[Tensor, ...]
) -> _Places:
    """The gradients that are judged together, by name; those that heads share in each of them."""
    shared = {f"dtensor {slot}": x for slot, x in zip(call.slots, captured, strict=True)}
    if len(call.heads) == dq.shape[0] * dk.shape[1]:
        return {call.heads[0]: {"dq": dq, "dk": dk, "dv": dv, **shared}}
    found: _Places = {}
    for b, kv_head in call.heads:
        own = dq[b, call.rows(kv_head)]
        keys = min(b, dk.shape[0] - 1), kv_head
        found[b, kv_head] = {"dq": own, "dk": dk[keys], "dv": dv[keys], **shared}
    return found


def _oracle(call: Differentiated, precision: Precision) -> _Places:
    """The gradients of `judged_alone` in a precision, a slice of rows at a time."""
    exact = precision is Precision.ORACLE
    wide = torch.float64 if exact else torch.float32
    inputs = call.q, call.k, call.v, *call.captured
    sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in inputs]
    length, keys = call.q.shape[2], call.k.shape[2]
    step = max(1, SLICE_SCORES // max(keys, 1))
    for b, kv_head in call.heads:
        rows = call.rows(kv_head)
        for h in range(rows.start, rows.stop):
            for first in range(0, length, step):
                place = Place(b, h, first, min(first + step, length))
                _add(call, precision, place, (min(b, call.k.shape[0] - 1), kv_head), sums)
    dq, dk, dv, *captured = (
        total if exact else total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)
    )
    return _by_place(call, dq, dk, dv, tuple(captured))


def _add(
    call: Differentiated,
    precision: Precision,
    place: Place,
    keys: tuple[int, int],
    sums: list[Tensor],
) -> None:
    """Add the gradients of some rows of one head, by autograd, to the sums of all inputs."""
    b, kv_head = (slice(each, each + 1) for each in keys)
    parts = place.of(call.q), call.k[b, kv_head], call.v[b, kv_head], *call.captured
    leaves = [x.detach() for x in parts]
    if precision is Precision.ORACLE:
        leaves = [x.double() for x in leaves]
    with torch.enable_grad():
        q, k, v, *captured = (x.requires_grad_() for x in leaves)
        score_mod = None
        if call.score is not None:
            learned = dict(zip(call.slots, captured, strict=True))
            tensors = (learned.get(slot, x) for slot, x in enumerate(call.score.tensors))
            score_mod = score_callable(call.score._replace(tensors=tuple(tensors)))
        mask_mod, kv_len = call.mask_mod, k.shape[2]
        found = attention(
            q, k, v, score_mod=None if score_mod is None else place.score_mod(score_mod),
            block_mask=None if mask_mod is None else place.block_mask(mask_mod, kv_len, q.device),
            scale=call.scale, precision=precision,
        )  # fmt: skip
    dout = place.of(call.dout).to(found.out.dtype)
    grads = torch.autograd.grad(found.out, [q, k, v, *captured], dout, allow_unused=True)
    into = place.of(sums[0]), sums[1][b, kv_head], sums[2][b, kv_head], *sums[3:]
    for total, grad in zip(into, grads, strict=True):
        if grad is not None:
            total += grad
