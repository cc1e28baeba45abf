"""A call made up for kernels that were chosen: one batch, one KV head, the same structure.

It stands in for the caller's where that cannot be read: while a CUDA graph is captured, before
there is a call, where inputs hold NaN, and in a group of processes, which then decide alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexattn.device import Device, cuda_driver
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.problem import Problem
from flexattn.problem.inputs import Dropout
from flexattn.reference import Precision, attention
from flexattn.runtime.backward import Gradients, prepare_backward
from flexattn.runtime.candidates import Choice
from flexattn.runtime.dispatch import Dispatcher
from flexattn.runtime.key_lists import BothLists, made_by_key
from flexattn.runtime.launch import Lists, prepare_launch
from flexattn.verify.first_use import Attended, Unjudged, judge_rows
from flexattn.verify.gate import Verdict, badness, judge_named
from flexattn.verify.oracle import (
    WHOLE_SCORES,
    block_mask_of,
    gradient_like,
    kept_lanes,
    make_inputs,
    make_sinks,
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
        lengths = problem.q_len, problem.kv_len
        block_mask = create_block_mask(mask_mod, None, None, *lengths, where)
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


@dataclass(frozen=True)
class Place:
    """Query rows first..last of one head; its mods are told where the slice stands."""

    b: int
    h: int
    first: int
    last: int

    def of(self, x: Tensor) -> Tensor:
        return x[self.b : self.b + 1, self.h : self.h + 1, self.first : self.last]

    def score_mod(self, user: ScoreMod) -> ScoreMod:
        def moved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return user(score, b + self.b, h + self.h, q_idx + self.first, kv_idx)

        return moved

    def block_mask(self, user: MaskMod, kv_len: int, device: torch.device) -> BlockMask:
        def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return user(b + self.b, h + self.h, q_idx + self.first, kv_idx)

        rows = self.last - self.first
        return create_block_mask(moved, None, None, rows, kv_len, device)


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


# Of the oracle of gradients, which computes all of them.
_SCORES = 2**21
_SEED = 0x5EED


@dataclass(frozen=True)
class ChosenKernels:
    """Kernels that dispatch chose, and the parts of a call that they are of.

    lists: of the block mask, by query and by key.
    """

    choice: Choice
    where: torch.device
    scale: float
    score: Bound | None = None
    mask: Bound | None = None
    lists: Lists | None = None
    dropout: Dropout | None = None

    def choose(self, problem: Problem, *_: object) -> Choice:
        """As Dispatcher.choose, for the made-up problem."""
        return replace(self.choice, problem=problem)


def judge_forward(chosen: ChosenKernels) -> Verdict:
    """Launch a made-up forward, and judge some of its rows."""
    problem, lists = _small(chosen, chosen.choice.problem.q_len)
    structure, where = problem.structure, chosen.where
    q, k, v = make_inputs(problem, where)
    sinks, dropout = make_sinks(problem, where), _drawn(chosen)
    with apart(where):
        launch = prepare_launch(
            problem, chosen.choice.device, where, cast(Dispatcher, chosen), NONE, q, k, v, lists
        )
        rest = launch.rest_of(lists, chosen.score, chosen.mask, dropout)
        found = launch.run(q, k, v, chosen.scale, rest, sinks)
        lengths, mask_mod = (problem.q_len, problem.kv_len), mask_callable(chosen.mask)
        block_mask = block_mask_of(lists, structure.sparsity, mask_mod, lengths)
        call = Attended(
            q, k, v, chosen.scale, score_callable(chosen.score), block_mask, sinks,
            dropout=dropout, e4m3_weights=structure.e4m3_weights,
        )  # fmt: skip
        return judge_rows(call, found, borders_of(chosen.choice)[0])


def judge_backward(chosen: ChosenKernels) -> Verdict:
    """Launch the backward of a made-up call of few rows, and judge all gradients of it.

    Packed sequences are one made-up sequence. Raises Unjudged for a call with dropout.
    """
    if chosen.dropout is not None:
        raise Unjudged("gradients of captured tensors beside dropout")
    p = chosen.choice.problem
    rows = max(1, min(p.q_len, _SCORES // (p.kv_len * (p.Hq // p.Hkv))))
    problem, lists = _small(chosen, rows)
    both, mask_mod, lengths = None, mask_callable(chosen.mask), (problem.q_len, problem.kv_len)
    block_mask = block_mask_of(lists, problem.structure.sparsity, mask_mod, lengths)
    if lists is not None and block_mask is not None:
        both = BothLists(lists, made_by_key(block_mask, lists))
    saved = make_saved(
        problem, chosen.where, chosen.scale, chosen.score, chosen.mask, both, ((0, 0),)
    )
    if p.structure.ragged_kv:  # what lies behind the last sequence is one more
        problem = replace(problem, B=2)
    got = saved.prepare(problem, chosen.choice.device, cast(Dispatcher, chosen), NONE)()
    return judge_of(saved.call)(got)


def borders_of(choice: Choice) -> tuple[list[int], list[int]]:
    """Sizes of the blocks of rows and of keys that a kernel and its mask have."""
    config: Any = choice.config
    found = [[getattr(config, name, 64)] for name in ("BLOCK_M", "BLOCK_N")]
    sparsity = choice.problem.structure.sparsity
    if sparsity is not None:
        found[0].append(sparsity.q_block)
        found[1].append(sparsity.kv_block)
    return found[0], found[1]


def _small(chosen: ChosenKernels, rows: int) -> tuple[Problem, Lists | None]:
    """The problem with one batch, one KV head and some rows, and its mask's lists."""
    p = chosen.choice.problem
    group, lists = p.Hq // p.Hkv, chosen.lists
    small = replace(p, B=1, Hq=group, Hkv=1, q_len=rows, broadcast_kv=False)
    if lists is None or p.structure.sparsity is None:
        return small, lists
    blocks = -(-rows // p.structure.sparsity.q_block)
    parts = (None if x is None else x[:1, :group, :blocks].contiguous() for x in lists)
    return small, Lists(*parts)  # type: ignore[arg-type]


def _drawn(chosen: ChosenKernels) -> Dropout | None:
    """Dropout with a seed of its own, so that no generator of the caller's moves."""
    if chosen.dropout is None:
        return None
    return chosen.dropout._replace(seed=torch.tensor([_SEED], device=chosen.where))


@contextmanager
def apart(where: torch.device) -> Iterator[None]:
    """Runs work on a stream of its own while the current stream is captured."""
    if where.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield
        return
    with cuda_driver.relaxed_capture(), torch.cuda.stream(torch.cuda.Stream(where)):
        yield
