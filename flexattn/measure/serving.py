"""A serving task in a runner: a config's plan, and a call that runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.measure.task import ServingTask
from flexattn.runtime.launch import Outputs
from flexattn.serving.batch import Batch
from flexattn.serving.plan import DecodePlan
from flexattn.verify.oracle import moved


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
