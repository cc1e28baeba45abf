"""A task in a runner: inputs on its device, what judges outputs, and a config's launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.options import Options
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.measure.task import AnyTask, ServingTask, Task
from flexattn.mods import Bound
from flexattn.reference import Precision, attention
from flexattn.runtime.backward import Gradients, prepare_backward
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import Outputs, prepare_launch
from flexattn.serving.plan import DecodePlan
from flexattn.serving.verified import Batch, make_batch, serving_judge
from flexattn.verify.gate import Verdict
from flexattn.verify.gradients import Differentiated, judge_of, judged_heads
from flexattn.verify.oracle import (
    block_mask_of,
    gradient_like,
    kept_lanes,
    make_inputs,
    make_sinks,
    moved,
    oracle,
)


@dataclass(frozen=True)
class Opened:
    """A task on a device. build: a config's launches, as a call that allocates its outputs.

    while_judged: a block for the call whose outputs are judged.
    """

    judge: Callable[[Any], Verdict]
    build: Callable[[Any], Callable[[], Any]]
    while_judged: Callable[[], AbstractContextManager[None]] = nullcontext


def opened(task: AnyTask, where: torch.device) -> Opened:
    """Make a task's inputs on a device, and what its outputs are judged by."""
    if isinstance(task, ServingTask):
        batch = make_batch(task.problem, task.q_lens, task.kv_lens, where)
        of_plans = partial(plan_call, task, batch, where=where)
        return Opened(serving_judge(batch, task.scale, task.score, task.mask), of_plans)
    if where.type == "cuda":
        # What the reference run of float32 inputs looks at.
        allowed = task.problem.structure.fp32_products == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "none"
    if task.kind == "backward":
        saved = make_saved(task, where)
        of_gradients = partial(backward_call, task, saved, where=where)
        return Opened(judge_of(saved.call), of_gradients, saved.call.judged_alone)
    return _forward(task, where)


def _forward(task: Task, where: torch.device) -> Opened:
    q, k, v = make_inputs(task.problem, where)
    sinks = make_sinks(task.problem, where)
    score, mask = moved(task.score, where), moved(task.mask, where)
    lists = None if task.lists is None else task.lists.to(where)

    def build(config: Config) -> Callable[[], Outputs]:
        launch = prepare_launch(
            task.problem, task.device, where, dispatcher(), Options(exact=config), q, k, v, lists
        )
        rest = launch.rest_of(lists, score, mask)
        return partial(launch.run, q, k, v, task.scale, rest, sinks)

    sparsity = task.problem.structure.sparsity
    return Opened(oracle(q, k, v, task.scale, score, mask, lists, sparsity, sinks), build)


@dataclass(frozen=True)
class Saved:
    """A differentiated call with what its forward saved: out, fp32 lse, and the mask's lists."""

    call: Differentiated
    out: Tensor
    lse: Tensor
    mask: Bound | None
    lists: BothLists | None


def make_saved(task: Task, where: torch.device) -> Saved:
    """Normal random q, k, v and gradient of out, and what a kernel's forward makes of them."""
    p, sparsity = task.problem, task.problem.structure.sparsity
    q, k, v = make_inputs(p, where)
    if p.broadcast_kv:
        k, v = k[:1], v[:1]
    score, mask = moved(task.score, where), moved(task.mask, where)
    mask_mod = mask_callable(mask)
    lists = block_mask = None
    if task.lists is not None and task.by_key is not None and sparsity is not None:
        lists = BothLists(task.lists.to(where), task.by_key.to(where))
        block_mask = block_mask_of(lists.by_query, sparsity, mask_mod, (p.q_len, p.kv_len))
        mask_mod = kept_lanes(lists.by_query, sparsity, mask_mod, p.kv_len)
    with torch.no_grad():
        forward = attention(
            q, k, v, score_mod=score_callable(score),
            block_mask=block_mask, scale=task.scale, precision=Precision.STORED,
        )  # fmt: skip
    heads = judged_heads(p.B, p.Hq, p.Hkv, p.q_len, p.kv_len)
    out, slots = forward.out.contiguous(), p.structure.grads
    call = Differentiated(
        q, k, v, gradient_like(out), task.scale, score, mask_mod, heads, slots
    )  # fmt: skip
    return Saved(call, out, forward.lse.contiguous(), mask, lists)


def backward_call(
    task: Task, saved: Saved, config: Config, where: torch.device
) -> Callable[[], Gradients]:
    """A config's launches, delta and all, as a call that allocates the gradients."""
    call = saved.call
    inputs = call.q, call.k, call.v
    launch = prepare_backward(
        task.problem, task.device, where, dispatcher(), Options(exact=config), inputs, saved.out,
        call.dout, saved.lists,
    )  # fmt: skip
    rest = launch.rest_of(saved.lists, call.score, saved.mask)
    return partial(
        launch.run, inputs, saved.out, saved.lse, (call.dout, None), call.scale, rest,
        call.captured,
    )  # fmt: skip


def plan_call(
    task: ServingTask, batch: Batch, config: ServingConfig, where: torch.device
) -> Callable[[], Outputs]:
    """A plan with this config, and a call that runs it on the batch.

    The outputs hold NaN before the first run.
    """
    m, form = task.problem, task.problem.structure
    plan = DecodePlan(
        batch=m.B,
        kv_len=m.kv_len,
        heads=(m.Hq, m.Hkv),
        head_dim=(m.head_dim_qk, m.head_dim_v),
        q_len=1 if m.total_q else m.q_len,
        total_q=m.total_q,
        dtype=m.dtype,
        device=where,
        page_size=m.page,
        layout=m.cache_layout,
        kv_dtype=m.kv_dtype,
        score_mod=moved(task.score, where),
        mask_mod=moved(task.mask, where),
        scale=task.scale,
        sinks=form.sinks != "",
        scaled=form.scales or form.scaled,
        shared_kv=form.shared_kv,
        lse=form.lse,
        batch_invariant=form.split_keys > 0,
        config=config,
    )
    q = batch.q if m.total_q else batch.q.unflatten(0, (len(task.q_lens), -1))
    out = torch.full((*q.shape[:-1], m.head_dim_v), torch.nan, dtype=m.dtype, device=where)
    lse = torch.full(q.shape[:-1], torch.nan, device=where) if form.lse else None
    cache = (batch.k, batch.v)

    def call() -> Outputs:
        plan.run(
            q, cache, seq_lens=batch.lens, block_table=batch.table, cu_seqlens_q=batch.cu_seqlens,
            sinks=batch.sinks, k_scale=batch.k_scale, v_scale=batch.v_scale, out=out, lse=lse,
        )  # fmt: skip
        return Outputs(out, lse, None)

    return call
