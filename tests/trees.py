"""Requests below a prefix tree, a plan for them, and what judges its runs; on any device."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from flexattn.serving import CascadePlan, PrefixTree, ReadCost, TreePlan
from tests.serving import Batch, batch, poisoned_pages, quantized

# Every node that two requests share is read once.
EVERY = ReadCost(key=1, state=0, rows=16, again=0.0, fixed=0)
# A system prompt with two tools and a conversation below one of them; one request shares nothing.
TREE = PrefixTree((-1, 0, 0, 1), (33, 18, 7, 20), (3, 1, 3, 2, 2, 0, -1))
OWN = (5, 19, 40, 6, 23, 8, 30)


@dataclass
class Case:
    """A plan, what its run is given, and what judges it."""

    plan: TreePlan | CascadePlan
    each: Batch
    q: torch.Tensor
    cache: Any
    call: dict

    def run(self):
        """(out, lse) [rows, Hq, ...] of a run that finds NaN wherever it has to write."""
        plan = self.plan
        shared = plan.prefix if isinstance(plan, CascadePlan) else plan.shared
        for state in (plan, shared, plan.own):
            state._out.fill_(math.nan)
            state._lse.fill_(math.nan)
        shared._workspace.fill_(math.nan)
        return [x.flatten(0, 1) for x in plan.run(self.q, self.cache, **self.call)]


def requests_of(tree, own, q_len, heads, D, Dv, dtype, device="cpu"):
    """A batch in which requests have their paths' keys in common."""
    ends = [*tree.ends(), 0]
    lengths = [ends[node] + more for node, more in zip(tree.requests, own, strict=True)]
    each = batch([q_len] * len(own), lengths, *heads, D, Dv, dtype=dtype, device=device)
    for node, below in enumerate(tree.below()):
        span = slice(ends[node] - tree.keys[node], ends[node])
        for b in below[1:]:
            each.k[b][span], each.v[b][span] = each.k[below[0]][span], each.v[below[0]][span]
    return each


def case(
    tree=TREE, own=OWN, *, q_len=1, heads=(6, 2), D=16, Dv=None, page=4, dtype=torch.float32,
    scaled=None, sinks=None, cost=EVERY, config=None, shared_config=None, device="cpu", **options,
):  # fmt: skip
    """A plan for a tree, whose shared keys are there in the pages of the first request alone."""
    each = requests_of(tree, own, q_len, heads, D, Dv, dtype, device)
    more, exact, kv_dtype = {}, each, dtype
    if scaled is not None:
        each, exact, more["k_scale"], more["v_scale"] = quantized(
            each, kv_dtype := torch.float8_e4m3fn, scaled
        )
    plan = TreePlan(
        batch=len(own) + 1, kv_len=max(each.kv_lens) + 9, q_len=q_len, page_size=page, heads=heads,
        head_dim=(D, D if Dv is None else Dv), dtype=dtype, kv_dtype=kv_dtype, device=device,
        sinks=sinks is not None, scaled=scaled is not None, cost=cost, config=config,
        shared_config=shared_config, **options,
    )  # fmt: skip
    cache, table = poisoned_pages(each, page)
    reads = plan.update(tree, table)
    for read in reads.shared:
        for b in read.requests[1:]:
            keys = torch.arange(read.first, read.end, device=device)
            for x in cache:
                x[table[b, keys // page].long(), keys % page] = math.nan
    call = {"seq_lens": each.numbers(each.kv_lens), "block_table": table, **more}
    if sinks is not None:
        call["sinks"] = sinks
    return Case(plan, exact, each.q.unflatten(0, (len(own), q_len)), cache, call)
