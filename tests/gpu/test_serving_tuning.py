"""A plan tuned on the GPU: what is timed is right, and a plan built later takes the record."""

import pytest

from flexattn.device import detect
from flexattn.problem import Shape
from flexattn.records.record import Policy
from flexattn.serving import DecodePlan
from flexattn.tuning.tasks import serving_task
from tests.tuned import tuned

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
    with tuned(task, "serving", device, tmp_path) as record:
        maxima = task.problem
        plan = DecodePlan(
            batch=5, kv_len=1200, heads=(8, 2), head_dim=64, page_size=16,
            total_q=maxima.total_q, lengths="" if lengths == "mixed" else lengths,
        )  # fmt: skip
    assert plan.config == record.config and plan.origin.startswith("tuned")
