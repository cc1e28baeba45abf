"""Limits: each rule breaks alone, and what a config takes is exact."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from flexattn.catalogue import causal, relative_bias, softcap
from flexattn.device import named
from flexattn.kernels.base.config import orders, power_above
from flexattn.kernels.choose.defaults import LEFT_OUT, default, reasons, space, survey
from flexattn.kernels.hopper.family import PREFILL as HOPPER
from flexattn.kernels.triton.config import ORDERS, AmdPrefillConfig, DecodeConfig, PrefillConfig
from flexattn.kernels.triton.defaults import split_counts
from flexattn.kernels.triton.limits import LIMITS
from flexattn.problem import Layout
from tests.families import estimates, geometry, grid, unpromising, violated
from tests.problems import problem
from tests.processes import python

MI300X = named("amd-mi300x")
H200, A100, RTX = (named(f"nvidia-{name}") for name in ("h200", "a100", "rtx-5090"))
STRIDED = Layout(False, False, False, False)
BIAS = relative_bias(torch.zeros(32, 64), 32)
MODS = {"noop": {}, "causal": {"mask_mod": causal, "score_mod": softcap(50.0)}}
SPLIT = {"dtype": "float32", "fp32_products": "bf16x6"}
EFFORTS = ("quick", "full", "exhaustive")

BREAKS = [
    ("power of two", PrefillConfig(48, 64, 4, 2), {}, H200),
    ("power of two", PrefillConfig(64, 8, 4, 2), {}, H200),
    ("power of two", PrefillConfig(64, 0, 4, 2), {}, H200),
    ("power of two", PrefillConfig(2**17, 64, 4, 2), {}, H200),
    ("warps", PrefillConfig(64, 64, 3, 2), {}, H200),
    ("warps", PrefillConfig(64, 64, 0, 2), {}, H200),
    ("warps", PrefillConfig(64, 32, 8, 2), SPLIT, H200),
    ("stages", PrefillConfig(64, 64, 4, 9), {}, H200),
    ("stages", PrefillConfig(64, 64, 4, 0), {}, H200),
    ("splits", DecodeConfig(16, 64, 4, 2, -1), {"kind": "decode"}, H200),
    ("order", PrefillConfig(64, 64, 4, 2, order="sideways"), {}, H200),
    ("hints", AmdPrefillConfig(64, 64, 4, 2, waves_per_eu=2), {}, H200),
    ("hints", AmdPrefillConfig(64, 32, 4, 1, waves_per_eu=9), {}, MI300X),
    ("dtype", PrefillConfig(64, 64, 4, 2), {"dtype": "float8_e4m3fn"}, H200),
    ("mask block", PrefillConfig(64, 64, 4, 2), {"mask_mod": causal, "block": (32, 64)}, H200),
    ("mask block", PrefillConfig(64, 64, 4, 2), {"mask_mod": causal, "block": (64, 32)}, H200),
    ("tma", PrefillConfig(64, 64, 4, 2, True), {}, A100),
    ("tma", PrefillConfig(64, 64, 4, 2, True), {"layout": STRIDED}, H200),
    ("tma", PrefillConfig(64, 32, 4, 2, True), {"D": 192, "Dv": 128}, H200),
    ("tma", PrefillConfig(64, 32, 4, 2, True), {"D": 128, "Dv": 192}, H200),
    ("tma", PrefillConfig(16, 16, 8, 1, True), {"D": 512, "Dv": 16}, H200),
    ("shared memory", PrefillConfig(64, 64, 4, 5), {}, RTX),
    ("shared memory", PrefillConfig(128, 32, 8, 5), SPLIT, H200),
    ("registers", PrefillConfig(128, 128, 4, 2), {}, H200),
    ("occupancy", PrefillConfig(32, 64, 16, 2), {"D": 256}, H200),
]
UNPROMISING = [
    ("headroom", PrefillConfig(128, 64, 4, 2, True)),
    ("idle warps", PrefillConfig(64, 64, 8, 2, True)),
    ("slower loads", PrefillConfig(64, 64, 4, 2)),
]


@pytest.mark.parametrize(
    ("name", "config", "about", "device"),
    BREAKS,
    ids=[f"{name}-{device.arch}-{number}" for number, (name, _, _, device) in enumerate(BREAKS)],
)
def test_each_rule_breaks_alone(name, config, about, device):
    structure = problem(**about).structure
    assert [rule.name for rule in violated(config, structure, device)] == [name]
    (said,) = reasons(config, structure, device)
    assert "{" not in said


@pytest.mark.parametrize(("name", "config"), UNPROMISING, ids=str)
def test_what_can_run_and_is_left_to_an_exhaustive_search(name, config):
    structure = problem().structure
    assert violated(config, structure, H200) == []
    assert [rule.name for rule in unpromising(config, structure, H200)] == [name]


def test_every_rule_has_a_case():
    assert {name for name, *_ in BREAKS} == {rule.name for rule in (*LIMITS.shape, *LIMITS.fit)}
    assert [name for name, _ in UNPROMISING] == [rule.name for rule in LIMITS.worth]


def test_a_sum_of_thirds_is_divided_once():
    """It is 472 in fractions, and ended just below in doubles."""
    structure = problem(D=80, Dv=128, dtype="float8_e4m3fn", layout=STRIDED).structure
    config = PrefillConfig(16, 32, 1, 5, use_tma=False)
    taken = estimates(config, structure, named("amd-radeon-rx-7900-xtx"))
    assert taken == (27136, 472 + 24)


WITHOUT_SYMPY = """
import sys
import torch
torchs = "sympy" in sys.modules  # a torch that imports it by itself costs us nothing more
import flexattn
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.defaults import reasons
from flexattn.device import named
from tests.problems import problem
wanted, h200 = problem(), named("nvidia-h200")
assert not reasons(default(wanted, h200), wanted.structure, h200)
assert ("sympy" in sys.modules) == torchs, "a server that starts would wait for it"
"""


def test_neither_an_import_nor_a_first_call_needs_sympy():
    python("-c", WITHOUT_SYMPY)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("device", [H200, A100, named("amd-mi300x")], ids=lambda d: d.arch)
def test_a_survey_adds_up(device, kind, mods, effort):
    wanted = problem(kind, **MODS[mods])
    found = survey(wanted, device, effort)
    everything = {default(wanted, device), *grid(wanted, device, effort)}
    assert len(everything) == len(found.configs) + sum(count for _, count in found.rejected)
    assert set(found.configs) <= everything and len(set(found.configs)) == len(found.configs)
    counts = Counter(dict(found.rejected))
    for config in everything - set(found.configs):
        broken = violated(config, wanted.structure, device)
        counts[broken[0].name if broken else "other"] -= 1
    rules = (
        *LIMITS.shape,
        *LIMITS.fit,
        *HOPPER.limits.shape,
        *HOPPER.limits.fit,
    )
    assert not any(counts[rule.name] for rule in rules), "every infeasible config is counted"
    if effort == "exhaustive":
        assert not counts["other"], "in the space exactly where there are no reasons"
    assert (LEFT_OUT in dict(found.rejected)) <= (effort == "quick")


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_efforts_contain_each_other(kind, mods):
    wanted = problem(kind, **MODS[mods])
    quick, full, every = (space(wanted, H200, effort) for effort in EFFORTS)
    assert set(quick) < set(full) < set(every)
    assert 4 < len(quick) <= 12 and len(every) <= 900  # of both templates for prefill
    assert quick[0] == full[0] == every[0] == default(wanted, H200)


def test_quick_varies_what_decode_depends_on_most():
    splits = {config.num_splits for config in space(problem("decode"), H200, "quick")}
    assert 0 in splits and len(splits) >= 4


@given(B=st.integers(1, 300), kv_len=st.integers(0, 2**18), width=st.sampled_from([32, 128]))
def test_splits_differ_and_have_keys(B, kv_len, width):
    wanted = replace(problem("decode", kv_len=kv_len), B=B)
    config = DecodeConfig(16, width, 4, 2)
    for every in (False, True):
        found = split_counts(wanted, config, H200, every)
        real = [geometry(wanted, replace(config, num_splits=n), H200).num_splits for n in found]
        assert found[0] == 0 and len(set(real)) == len(real)
        assert all(1 <= n <= max(1, -(-kv_len // width)) for n in real)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, {"last", "group"}),
        ({"group": 1}, {"last"}),
        ({"mask_mod": causal}, {"last", "group", "heads"}),
        ({"mask_mod": causal, "group": 1}, {"last", "heads"}),
        ({"mask_mod": causal, "q_len": 64}, {"last"}),
    ],
    ids=["dense", "one_head_a_group", "masked", "masked_one_head_a_group", "one_tile"],
)
def test_orders_are_tried_where_they_differ(about, expected):
    wanted = problem(**about)
    assert set(orders(ORDERS, wanted, 64, every=False)) == expected
    if "mask_mod" in about and "q_len" not in about and "group" not in about:
        assert orders(ORDERS, wanted, 64, every=True) == ORDERS


@given(st.integers(1, 2**16))
def test_power_above(block):
    cover = power_above(block)
    assert cover >= block and (cover == 16 or cover < 2 * block) and cover & (cover - 1) == 0
