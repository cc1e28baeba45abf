"""Tasks for tests of workers: a problem with its mods, lists and policy, made from callables."""

import math

import flexattn
from flexattn.measure.task import Task
from flexattn.mods import bind
from flexattn.problem import DENSE, Shape, make_problem
from flexattn.records.record import Policy
from flexattn.runtime.launch import Lists

EAGER = Policy(graph=False, cold_l2=False, rounds=5, min_ms=0.0)


def make_task(
    shape,
    device,
    kind="prefill",
    dtype="float16",
    score_mod=None,
    mask_mod=None,
    block=128,
    policy=EAGER,
    layout=DENSE,
    lse=False,
    per_head=False,
    sinks="",
):
    """A task of shape (B, Hq, Hkv, q_len, kv_len, D, Dv), all of it on the CPU."""
    sizes = Shape(*shape)
    lists = sparsity = None
    if mask_mod is not None:
        B, H = (sizes.B, sizes.Hq) if per_head else (None, None)
        mask = flexattn.create_block_mask(
            mask_mod, B, H, sizes.q_len, sizes.kv_len, "cpu", BLOCK_SIZE=block
        )
        lists = Lists.of(mask)
        sparsity = lists.sparsity(mask.BLOCK_SIZE, sizes.Hq // sizes.Hkv)
    score, mask = bind(score_mod, "score"), bind(mask_mod, "mask")
    problem = make_problem(kind, dtype, sizes, score, mask, sparsity, layout, lse=lse, sinks=sinks)
    return Task("a test", problem, device, policy, 1 / math.sqrt(sizes.D), score, mask, lists)
