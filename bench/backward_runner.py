"""One row of a backward: ours held to the oracle, then everyone timed, and their memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.backward_peers import Trained, Trainer
from bench.environment import clocks
from bench.inputs import Inputs, make, mods_of
from bench.oracle import judge_slices
from bench.peers import OURS
from bench.refusal import Refusal
from bench.results import Gate, RowResult
from bench.rows import Row
from bench.runner import Method, forget
from bench.tasks import call_of
from flexattn.device import Device
from flexattn.kernels.choose.options import NONE
from flexattn.measure.timing import Samples, time_interleaved
from flexattn.mods import bind
from flexattn.problem.learned import slots_of
from flexattn.runtime.backward import Gradients
from flexattn.runtime.dispatch import candidates_of
from flexattn.tune.builds import BuildOrder, orders_of
from flexattn.tune.tasks import task_from
from flexattn.verify.gate import Verdict
from flexattn.verify.gradients import Differentiated, judge_of, judged_heads
from flexattn.verify.inputs import gradient_like

__all__ = ["BACKWARD_FLOPS", "BAR", "orders", "run_backward"]

# Five products where the forward has two.
BACKWARD_FLOPS = 2.5
# What a forward and its backward may allocate: see `allowed`.
BAR = "bar"


def run_backward(row: Row, peers: Mapping[str, Trainer], method: Method) -> RowResult:
    """As runner.run_row, of backwards; of a row of group "forward", of forwards that save lse."""
    inputs = make(row, method.device, method.dtype)
    call = differentiated(inputs)
    forward = row.group == "forward"
    judge = _slices(inputs) if forward else _gradients(call)
    calls: dict[str, Callable[[], Any]] = {}
    gates: dict[str, Gate] = {}
    refused: dict[str, str] = {}
    memory = {BAR: allowed(call)}
    for name, peer in peers.items():
        found = _prepared(peer, inputs, call.dout, forward)
        if isinstance(found, Refusal):
            refused[name] = found.reason
            continue
        trained, run = found
        if name.startswith(OURS):
            gates[name] = Gate.of(judge(call, run))
            if not gates[name].passed:
                refused[name] = "the accuracy gate is red"
                continue
        calls[name] = run
        if inputs.q.is_cuda and not forward:
            memory[name] = peak(trained, call)
    samples: dict[str, Samples] = {}
    if OURS in gates and not gates[OURS].passed:
        refused |= dict.fromkeys(calls, f"{OURS} is red in this row")
    else:
        samples = time_interleaved(
            calls, rounds=method.rounds, min_ms=method.min_ms, flush_l2=method.flush_l2,
            graph=method.graph, clock=method.clock,
        )  # fmt: skip
    flops = row.flops * (1 if forward else BACKWARD_FLOPS)
    now = clocks()
    del calls, inputs, call
    forget(method)
    return RowResult(
        row.name, row.group, flops, row.kv_bytes, gates, samples, refused, clocks=now,
        memory=memory if len(memory) > 1 else {},
    )  # fmt: skip


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


Judge = Callable[[Differentiated, Callable[[], Any]], Verdict]


def _gradients(call: Differentiated) -> Judge:
    judge = judge_of(call)

    def judged(call: Differentiated, run: Callable[[], Sequence[Tensor]]) -> Verdict:
        with call.judged_alone():
            _poison(call.q, call.k, call.v)
            dq, dk, dv, *captured = run()
        return judge(Gradients(dq, dk, dv, tuple(captured), call.dout))

    return judged


def _slices(x: Inputs) -> Judge:
    def judged(call: Differentiated, run: Callable[[], Tensor]) -> Verdict:
        _poison(call.q)
        return judge_slices(run().detach(), x)

    return judged


def _poison(*like: Tensor) -> None:
    """Leave NaN in the blocks that the allocator hands out next: unwritten output then shows."""
    blocks = [torch.full_like(each, float("nan")) for each in like]
    del blocks


def _prepared(
    peer: Trainer, x: Inputs, dout: Tensor, forward: bool
) -> tuple[Trained, Callable[[], Any]] | Refusal:
    """A peer with what is timed of it, after a first call, which compiles."""
    try:
        trained = peer(x, dout)
        if isinstance(trained, Refusal):
            return trained
        run = trained.forward if forward else trained.backward()
        run()
        if x.q.is_cuda:
            torch.cuda.synchronize()
        return trained, run
    except Exception as error:
        return Refusal.of(error)


def peak(trained: Trained, call: Differentiated) -> int:
    """Bytes that a forward and its backward have at most, with what they are given."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained.backward()()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + _given(call)


def allowed(call: Differentiated) -> int:
    """What is given, out, the gradients, lse and delta, and dq in float32."""
    statistics = 2 * 4 * call.q.shape[:3].numel()
    results = call.dout.nbytes + sum(x.nbytes for x in (call.q, call.k, call.v, *call.captured))
    return _given(call) + results + statistics + 4 * call.q.numel()


def _given(call: Differentiated) -> int:
    return sum(x.nbytes for x in (call.q, call.k, call.v, call.dout, *call.captured))


def orders(row: Row, device: Device, method: Method) -> Iterator[BuildOrder]:
    """What is compiled for a row of ours: the forward with lse, and the backward."""
    score_mod, mask_mod = mods_of(row, method.device, method.dtype)
    dtype = str(method.dtype).removeprefix("torch.")
    forward = replace(call_of(row), score=None, mask=None, dtype=dtype, lse=True)
    where = torch.device(method.device)
    for each in (forward, replace(forward, kind="backward", lse=False)):
        task = task_from(each, score_mod, mask_mod, device, where)
        first = next(candidates_of(task.problem, device, NONE))
        yield from orders_of(task, [first.config])
