"""A backward tuned on the GPU: what is timed is right, and it serves calls with gradients."""

import pytest
import torch

import flexattn
from flexattn.catalogue import relative_bias
from flexattn.device import detect
from flexattn.measure.worker import Worker
from flexattn.records.record import Gated
from flexattn.tuning.tasks import task_from
from flexattn.tuning.workload import parse_workload
from tests.support import inputs
from tests.tuned import tuned

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("learned", [False, True], ids=["plain", "learned"])
def test_a_call_with_gradients_is_served_by_what_was_tuned_for_it(learned, tmp_path):
    device, where = detect(torch.device("cuda")), torch.device("cuda")
    layer = {"heads": [8, 2], "head_dim": 64, "policy": {"rounds": 8, "min_ms": 0.5}}
    layer["calls"] = [{"mixes": [[2, 1111, 1111]], "backward": True}]
    row = parse_workload({"layers": [layer]}, "x", "x").rows[1]
    draw = torch.Generator("cuda").manual_seed(3)
    table = torch.randn(8, 2300, device="cuda", generator=draw).requires_grad_()
    score_mod = relative_bias(table, 1150) if learned else None
    task = task_from(row, score_mod, flexattn.catalogue.causal, device, where)
    with tuned(task, "backward", device, tmp_path) as record:
        q, k, v = (
            x.requires_grad_()
            for x in inputs(2, 8, 2, 1100, 1100, 64, device="cuda", dtype=torch.bfloat16)
        )
        mask = flexattn.create_block_mask(flexattn.catalogue.causal, None, None, 1100, 1100)
        found = flexattn.explain(q, k, v, score_mod, mask, enable_gqa=True).backward
        assert found.config_origin.startswith("tuned") and found.config == record.config
        out = flexattn.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
        given = (q, k, v, table) if learned else (q, k, v)
        grads = torch.autograd.grad(out.sum(), given)
        assert all(bool(x.isfinite().all()) for x in grads)


def test_three_heads_stand_for_a_large_shape():
    """What is judged at 4k by 4k is the gradients of three heads, and passes."""
    device = detect(torch.device("cuda"))
    layer = {"heads": [16, 4], "head_dim": 128, "mask": "flexattn.catalogue:causal"}
    layer["calls"] = [{"mixes": [[2, 4096, 4096]], "backward": True}]
    row = parse_workload({"layers": [layer]}, "x", "x").rows[1]
    from flexattn.kernels.choose.defaults import default
    from flexattn.tuning.tasks import task_of

    task = task_of(row, device, torch.device("cuda"))
    with Worker() as worker:
        worker.open(task)
        gated = worker.gate(default(task.problem, device))
    assert isinstance(gated, Gated) and gated.passed, gated
