"""Workers on a real GPU: faults of the device end the child alone, and the next is measured."""

import statistics

import pytest
import torch

from flexattn.catalogue import alibi, causal, document
from flexattn.device import detect
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.measure.runner import DeviceRunner
from flexattn.measure.timing import time_interleaved
from flexattn.measure.worker import Deadlines, Worker
from flexattn.problem import Layout
from flexattn.records.record import Failed, Gated, Policy
from tests.gpu.faults import BAD_ADDRESS, KILLED, MEMORY, RUNNER, SCARCE, SEGFAULT, SPIN
from tests.tasks import make_task

SMALL = (2, 8, 2, 511, 777, 64, 64)
LARGE = (1, 8, 2, 8192, 8192, 128, 128)
DECODE = (2, 8, 2, 1, 4095, 128, 128)
GOOD = PrefillConfig(64, 64, 4, 2)
CONFIGS = [GOOD, PrefillConfig(128, 64, 4, 2), PrefillConfig(64, 128, 4, 2)]
# Of a spin of 20 s; others may compile and launch on this machine at the same time.
DEADLINES = Deadlines(gate=90, step=8)


@pytest.fixture(scope="module")
def here():
    return detect(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def faulty(here):
    with Worker(RUNNER, deadlines=DEADLINES) as worker:
        worker.open(make_task(SMALL, here, mask_mod=causal))
        # Compiled here: in a race that would count as silence.
        for config in CONFIGS[:2]:
            worker.gate(config)
        yield worker


@pytest.fixture(scope="module")
def worker():
    with Worker() as made:
        yield made


@pytest.mark.parametrize(
    ("config", "stage", "respawns"),
    [
        (BAD_ADDRESS, "crash", 1),
        (SPIN, "hang", 1),
        (MEMORY, "memory", 0),
        (SCARCE, "memory", 0),
        (KILLED, "crash", 1),
        (SEGFAULT, "crash", 1),
    ],
    ids=["illegal access", "spin", "out of memory", "the allocator's limit", "SIGKILL", "SIGSEGV"],
)
def test_a_fault_of_the_device_costs_its_config_alone(faulty, config, stage, respawns):
    faulty.gate(GOOD)
    before = faulty.starts
    got = faulty.sample([GOOD, config, CONFIGS[1]], 4, 1.0)
    assert isinstance(got[1], Failed) and got[1].stage == stage, got[1]
    assert len(got[0]) == len(got[2]) == 4 and min(got[0] + got[2]) > 0
    assert faulty.starts - before == respawns
    gated = faulty.gate(GOOD)
    assert isinstance(gated, Gated) and gated.passed
    assert isinstance(faulty.gate(config), Failed) and faulty.starts - before == respawns


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_times_are_those_of_the_kernels(worker, here, graph):
    """The child's times, and those of the same launches timed here."""
    policy = Policy(graph=graph, cold_l2=True, rounds=8, min_ms=2.0)
    task = make_task(SMALL, here, score_mod=alibi(8, "cpu"), mask_mod=causal, policy=policy)
    worker.open(task)
    for config in CONFIGS:
        gated = worker.gate(config)
        assert isinstance(gated, Gated) and gated.passed, gated
    runner = DeviceRunner()
    runner.open(task)
    calls = {str(config): runner._call(config) for config in CONFIGS}
    theirs = [float("inf")] * len(CONFIGS)
    mine = list(theirs)
    # The shortest of both by turns: other tests run on this GPU at the same time, and may double
    # all that is timed for a while.
    for _ in range(4):
        sampled = worker.sample(CONFIGS, 8, 2.0)
        assert all(len(us) == 8 for us in sampled)
        theirs = [min(least, *us) for least, us in zip(theirs, sampled, strict=True)]
        timed = time_interleaved(calls, rounds=8, min_ms=2.0, flush_l2=True, graph=graph)
        assert all(samples.failure is None for samples in timed.values())
        mine = [min(least, *s.us) for least, s in zip(mine, timed.values(), strict=True)]
    for one, other in zip(theirs, mine, strict=True):
        assert 0.5 < one / other < 2


def test_a_second_race_goes_on_with_the_same_kernels(worker, here):
    worker.open(make_task(SMALL, here, policy=Policy(True, True, 4, 1.0)))
    first, second = (worker.sample(CONFIGS, 4, 1.0) for _ in "ab")
    for a, b in zip(first, second, strict=True):
        # Of each the least: a process beside this one may take the GPU in any sample.
        assert 0.5 < min(a) / min(b) < 2


def test_the_hopeless_give_one_value(worker, here):
    worker.open(make_task(LARGE, here, mask_mod=causal))
    got = worker.sample([GOOD, PrefillConfig(16, 16, 4, 1)], 3, 1.0, limit_us=1e9)
    slow = statistics.median(got[1])
    assert slow > 1.2 * statistics.median(got[0])
    limit = (slow + statistics.median(got[0])) / 2
    again = worker.sample([GOOD, PrefillConfig(16, 16, 4, 1)], 3, 1.0, limit_us=limit)
    assert [len(us) for us in again] == [3, 1]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (LARGE, {"mask_mod": causal, "dtype": "bfloat16"}),
        (SMALL, {"lse": True, "dtype": "float32"}),
        (SMALL, {"mask_mod": document(torch.arange(777).div(50).int()), "dtype": "bfloat16"}),
        (SMALL, {"layout": Layout(True, False, True, False)}),
    ],
    ids=["slices", "fp32", "documents", "strided"],
)
def test_the_gate_passes_what_is_right(worker, here, shape, options):
    task = make_task(shape, here, **options)
    worker.open(task)
    gated = worker.gate(default(task.problem, here))
    assert isinstance(gated, Gated) and gated.passed, gated


def test_decode_with_and_without_splits(worker, here):
    policy = Policy(graph=True, cold_l2=True, rounds=4, min_ms=1.0)
    worker.open(make_task(DECODE, here, kind="decode", dtype="bfloat16", policy=policy))
    configs = [DecodeConfig(16, 64, 4, 2, splits) for splits in (0, 1, 8)]
    for config in configs:
        gated = worker.gate(config)
        assert isinstance(gated, Gated) and gated.passed, gated
    times = worker.sample(configs, 4, 1.0)
    assert all(len(us) == 4 for us in times) and worker.starts == 1


def test_unwritten_output_does_not_pass(here):
    with Worker("tests.gpu.faults:ForgetfulRunner") as worker:
        worker.open(make_task(SMALL, here))
        got = worker.gate(GOOD)
    assert isinstance(got, Failed) and got.stage == "gate" and "NaN" in got.message
