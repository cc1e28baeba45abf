"""A task in a runner: inputs on its device, what judges outputs, and a config's launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.options import Options
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.measure.task import Task
from flexattn.problem.serving import ServingProblem
from flexattn.runtime.backward import Gradients
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import Outputs, prepare_launch
from flexattn.serving.plan import DecodePlan
from flexattn.serving.verified import Batch, batch_run, make_batch, serving_judge
from flexattn.verify.gate import Verdict
from flexattn.verify.gradients import Saved, judge_of, judged_heads, make_saved
from flexattn.verify.oracle import (
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


def opened(task: Task, where: torch.device) -> Opened:
    """Make a task's inputs on a device, and what its outputs are judged by."""
    if isinstance(task.problem, ServingProblem):
        batch = make_batch(task.problem, task.q_lens, task.kv_lens, where)
        of_plans = partial(plan_call, task, batch, where=where)
        return Opened(serving_judge(batch, task.scale, task.score, task.mask), of_plans)
    if where.type == "cuda":
        # What the reference run of float32 inputs looks at.
        allowed = task.problem.structure.fp32_products == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "none"
    if task.kind == "backward":
        saved = saved_of(task, where)

        def of_gradients(config: Config) -> Callable[[], Gradients]:
            return saved.prepare(task.problem, task.device, dispatcher(), Options(exact=config))

        return Opened(judge_of(saved.call), of_gradients, saved.call.judged_alone)
    return _forward(task, where)


def saved_of(task: Task, where: torch.device) -> Saved:
    """A differentiated call of a task on a device, with what its forward saved."""
    p, lists = task.problem, None
    if task.lists is not None and task.by_key is not None:
        lists = BothLists(task.lists.to(where), task.by_key.to(where))
    heads = judged_heads(p.B, p.Hq, p.Hkv, p.q_len, p.kv_len)
    return make_saved(p, where, task.scale, task.score, task.mask, lists, heads)


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


def plan_call(
    task: Task, batch: Batch, config: ServingConfig, where: torch.device
) -> Callable[[], Outputs]:
    """A plan with this config, and a call that runs it on the batch; see `batch_run`."""
    m, form = batch.problem, batch.problem.structure
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
        selection=(form.chosen, form.unit) if form.unit else None,
        config=config,
    )
    return batch_run(plan, batch)
