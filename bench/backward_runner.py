"""Backwards as a kind of rows: gradients held to the oracle, and the memory of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.backward_peers import Trained, Trainer
from bench.inputs import Inputs, make
from bench.oracle import judge_slices
from bench.refusal import Refusal
from bench.results import Gate
from bench.rows import Row
from bench.runner import Kind, Method, poison
from flexattn.mods import bind
from flexattn.runtime.backward import Gradients, slots_of
from flexattn.verify.gate import Verdict
from flexattn.verify.gradients import Differentiated, judge_of, judged_heads
from flexattn.verify.oracle import gradient_like

__all__ = ["BACKWARD", "BAR", "allowed", "differentiated"]

# Five products where the forward has two.
BACKWARD_FLOPS = 2.5
# The most that a forward and its backward may allocate: see `allowed`.
BAR = "bar"


@dataclass(frozen=True)
class Step:
    """A row's inputs, its call, and the judge of gradients; None for a row of forwards alone."""

    x: Inputs
    call: Differentiated
    judge: Callable[[Gradients], Verdict] | None


@dataclass(frozen=True)
class Run:
    """The forward and the backward of a peer, each timed."""

    trained: Trained
    call: Callable[[], Any]

    def __call__(self) -> Any:
        return self.call()


def _step(row: Row, method: Method) -> Step:
    x = make(row, method.device, method.dtype)
    call = differentiated(x)
    return Step(x, call, None if row.group == "forward" else judge_of(call))


def _prepare(peer: Trainer, step: Step) -> Run | Refusal:
    trained = peer(step.x, step.call.dout)
    if isinstance(trained, Refusal):
        return trained
    return Run(trained, trained.forward if step.judge is None else trained.backward())


def _judge(run: Callable[[], Any], step: Step) -> Gate:
    call = step.call
    if step.judge is None:
        poison(call.q)
        out: Tensor = run()
        return Gate.of(judge_slices(out.detach(), step.x))
    with call.judged_alone():
        poison(call.q, call.k, call.v)
        dq, dk, dv, *captured = run()
    return Gate.of(step.judge(Gradients(dq, dk, dv, tuple(captured), call.dout)))


def _work(row: Row) -> float:
    return row.flops * (1 if row.group == "forward" else BACKWARD_FLOPS)


def _peak(run: Run, step: Step) -> int:
    """Bytes that a forward and its backward have at most, with what they are given."""
    if step.judge is None or not step.x.q.is_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.trained.backward()()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + _given(step.call)


BACKWARD = Kind(
    _step, _judge, _prepare, _work, grad=True, memory=_peak, bar=lambda step: allowed(step.call)
)


def differentiated(x: Inputs) -> Differentiated:
    """A row's call with the gradient of its output; judged as a tuning judges it."""
    score, s = bind(x.score_mod, "score"), x.row.shape
    slots = slots_of(score)
    if score is not None:
        score = score._replace(tensors=tuple(each.detach() for each in score.tensors))
    return Differentiated(
        x.q, x.k, x.v, gradient_like(x.q), 1 / math.sqrt(s.d), score, x.mask_mod,
        judged_heads(s.batch, s.hq, s.hkv, s.q_len, s.kv_len), slots,
    )  # fmt: skip


def allowed(call: Differentiated) -> int:
    """What is given, out, the gradients, lse and delta, and dq in float32."""
    statistics = 2 * 4 * call.q.shape[:3].numel()
    results = call.dout.nbytes + sum(x.nbytes for x in (call.q, call.k, call.v, *call.captured))
    return _given(call) + results + statistics + 4 * call.q.numel()


def _given(call: Differentiated) -> int:
    return sum(x.nbytes for x in (call.q, call.k, call.v, call.dout, *call.captured))
