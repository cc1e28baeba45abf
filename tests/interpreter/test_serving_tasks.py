"""Serving tasks in a runner: every class of batch and cache, judged by the oracle as calls are."""

import math

import pytest
import torch

from flexattn.catalogue import alibi, sliding_window
from flexattn.device import INTERPRETER
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.measure.runner import DeviceRunner, plan_call
from flexattn.mods import bind
from flexattn.problem import Shape
from flexattn.records.record import Gated, Policy
from flexattn.serving.verified import make_batch, serving_judge
from flexattn.tuning.tasks import serving_task
from tests.serving import SMALL


def task(q_len=1, kv_len=53, B=5, dims=(16, 16), score=None, mask=None, heads=(4, 2), **options):
    shape = Shape(B, *heads, q_len, kv_len, *dims)
    options.setdefault("page", 16)
    return serving_task(
        "a plan", shape, "float16", INTERPRETER, Policy(False, False, 2, 0.0), 0.25,
        bind(score, "score"), bind(mask, "mask"), **options,
    )  # fmt: skip


CASES = {
    "uniform": {},
    "ragged": {"lengths": "ragged", "kv_len": 300},
    "mixed": {"lengths": "mixed", "q_len": 7, "B": 9},
    "contiguous": {"page": 0, "lengths": "ragged", "kv_len": 200, "B": 3},
    "heads first": {"layout": "HND", "page": 4},
    "speculative": {"q_len": 3},
    "mods": {"score": alibi(4, "cpu"), "mask": sliding_window(20)},
    "sinks": {"sinks": True},
    "eight bits": {"kv_dtype": "float8_e4m3fn"},
    "eight bits, a scale a token": {"kv_dtype": "float8_e4m3fn", "scaled": "token_head"},
    "a scale a page": {"kv_dtype": "float8_e5m2", "scaled": "page", "layout": "HND"},
    "mla": {"heads": (4, 1), "dims": (48, 32), "shared_kv": True},
    "chosen pages": {"selection": (5, 16), "lengths": "ragged", "kv_len": 300},
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_judged(name):
    runner = DeviceRunner()
    runner.open(task(**CASES[name]))
    found = runner.gate(SMALL)
    assert isinstance(found, Gated) and found.passed and 0 < found.error <= found.budget, found


def test_two_configs_are_timed():
    runner = DeviceRunner()
    runner.open(task())
    configs = [SMALL, ServingConfig(16, 16, 4, 2, 1, 2, "launch")]
    assert all(runner.gate(config).passed for config in configs)
    assert len(list(runner.race(configs, 2, 0.0, math.inf))) == 2 + 2 * 2 * 2


@pytest.mark.parametrize("spoilt", ["one value", "unwritten"])
def test_the_judge_sees(spoilt):
    """One wrong value of a request, and a row that nobody wrote."""
    made = task(lengths="ragged", kv_len=90)
    cpu = torch.device("cpu")
    batch = make_batch(made.problem, made.q_lens, made.kv_lens, cpu)
    judged = serving_judge(batch, made.scale, made.score, made.mask)
    call = plan_call(made, batch, SMALL, cpu)
    outputs = call()
    assert judged(outputs).passed
    outputs.out[4, 0, 3, 1] += torch.nan if spoilt == "unwritten" else 0.5
    verdict = judged(outputs)
    assert not verdict.passed and bool(verdict.faults) == (spoilt == "unwritten")
