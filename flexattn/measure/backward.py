"""A backward in a runner: what its forward saved, and a config's launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.options import Options
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.measure.task import Task
from flexattn.mods import Bound
from flexattn.reference import Precision, attention
from flexattn.runtime.backward import Gradients, prepare_backward
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.verify.gradients import Differentiated, judged_heads
from flexattn.verify.oracle import block_mask_of, gradient_like, kept_lanes, make_inputs, moved


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
