"""The numbers of a report: sums over samples, reasons, work and limits, and a bench's rows."""

import json
import math
from dataclasses import replace

import pytest

from flexattn.device import KNOWN, PEAKS
from flexattn.errors import InputError
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.records.record import Decision, Failed, Trial
from flexattn.report import numbers, rivals
from flexattn.report.numbers import (
    limits_of,
    reach,
    summarize,
    work,
)
from tests.processes import ROOT
from tests.records import HERE, decode_record, key, prefill_record

A, B, C = (PrefillConfig(64, n, 4, 2) for n in (32, 64, 128))


def record(*trials, default=0, winner=0, **changes):
    """A record of exactly these trials."""
    decision = Decision(winner, default, 1.0, 0.5, 1.02, 0.95, "")
    return prefill_record(trials=tuple(trials), decision=decision, **changes)


def test_the_work_of_a_plan_is_that_of_its_batch():
    """Llama-3 8B's heads; a ragged batch reads what its requests hold, an 8-bit cache half."""
    plan = key("serving", (8, 1, 8192), blocks="page 16", mask_class="uniform")
    uniform = work(decode_record(key=plan))
    assert uniform.flops == work(decode_record()).flops
    assert uniform.bytes == work(decode_record()).bytes and uniform.density == "exact"
    ragged = work(decode_record(key=replace(plan, mask_class="ragged")))
    assert 0.2 < ragged.kept < 0.6
    assert ragged.flops == pytest.approx(ragged.kept * uniform.flops)
    eight = work(decode_record(key=replace(plan, precision="kv=float8_e4m3fn scaled")))
    assert eight.bytes == pytest.approx(uniform.bytes / 2, rel=0.01)


def test_times_are_medians_with_quartiles_the_fastest_first():
    slow, fast = Trial(A, screening=(9.0, 11.0, 10.0)), Trial(B, screening=(5.0,))
    found = numbers.timed(record(slow, fast))
    assert [(t.trial, t.us, t.low, t.high) for t in found] == [(1, 5, 5, 5), (0, 10, 9.5, 10.5)]
    assert [t.rounds for t in found] == [1, 3]


def test_the_race_counts_before_the_screening():
    (found,) = numbers.timed(record(Trial(A, screening=(9.0,), finals=(7.0, 7.0))))
    assert (found.us, found.rounds) == (7, 2)


def test_equal_machine_code_has_the_time_of_its_twin():
    twins = record(Trial(A, same_code_as=1), Trial(B, screening=(5.0,)), Trial(C, same_code_as=0))
    assert [(t.trial, t.us) for t in numbers.timed(twins)][:2] == [(0, 5), (1, 5)]


def test_a_failure_is_never_a_time():
    failed = Failed("crash", "illegal access", "")
    found = record(Trial(A, screening=(1.0,), failed=failed), Trial(B, same_code_as=0))
    assert numbers.timed(found) == () and numbers.config_axes(found) == ()
    assert [r.count for r in numbers.untimed_reasons(found) if r.stage == "crash"] == [2]


def test_an_effect_is_the_cost_of_an_axis_worst_value():
    trials = [
        Trial(PrefillConfig(64, n, warps, 2), screening=(us,))
        for n, warps, us in ((32, 4, 10.0), (32, 8, 20.0), (64, 4, 15.0), (64, 8, 11.0))
    ]
    width, warps = numbers.effects(record(*trials))
    assert {width.axis, warps.axis} == {"BLOCK_N", "num_warps"}
    assert math.isclose(width.cost, 0.1) and math.isclose(warps.cost, 0.1)
    assert (32, 10.0, 2) in numbers.effects(record(*trials))[0].values + warps.values


def test_switches_and_words_are_axes_too():
    trials = [
        Trial(PrefillConfig(64, 64, 4, 2, use_tma=tma, order=order), screening=(1.0,))
        for tma in (True, False)
        for order in ("last", "group")
    ]
    found = record(*trials)
    assert numbers.config_axes(found) == ("use_tma", "order")
    values = {each.axis: [value for value, *_ in each.values] for each in numbers.effects(found)}
    assert values["order"] == ["group", "last"]
    assert [numbers.label(value) for value in values["use_tma"]] == ["off", "on"]


def test_the_gain_is_paired_round_by_round():
    default = Trial(A, screening=(99.0,), finals=(10.0, 20.0, 30.0))
    winner = Trial(B, finals=(5.0, 10.0, 15.0))
    found = numbers.gain(record(default, winner, winner=1))
    assert (found.value, found.rounds) == (2.0, 3)


def test_a_screening_pairs_from_its_batch_on():
    default = Trial(A, screening=(1.0, 1.0, 10.0, 20.0))
    winner = Trial(B, screening=(5.0, 10.0), start=2)
    assert numbers.gain(record(default, winner, winner=1)).value == 2.0


def test_no_common_round_is_no_gain():
    winner = Trial(B, finals=(5.0,))
    found = record(Trial(A, failed=Failed("gate", "over budget", "")), winner, winner=1)
    assert math.isnan(numbers.gain(found).value)
    assert summarize(found).speedup is None and summarize(found).changed


def test_reasons_are_counted_by_stage_with_an_example():
    stages = [(r.stage, r.name, r.count) for r in numbers.untimed_reasons(prefill_record())]
    assert stages[:2] == [("not built", "shared memory", 31), ("not built", "registers", 12)]
    assert ("gate", "over budget", 1) in stages and ("crash", "illegal access", 1) in stages
    example = next(
        r.example for r in numbers.untimed_reasons(prefill_record()) if r.stage == "gate"
    )
    assert example.endswith("out max 3.1e-2 > 2.2e-3")


