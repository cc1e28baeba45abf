"""A worker on tiny problems: the templates run in its child's interpreter."""

import pytest
import torch

from flexattn.catalogue import alibi, causal, relative_bias
from flexattn.device import INTERPRETER, named
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.measure.worker import Worker
from flexattn.records.record import Failed, Gated, Policy
from flexattn.tuning.tasks import task_from
from flexattn.tuning.workload import parse_workload
from tests.forked import forking
from tests.tasks import make_task

PREFILL = (1, 2, 1, 37, 53, 16, 16)
DECODE = (1, 4, 2, 1, 65, 16, 16)


@pytest.fixture(scope="module")
def worker():
    with forking(), Worker() as made:
        yield made


def test_a_masked_prefill_is_gated_and_timed(worker):
    slopes = alibi(2, "cpu")
    worker.open(
        make_task(PREFILL, INTERPRETER, score_mod=slopes, mask_mod=causal, block=32, lse=True)
    )
    configs = [PrefillConfig(16, 16, 4, 1), PrefillConfig(16, 32, 4, 1)]
    for config in configs:
        gated = worker.gate(config)
        assert isinstance(gated, Gated) and gated.passed, gated
        assert 0 <= gated.error <= gated.budget
    wide = PrefillConfig(17, 16, 4, 1)
    assert isinstance(worker.gate(wide), Failed) and worker.gate(wide).stage == "infeasible"
    times = worker.sample([configs[0], wide, configs[1]], 3, 0)
    assert [len(times[0]), len(times[2])] == [3, 3] and min(times[0]) > 0
    assert isinstance(times[1], Failed) and worker.starts == 1


def test_decode_with_splits_is_gated_and_timed(worker):
    worker.open(make_task(DECODE, INTERPRETER, kind="decode", sinks="float32"))
    configs = [DecodeConfig(16, 16, 4, 1, splits) for splits in (1, 3)]
    assert all(isinstance(got := worker.gate(c), Gated) and got.passed for c in configs)
    assert all(len(us) == 2 for us in worker.sample(configs, 2, 0))


def test_a_backward_is_gated_and_timed(worker):
    """Its whole: delta, both halves, and the gradient of a table."""
    table = torch.randn(2, 48).requires_grad_()
    layer = {"heads": [2, 1], "head_dim": 16, "dtype": "float16", "block_size": 16}
    call = {"mixes": [[1, 17, 21]], "backward": True}
    row = parse_workload({"layers": [{**layer, "calls": [call]}]}, "x", "x").rows[1]
    task = task_from(row, relative_bias(table, 24), causal, INTERPRETER, torch.device("cpu"))
    worker.open(task)
    config = BackwardConfig(16, 16, 16, 16, 4, 1)
    gated = worker.gate(config)
    assert isinstance(gated, Gated) and gated.passed and 0 <= gated.error <= gated.budget
    (times,) = worker.sample([config], 1, 0)
    assert len(times) == 1 and times[0] > 0
    odd = BackwardConfig(17, 16, 16, 16, 4, 1)
    assert isinstance(worker.gate(odd), Failed) and worker.gate(odd).stage == "infeasible"


@pytest.mark.parametrize(
    ("device", "policy", "error"),
    [
        (named("nvidia-h200"), Policy(False, False, 1, 0.0), InputError),
        (INTERPRETER, Policy(True, False, 1, 0.0), UnsupportedError),
        (INTERPRETER, Policy(False, True, 1, 0.0), UnsupportedError),
    ],
)
def test_what_the_interpreter_cannot_measure_is_refused(worker, device, policy, error):
    with pytest.raises(error):
        worker.open(make_task(PREFILL, device, policy=policy))


def test_captured_tensors_keep_their_layout(worker):
    table = torch.randn(53, 37).T
    worker.open(make_task(PREFILL, INTERPRETER, score_mod=lambda s, b, h, q, k: s + table[q, k]))
    got = worker.gate(PrefillConfig(16, 16, 4, 1))
    assert isinstance(got, Gated) and got.passed
