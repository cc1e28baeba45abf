"""The cost model and the ranking: published costs, sums that add up, records marked as models."""

import importlib
import sys

import pytest
import torch

from examples import stable_diffusion_neuron as example
from flexattn.catalogue import causal
from flexattn.device import NEURON
from flexattn.device.neuroncore import CORES
from flexattn.errors import UnsupportedError
from flexattn.measure.task import Task
from flexattn.neuron import model
from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from flexattn.neuron.interpreter import costs
from flexattn.neuron.model import nki_estimate, rank, ranking_environment
from flexattn.neuron.run import prepare
from flexattn.problem import Shape
from flexattn.records.codec import decode_record, encode_record
from flexattn.records.record import Policy, key_of
from tests.nki import TARGETS, problem_of, run_lines
from tests.support import inputs


def task_of(kind, shape, target="trn2", **mods):
    problem, score, mask = problem_of(kind, shape, **mods)
    policy = Policy(False, False, 1, 0.0)
    return Task("t", problem, NEURON[target], policy, 0.125, score, mask)


F32 = "{0} = nl.ndarray((128, {1}), dtype=nl.{2}, buffer=nl.{3})\n"
# An instruction with its tiles, and the cycles that AWS's documentation gives for it.
PUBLISHED = [
    ("nisa.tensor_reduce(dst=c, op=nl.maximum, data=a, axis=1)", 512, "vector", 512),
    ("nisa.tensor_tensor(dst=a, data1=a, data2=b, op=nl.add)", 512, "vector", 1024),
    ("nisa.tensor_copy(dst=a, src=b, engine=nisa.engine.vector)", 512, "vector", 512),
    ("nisa.tensor_copy(dst=a, src=b, engine=nisa.engine.vector)", 32, "vector", 64),
    ("nisa.reciprocal(dst=a, data=b)", 64, "vector", 512),
    ("nisa.activation(dst=a, op=nl.exp, data=b)", 512, "scalar", 512),
    (
        "nisa.activation(dst=a, op=nl.exp, data=b, reduce_op=nl.add, reduce_res=c, "
        "reduce_cmd=nisa.reduce_cmd.reset_reduce)", 512, "scalar", 576,
    ),
    ("nisa.iota(dst=a, pattern=[[1, 512]])", 512, "gpsimd", 662),
]  # fmt: skip


@pytest.mark.parametrize(("line", "width", "engine", "cycles"), PUBLISHED)
@pytest.mark.parametrize("target", TARGETS)
def test_published_costs(line, width, engine, cycles, target):
    tiles = F32.format("a", width, "float32", "sbuf") + F32.format("b", width, "float32", "sbuf")
    tiles += F32.format("c", 1, "float32", "sbuf")
    run = run_lines(tiles + line, target, numerics=False)
    clock = getattr(CORES[target], f"{engine}_ghz")
    assert run.busy[engine] == pytest.approx(cycles / clock)


def test_sixteen_bit_copies_are_faster_from_v3():
    tiles = F32.format("a", 512, "bfloat16", "sbuf") + F32.format("b", 512, "bfloat16", "sbuf")
    line = "nisa.tensor_copy(dst=a, src=b, engine=nisa.engine.vector)"
    old, new = (run_lines(tiles + line, t, numerics=False).busy["vector"] for t in TARGETS[:2])
    assert old == pytest.approx(512 / 1.12) and new == pytest.approx(128 / 0.96)


def test_constants_are_the_published_ones():
    assert (costs.MIN_II, costs.DEPENDENCY, costs.GPSIMD_START) == (64, 100, 150)
    assert [core.sbuf_bytes // 1024 for core in CORES.values()] == [192, 224, 256]
    assert [core.dma_engine * core.dma_engines for core in CORES.values()] == [272, 368, 528]


@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_stands_for_the_whole(target):
    """The estimate of a long problem, from a few tiles, is near the sum of all of them."""
    task = task_of("prefill", Shape(1, 1, 1, 4096, 8192, 64, 64), target)
    config = NkiPrefillConfig(128, 256, 4096)
    q, k, v = inputs(1, 1, 1, 4096, 8192, 64, dtype=torch.bfloat16)
    prepared = prepare(task.problem, config, target, scale=1.0)
    whole = prepared.interpret(q, k, v, numerics=False).runs[0]
    assert nki_estimate(task, config, target).time * 1000 == pytest.approx(
        whole.nanoseconds, rel=0.05
    )


def test_time_is_no_less_than_the_busiest_engine():
    task = task_of("prefill", Shape(2, 4, 2, 600, 600, 64, 64), mask_mod=causal)
    guess = nki_estimate(task, NkiPrefillConfig(128, 256, 1024), "trn2")
    assert guess.time >= guess.bound == max(us for _, us in guess.busy)


def test_splits_add_their_merging():
    task = task_of("decode", Shape(1, 8, 2, 1, 4096, 64, 64))
    one, many = (nki_estimate(task, NkiDecodeConfig(128, 512, n), "trn2").time for n in (1, 8))
    assert many > one


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_some_tiles_beat_the_tutorials_by_the_model(mixed, is_causal):
    """By the source's order and by the busiest engine alike; the example ranks the whole space."""
    task = example.task_of("trn2", "float32" if mixed else "bfloat16", is_causal)
    theirs = nki_estimate(task, NkiPrefillConfig(128, 128, 4096, 1, 1, 1, mixed=mixed), "trn2")
    ours = nki_estimate(task, NkiPrefillConfig(128, 2048, 4096, 1, mixed=mixed), "trn2")
    assert theirs.time >= 1.3 * ours.time and theirs.bound >= 1.3 * ours.bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [NkiPrefillConfig(128, 128), NkiPrefillConfig(128, 2048, 4096, 1, mixed=True)]
)
def test_the_tutorials_case_interprets_in_ten_seconds_and_passes_the_gate(config):
    """128 x 128 issues the most instructions; seconds are of this process's one thread."""
    task = example.task_of("trn2", "float32" if config.mixed else "bfloat16", False)
    verdict, seconds = example.gated(task, config, "trn2")
    assert verdict.passed, verdict.message()
    assert seconds < 10


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_ranking_is_a_record_of_the_model(kind):
    task = task_of(kind, Shape(1, 2, 1, 300 if kind == "prefill" else 2, 700, 64, 64), "trn1")
    record = rank(task)
    assert record.provenance == "model" and record.note
    assert record.key == key_of(task.problem) and record.environment == ranking_environment(task)
    times = [trial.screening[0] for trial in record.trials]
    assert times[record.decision.winner] == min(times)
    assert times[1:] == sorted(times[1:]) and record.decision.default == 0
    assert record.decision.speedup == pytest.approx(times[0] / min(times))
    assert dict(record.rejected)["dma transpose"] > 0
    assert type(record.config).__name__.lower() == f"nki{kind}config"
    assert decode_record(encode_record(record).encode()) == record


def test_a_default_that_cannot_be_estimated_says_why(monkeypatch):
    def refuse(task, config, target):
        raise UnsupportedError("a captured number", f"{target} computes in float32")

    monkeypatch.setattr(model, "nki_estimate", refuse)
    with pytest.raises(UnsupportedError, match="trn2 computes"):
        rank(task_of("prefill", Shape(1, 1, 1, 128, 128, 64, 64)))


def test_the_former_place_of_rank_warns():
    sys.modules.pop("flexattn.neuron.tune", None)
    with pytest.deprecated_call(match=r"flexattn\.neuron\.model"):
        module = importlib.import_module("flexattn.neuron.tune")
    assert module.rank is rank