def test_work_of_prefill_and_decode():
    prefill = work(prefill_record())
    assert prefill.flops == 4 * 2 * 32 * 4096 * 4096 * 128 and prefill.density == "exact"
    assert prefill.bytes == 2 * 2 * 2 * (32 + 8) * 4096 * 128
    decode = work(decode_record())
    assert decode.bytes == 2 * 8 * 256 * (32 + 8 * 8192)
    # Four query heads share a key: 4 products and 4 sums for each of its 2 bytes.
    assert math.isclose(decode.intensity, 4, rel_tol=1e-3)


def test_a_backward_has_five_products_and_a_gradient_beside_each_tensor():
    forward = work(prefill_record())
    plain = work(prefill_record(key=key("backward", (2, 4096, 4096))))
    assert plain.flops == 2.5 * forward.flops and plain.bytes == 2 * forward.bytes


@pytest.mark.parametrize(
    ("mask_class", "kept", "density"),
    [
        ("d1/8 i2 runs", 1 / 8, "class"),
        ("d1 i1 gaps", 1, "class"),
        ("unknown", 1, "unknown"),
        ("empty", 1, "unknown"),
    ],
)
def test_work_of_a_masked_problem(mask_class, kept, density):
    masked = work(prefill_record(key=key(mask="m", blocks="128x128", mask_class=mask_class)))
    assert (masked.kept, masked.density) == (kept, density)
    assert masked.flops == kept * work(prefill_record()).flops


@pytest.mark.parametrize(
    ("make", "bound"), [(prefill_record, "compute"), (decode_record, "memory")]
)
def test_reach_names_the_limit_that_binds(make, bound):
    found = reach(make(), 1000.0)
    limits = limits_of("nvidia-h200")
    assert found.bound == bound
    full = found.tflops / limits.half if bound == "compute" else found.bandwidth / limits.bandwidth
    assert math.isclose(found.share, full, rel_tol=1e-6)


def test_a_device_without_known_limits_has_rates_alone():
    found = reach(prefill_record(environment=replace(HERE, device="brand-new")), 10.0)
    assert found.tflops > 0 and found.share is None and found.bound is None


@pytest.mark.parametrize("device", KNOWN)
def test_every_device_that_can_be_named_has_limits(device):
    limits = limits_of(device)
    assert limits.half >= limits.tf32 >= limits.single > 0 and 0 < limits.bandwidth < 10


def test_limits_tell_cards_of_one_name_apart():
    assert limits_of("NVIDIA H100 PCIe").bandwidth < limits_of("nvidia-h100-80gb-hbm3").bandwidth
    assert limits_of("interpreter") is None


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "nvidia-rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100"),
        ("AMD Instinct MI300X", "amd-mi300x"),
        ("AMD Ryzen AI Max+ 395 w/ Radeon 8060S", "amd-radeon-8060s-graphics"),
        ("Radeon RX 7900 XTX", "amd-radeon-rx-7900-xtx"),
    ],
)
def test_limits_are_found_by_the_name_that_a_driver_gives(driver, known):
    assert limits_of(driver) == PEAKS[known]


@pytest.mark.parametrize("name", ["h200-decode", "h200-prefill-torch"])
def test_a_bench_of_the_project_is_read(name):
    bench = rivals.read_bench(ROOT / "bench" / "results" / f"{name}.json")
    assert "H200" in bench.machine and "torch-flex-tuned" in bench.rivals
    assert all(row.us > 0 for row in bench.rows)
    assert rivals.geometric_mean(bench, "torch-flex-tuned") > 0.9


def test_a_red_gate_has_no_time(tmp_path):
    path = tmp_path / "bench.json"
    samples = {"flexattn": {"us": [2.0]}, "torch-flex": {"us": [4.0]}}
    row = {"name": "Llama-3 prefill", "samples": samples, "gates": {"flexattn": {"passed": False}}}
    green = {"name": "llama-3 decode", "samples": samples, "gates": {}}
    data = {"schema": 1, "bench": "b", "environments": [{"gpu": "x"}], "rows": [row, green]}
    path.write_text(json.dumps(data))
    bench = rivals.read_bench(path)
    assert math.isnan(bench.rows[0].us) and math.isnan(bench.rows[0].rivals[0].ratio.value)
    assert summarize(prefill_record(), (bench,)).torch is None
    assert summarize(decode_record("Llama-3 Decode"), (bench,)).torch == ("torch-flex", 2.0)


def test_the_verbs_own_json_is_read(tmp_path):
    path = tmp_path / "bench.json"
    us, ratio = {"flexattn": 2.0, "default": 3.0, "torch": None}, {"default": 1.5, "torch": None}
    rows = [{"title": title, "us": us, "ratio": ratio, "passed": title == "a"} for title in "ab"]
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    green, red = rivals.read_bench(path).rows
    assert (green.us, green.rival("default").ratio.value, green.rival("torch")) == (2, 1.5, None)
    assert math.isnan(red.us) and math.isnan(red.rival("default").ratio.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no bench's result"),
        ("{", "no bench's result"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "bench": "b", "environments": [], "rows": []}', "no bench's result"),
    ],
)
def test_what_is_no_bench_is_refused(text, words, tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        rivals.read_bench(path)
    with pytest.raises(InputError, match="No such file"):
        rivals.read_bench(tmp_path / "none.json")
