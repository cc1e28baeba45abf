"""What a score_mod's terms become in a kernel: rows that return, strips, masks of its own."""

import math

import pytest
import torch

from flexattn.catalogue import alibi, relative_bias, softcap, t5_bias
from flexattn.mods.rules import REWRITES
from tests.covering import pairwise
from tests.support import DTYPES, KINDS, assert_accurate, block_mask, inputs

each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def alternating(value, rows=37):
    bias = torch.linspace(-3, 3, rows)
    bias[1::3] = value
    return bias


@pairwise(value=[0.25, 5e4, -math.inf, math.inf, math.nan], dtype=DTYPES, kind=KINDS)
def test_what_a_row_adds_returns_in_its_statistics(value, dtype, kind):
    """-inf empties a row, +inf and NaN make it NaN, and a large number costs no precision."""
    bias = alternating(value)
    q, k, v = inputs(dtype=DTYPES[dtype])
    assert_accurate(
        q, k, v, kernel_options=KINDS[kind], score_mod=lambda s, b, h, q, k: s + bias[q]
    )


@each_kind
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_without_a_key_stay_empty_whatever_is_added(value, kind):
    """And numpy, with which the interpreter computes, warns of no infinity less another."""
    bias = alternating(value)
    q, k, v = inputs()
    mask = block_mask(lambda b, h, q, k: (q - k < 9) & (q >= k + 4), q, k, 16)
    assert_accurate(
        q, k, v, kernel_options=KINDS[kind], block_mask=mask,
        score_mod=lambda s, b, h, q, k: s + bias[q],
    )  # fmt: skip


@each_kind
@each_dtype
def test_a_row_and_a_split_of_the_keys(dtype, kind):
    bias = alternating(-math.inf)
    q, k, v = inputs(L=3, S=131, dtype=DTYPES[dtype])
    options = KINDS[kind] | ({"SPLIT_KV": 3} if kind == "decode" else {})
    assert_accurate(
        q, k, v, kernel_options=options,
        score_mod=lambda s, b, h, q, k: s * 0.75 + bias[q + 1] - 0.01 * (q - k),
    )  # fmt: skip


@pairwise(offset=[0, 100_003], dtype=DTYPES, kind=KINDS)
def test_distances_keep_their_precision_far_from_the_start(offset, dtype, kind):
    """Cancellation: a slope times 100000 on both sides must not reach the weights."""
    q, k, v = inputs(dtype=DTYPES[dtype])
    slopes = torch.tensor([0.75, 0.5, 0.25])
    assert_accurate(
        q, k, v, kernel_options=KINDS[kind],
        score_mod=lambda s, b, h, q, k: s + slopes[h] * ((k + offset) - (q + offset)),
    )  # fmt: skip


RISING = {
    "keys_alone": lambda s, b, h, q, k: s + 0.03 * k,
    "keys_as_they_are": lambda s, b, h, q, k: s - k,
    "scaled": lambda s, b, h, q, k: 2 * s - 0.5 * (q - k),
    "steep": lambda s, b, h, q, k: s + 4.0 * (k - q) / (h + 1),
    "masked": lambda s, b, h, q, k: torch.where(q >= k, s + 0.1 * (k - q), -math.inf),
    "with_a_row": lambda s, b, h, q, k: s + q * 0.01 * q - 0.25 * k,
}


@pairwise(name=RISING, dtype=DTYPES, kind=KINDS)
def test_what_rises_evenly_along_the_keys(name, dtype, kind):
    q, k, v = inputs(dtype=DTYPES[dtype])
    mask = block_mask(lambda b, h, q, k: (q + 3 * k) % 5 != 0, q, k, 16)
    for scale, blocks in ((None, None), (0.7, mask), (-0.2, None)):
        assert_accurate(
            q, k, v, kernel_options=KINDS[kind], score_mod=RISING[name], scale=scale,
            block_mask=blocks,
        )  # fmt: skip


KEPT = {
    "causal": lambda q, k: q >= k,
    "strictly_before": lambda q, k: k < q,
    "after": lambda q, k: k >= q + 3,
    "window": lambda q, k: (q >= k) & (q - k < 9),
    "steep": lambda q, k: 2 * q >= 3 * k + 1,
    "parity": lambda q, k: (q >= k) & ((q + k) % 2 == 0),
    "either": lambda q, k: (q >= k) | (k > 40),
}


@each_kind
@pytest.mark.parametrize("name", KEPT)
def test_a_score_of_minus_infinity_masks_and_bounds_the_keys(name, kind):
    q, k, v = inputs(B=1, L=61, S=75)
    options = KINDS[kind] | {"BLOCK_M": 16, "BLOCK_N": 16}
    kept = KEPT[name]
    assert_accurate(
        q, k, v, kernel_options=options,
        score_mod=lambda s, b, h, q, k: torch.where(kept(q, k), s, -float("inf")) * 0.5,
    )  # fmt: skip
    assert_accurate(
        q, k, v, kernel_options=options,
        score_mod=lambda s, b, h, q, k: torch.where(~kept(q, k), -float("inf"), s + 0.1 * k),
    )  # fmt: skip


def test_a_mask_by_captured_offsets():
    q, k, v = inputs(L=61, S=75)
    offset = torch.tensor([5, -7])
    assert_accurate(
        q, k, v, kernel_options=KINDS["prefill"] | {"BLOCK_M": 16, "BLOCK_N": 16},
        score_mod=lambda s, b, h, q, k: torch.where(q + offset[b] >= k, s, -float("inf")),
    )  # fmt: skip


MODS = {
    "alibi": lambda: alibi(3, "cpu"),
    "softcap": lambda: softcap(20.0),
    "relative": lambda: relative_bias(torch.linspace(-1, 1, 3 * 128).view(3, 128), 60),
    "t5": lambda: t5_bias(torch.linspace(-1, 1, 96).view(32, 3), 100),
    "both": lambda: lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + 0.1 * (q - k).abs() - s * 0.5,
    "no_score": lambda: lambda s, b, h, q, k: 0.1 * (q - k) + 0.2 * k,
    "negative": lambda: lambda s, b, h, q, k: -s,
}


@pairwise(off=["", "all"], name=MODS, dtype=DTYPES, kind=KINDS)
def test_with_and_without_the_rules(off, name, dtype, kind):
    q, k, v = inputs(dtype=DTYPES[dtype])
    options = KINDS[kind] | {"RULES_OFF": off}
    assert_accurate(q, k, v, kernel_options=options, score_mod=MODS[name]())


@pytest.mark.parametrize("rule", REWRITES)
def test_each_rule_can_be_switched_off_alone(rule):
    bias = torch.linspace(-1, 1, 128)
    q, k, v = inputs(dtype=torch.float16)

    def score_mod(s, b, h, q, k):
        s = torch.tanh((s * 0.5 + bias[h]) / 3) + bias[k] + bias[q - k + 64] - 0.1 * (q - k)
        return torch.where(q >= k, s, -float("inf"))

    assert_accurate(q, k, v, kernel_options={"RULES_OFF": rule}, score_mod=score_mod)
    assert_accurate(q, k, v, kernel_options={"RULES_OFF": rule}, score_mod=score_mod, scale=-0.3)
