"""Which structures leave far keys out, which calls that pays for, and what they render."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import (
    alibi,
    causal,
    causal_offset,
    document,
    relative_bias,
    sliding_window,
    softcap,
)
from flexattn.cli.explain import rewrites
from flexattn.device import named
from flexattn.frontend.gradients import AskedGradients, _problem
from flexattn.kernels.base.arguments import skips_vanished
from flexattn.kernels.base.features import decays, skips_far
from flexattn.kernels.choose.options import parse
from flexattn.kernels.decay_skip.source import render_blocks, render_norms, render_window
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.kernels.triton_backward.config import BackwardConfig, skips_blocks
from flexattn.mods import bind
from flexattn.mods.rules import ALL, split
from flexattn.runtime.decay_skip import pays
from tests.cases import causal_score
from tests.families import render
from tests.problems import problem

DEVICE = named("nvidia-h200")
TRITON, GLUON = PrefillConfig(128, 64, 4, 3), HopperPrefillConfig(2, 128, 2, 240)
ALIBI = alibi(32, "cpu")
BIAS = torch.zeros(64)
SLOPES = torch.zeros(32)


def temperature(score, b, h, q_idx, kv_idx):
    return score * torch.log(q_idx + 2.0) + SLOPES[h] * kv_idx


def column(score, b, h, q_idx, kv_idx):
    return score + BIAS[kv_idx]


HAVE = {
    "alibi": {"score_mod": ALIBI},
    "causal": {"score_mod": ALIBI, "mask_mod": causal, "runs": True},
    "window": {"score_mod": ALIBI, "mask_mod": sliding_window(99), "runs": True},
    "documents": {
        "score_mod": ALIBI, "mask_mod": and_masks(document(BIAS.long()), causal), "runs": True
    },
    "float32": {"score_mod": ALIBI, "dtype": "float32"},
    "fp8": {"score_mod": ALIBI, "dtype": "float8_e4m3fn"},
    "scaled": {"score_mod": lambda s, b, h, q, k: 2 * s + SLOPES[h] * (k - q) / 3},
    "rows": {"score_mod": lambda s, b, h, q, k: s + BIAS[q] + 0.25 * k},
    "batches": {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * BIAS[b] * (q - k)},
}  # fmt: skip
HAVE_NOT = {
    "plain": {},
    "decode": {"score_mod": ALIBI, "kind": "decode"},
    "lists": {"score_mod": ALIBI, "mask_mod": causal},
    "softcap": {"score_mod": lambda s, b, h, q, k: 9 * torch.tanh(s / 9) + SLOPES[h] * k},
    "capped": {"score_mod": softcap(30.0)},
    "table": {"score_mod": relative_bias(torch.zeros(32, 64), 32)},
    "both": {"score_mod": lambda s, b, h, q, k: s + SLOPES[h] * k + BIAS[q - k]},
    "columns": {"score_mod": column},
    "own_mask": {"score_mod": causal_score},
    "falls": {"score_mod": lambda s, b, h, q, k: s - 0.5 * k},
    "level": {"score_mod": lambda s, b, h, q, k: s + BIAS[q]},
    "distance": {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()},
    "by_row": {"score_mod": lambda s, b, h, q, k: s + BIAS[q] * k},
    "rounded": {"score_mod": lambda s, b, h, q, k: s + (SLOPES[h] * k + BIAS[q])},
    "temperature": {"score_mod": temperature},
    "turned": {"score_mod": lambda s, b, h, q, k: SLOPES[h] * k - s},
}


@pytest.mark.parametrize("name", HAVE)
def test_structures_that_leave_far_keys_out(name):
    structure = problem(**HAVE[name]).structure
    assert decays(structure)
    configs = (
        (TRITON,) if name == "float32" else (TRITON, replace(GLUON, tile_scheduler="dynamic"))
    )
    for config in configs:
        source = render(structure, config, DEVICE, "test")
        assert "DECAY_WINDOW" in [argument.name for argument in source.arguments]
        assert "load(DECAY_WINDOW" in source.text
        bare = render(replace(structure, rules_off=("decay_skip",)), config, DEVICE, "test")
        assert "DECAY_WINDOW" not in bare.text and bare.hash != source.hash
    assert "step = " in render_window(structure, DEVICE).text


@pytest.mark.parametrize("name", HAVE_NOT)
def test_structures_that_do_not(name):
    structure = problem(**HAVE_NOT[name]).structure
    assert not decays(structure) and not skips_far(structure, TRITON)


HOPPER = HopperBackwardConfig(64, 128, 2)
BACKWARDS = (HOPPER, replace(HOPPER, dq_tma=True, deterministic=True), BackwardConfig(*[64] * 4))


@pytest.mark.parametrize("name", [name for name in HAVE if name != "float32"])
def test_their_backwards_leave_out_the_same_tiles(name):
    structure = problem("backward", **HAVE[name]).structure
    for config in BACKWARDS:
        source = render(structure, config, DEVICE, "test")
        names = [argument.name for argument in source.arguments]
        both = config is not HOPPER  # its dQ is added up in any order
        assert "M_BLOCK_MAX" in names and ("N_BLOCK_MIN" in names) is both
        bare = render(replace(structure, rules_off=("decay_skip",)), config, DEVICE, "test")
        assert not {"M_BLOCK_MAX", "N_BLOCK_MIN"} & {each.name for each in bare.arguments}
        assert bare.hash != source.hash
    blocks = render_blocks(structure, 64, 128, DEVICE)
    assert ("their upper bound" in blocks.text) is (name == "causal")


@pytest.mark.parametrize("name", sorted(HAVE_NOT.keys() - {"plain", "decode"}))
def test_backwards_that_visit_all_tiles(name):
    structure = problem("backward", **HAVE_NOT[name]).structure
    assert not any(skips_vanished(structure, config) for config in BACKWARDS)


def test_backwards_that_visit_all_tiles_for_another_reason():
    structure = problem("backward", **HAVE["causal"]).structure
    assert skips_vanished(structure, HOPPER)
    assert not skips_vanished(replace(structure, dropout=True), HOPPER)
    assert not skips_vanished(replace(structure, kind="prefill"), HOPPER)
    narrow = problem("backward", **HAVE["causal"], block=(32, 128)).structure
    assert skips_blocks(narrow, BackwardConfig(32, 64, 32, 128)) == (32, 64)
    assert skips_blocks(narrow, BackwardConfig(64, 64, 32, 128)) is None


def test_a_backward_is_told_which_rules_are_off():
    q = torch.zeros(1, 32, 256, 64)
    for given, off in (("", ()), ("row,decay_skip", ("decay_skip",)), ("row", ())):
        chosen = parse({"RULES_OFF": given})
        asked = AskedGradients(bind(ALIBI, "score"), None, None, 1.0, chosen, ())
        assert _problem(asked, (q, q, q), None, DEVICE).structure.rules_off == off


def test_tiles_wider_than_a_block_walk_lists():
    structure = problem(score_mod=ALIBI, mask_mod=causal, runs=True, block=(128, 32)).structure
    assert skips_far(structure, replace(TRITON, BLOCK_N=32))
    assert not skips_far(structure, TRITON)
    assert "DECAY_WINDOW" not in render(structure, TRITON, DEVICE, "test").text


@pytest.mark.parametrize("rules_off", [(), ("decay_skip",), ("decay_skip", "row_slope")])
def test_explain_names_the_rule(rules_off):
    structure = replace(problem(score_mod=ALIBI).structure, rules_off=rules_off)
    named = {row["name"]: row for row in rewrites(structure) if row["what"] == "rule"}
    assert ("decay_skip" in named) is not rules_off.__contains__("decay_skip")
    if not rules_off:
        assert "slope" not in named["decay_skip"]["to"] and "[h" in named["decay_skip"]["to"]
        assert not any(row["name"] == "decay_skip" for row in rewrites(problem().structure))


@pytest.mark.parametrize(
    ("mask_mod", "under"),
    [(causal, True), (causal_offset(7), True), (sliding_window(99), False),
     (lambda b, h, q, k: (k <= q) & (k <= 2 * q - h), True),
     (lambda b, h, q, k: (k <= q) & (BIAS[k] > 0), False)],
)  # fmt: skip
def test_a_row_keeps_the_keys_below_its_high_where_a_mask_is_that_alone(mask_mod, under):
    structure = problem(score_mod=ALIBI, mask_mod=mask_mod, runs=True).structure
    for config in (TRITON, GLUON):
        assert ("under = " in render(structure, config, DEVICE, "test").text) is under


def test_long_calls_alone_are_worth_it():
    usual = replace(problem(score_mod=ALIBI, q_len=4096, kv_len=4096), B=1, Hq=16, Hkv=16)
    assert pays(usual)
    assert not pays(replace(usual, q_len=2048, kv_len=2048))
    assert pays(replace(usual, B=2, q_len=2048, kv_len=2048))
    assert not pays(replace(usual, q_len=64, kv_len=2**20))
    assert not pays(replace(usual, q_len=2**17, kv_len=512))


def test_norms_are_of_a_layout_and_windows_of_a_score():
    """Sources are shared by all structures for which they are the same."""
    plain = problem(score_mod=ALIBI).structure
    masked = problem(score_mod=ALIBI, mask_mod=causal, runs=True, lse=False).structure
    assert render_norms(plain, DEVICE).hash == render_norms(masked, DEVICE).hash
    assert render_window(plain, DEVICE).hash == render_window(masked, DEVICE).hash
    other = problem(score_mod=HAVE["scaled"]["score_mod"]).structure
    assert render_window(plain, DEVICE).hash != render_window(other, DEVICE).hash
    strided = replace(plain, layout=replace(plain.layout, k_contiguous=False))
    assert "stride_kd" in render_norms(strided, DEVICE).text


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
@pytest.mark.parametrize("part", [lambda q, k: k, lambda q, k: k - q], ids=["key", "distance"])
def test_integers_that_wrap_rise_to_nowhere(dtype, part):
    """uint8(k) begins again at 256: taken for k, keys were left out that counted most."""
    mod = bind(lambda s, b, h, q, k: s + part(q, k).to(dtype) * 8.0, "score").mod
    terms = split(mod, ALL)
    assert terms.rise is None
    wide = bind(lambda s, b, h, q, k: s + part(q, k).to(torch.int32) * 8.0, "score").mod
    assert split(wide, ALL).rise is not None
