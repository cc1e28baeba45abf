"""A plan tuned on the GPU: what is timed is right, and a plan built later takes the record."""

import pytest

from flexattn.device import detect
from flexattn.problem import Shape
from flexattn.records.environment import environment
from flexattn.records.record import Gated, Policy
from flexattn.records.store import Store
from flexattn.serving import DecodePlan
from flexattn.settings import override
from flexattn.tune.builds import compilers
from flexattn.tune.subject import SILENT, Method
from flexattn.tune.tasks import serving_task
from flexattn.tune.tuner import GpuTuner

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("lengths", ["uniform", "ragged", "mixed"])
def test_a_plan_is_served_by_what_was_tuned_for_it(lengths, tmp_path):
    import torch

    device = detect(torch.device("cuda"))
    shape = Shape(5, 8, 2, 3 if lengths == "mixed" else 1, 1234, 64, 64)
    task = serving_task(
        "a plan", shape, "bfloat16", device, Policy(True, True, 8, 0.5), 0.125, None, None,
        page=16, lengths=lengths,
    )  # fmt: skip
    method = Method("quick", budget_s=5.0, rounds=2)
    with (
        override(cache=(), cache_dir=tmp_path, mode="replay"), compilers() as pool,
        GpuTuner(method, pool, None, SILENT) as tuner,
    ):  # fmt: skip
        record = tuner.tune(task)
        winner = record.trials[record.decision.winner]
        assert isinstance(winner.gate, Gated) and winner.gate.passed
        assert record.environment == environment("serving", device)
        Store(tmp_path / "records").write(record)
        maxima = task.problem
        plan = DecodePlan(
            batch=5, kv_len=1200, heads=(8, 2), head_dim=64, page_size=16,
            total_q=maxima.total_q, lengths="" if lengths == "mixed" else lengths,
        )  # fmt: skip
    assert plan.config == record.config and plan.origin.startswith("tuned")
