"""What the Hopper softmax takes over of a score_mod."""

import math
import struct

import numpy as np
import pytest
import torch

from flexattn.catalogue import alibi, causal, relative_bias, sliding_window, softcap
from flexattn.frontend.quantize import Quantized
from flexattn.kernels.base.source import traits_of
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.hopper.source import COEFFICIENTS, LIMIT, float_bits, print_consumer_score
from tests.families import render
from tests.problems import H200, problem

BIAS = torch.zeros(8192)


def key_bias(score, b, h, q_idx, kv_idx):
    return score + BIAS[kv_idx]


def block_factors(size, inner=None):
    """Scores times factors of blocks, as those of quantize, then a score_mod."""
    eight, table = torch.zeros(1, 2, 1, 64).to(torch.float8_e4m3fn), torch.ones(1, 2, 200)
    return Quantized(eight, eight, eight, table, table, table, size).score_mod(inner)


def both(score, b, h, q_idx, kv_idx):
    return softcap(30.0)(score, b, h, q_idx, kv_idx) + BIAS[kv_idx]


def printed(score_mod, lazy_rescale=True, **more):
    structure = problem(score_mod=score_mod, **more).structure
    return print_consumer_score(structure, traits_of(H200, structure), lazy_rescale, (64, 128))


@pytest.mark.parametrize(
    ("score_mod", "fused"),
    [
        (alibi(32, "cpu"), "ramp"),
        (key_bias, "columns"),
        (relative_bias(torch.zeros(32, 128), 64), "diagonals"),
        (softcap(30.0), "softcap"),
        (softcap(-30.0), ""),
        (both, ""),
        (lambda score, b, h, q_idx, kv_idx: score * BIAS[q_idx], ""),
        (block_factors(64), "blocks"),
        (block_factors(128), "blocks"),
        (block_factors(64, alibi(32, "cpu")), "ramp"),
        (block_factors(128, softcap(30.0)), "softcap"),
        (block_factors(64, softcap(30.0)), ""),
        (block_factors(48), ""),
    ],
)
def test_what_is_fused_with_the_softmax(score_mod, fused):
    found = printed(score_mod)
    assert found.fused == fused
    assert found.folded or not fused
    assert printed(score_mod, lazy_rescale=False).fused == ""


@pytest.mark.parametrize(("size", "loads"), [(64, 2), (128, 1), (256, 1)])
def test_factors_of_blocks_are_read_once_a_tile(size, loads):
    """A load and a product for each key took 1.65 to 1.9 times as long."""
    for lazy in (False, True):
        found = printed(block_factors(size), lazy)
        assert found.halves is (size == 64)
        assert len(found.early) == loads and all("start_n" in line for line in found.early)
        assert not any("kv_idx" in line or "q_idx" in line for line in found.lines)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mods", [{}, {"mask_mod": causal, "runs": True}], ids=["noop", "causal"])
def test_factors_of_blocks_have_the_config_of_a_call_without(D, mods):
    for weights in ("exact", "e4m3"):
        more = {"D": D, "dtype": "float8_e4m3fn", "fp8_weights": weights, **mods}
        plain, scaled = problem(**more), problem(score_mod=block_factors(64), **more)
        assert default(scaled, H200, "gluon") == default(plain, H200, "gluon")


def test_what_differs_within_a_tile_is_no_factor_of_it():
    of_row = printed(block_factors(64, lambda score, b, h, q_idx, kv_idx: score * BIAS[q_idx]))
    assert not of_row.folded and any("q_idx" in line for line in of_row.hoisted)
    assert any("qk = qk * qk_scale" in line for line in of_row.body)


def test_a_cap_in_fp16_is_not_approximated():
    assert printed(softcap(30.0), dtype="float16").fused == ""


def test_the_polynomial_is_nearer_than_the_instruction():
    x = np.linspace(1e-6, math.sqrt(LIMIT), 100_001)
    u = x * x
    found = x * sum(c * u**power for power, c in enumerate(COEFFICIENTS))
    assert np.abs(found / np.tanh(x) - 1).max() < 2**-11


@pytest.mark.parametrize("number", [0.0, 1.0, -0.5, 120.0])
def test_a_float_as_ptx_writes_it(number):
    text = float_bits(number)
    assert text.startswith("0f") and struct.unpack(">f", bytes.fromhex(text[2:]))[0] == number


@pytest.mark.parametrize("D", [64, 96, 128])
@pytest.mark.parametrize("score_mod", [key_bias, relative_bias(torch.zeros(32, 128), 64)])
def test_a_mask_comes_after_what_is_added(score_mod, D):
    """A bias of NaN at a key that is masked was added to its -inf, and the row was NaN."""
    made = problem(score_mod=score_mod, mask_mod=causal, D=D, runs=True)
    text = render(made.structure, default(made, H200, "gluon"), H200, "biased").text
    tiles = text.split("= online_softmax(")[:-1]
    assert tiles
    for tile in tiles:
        scores = tile[tile.rindex("= multiply_qk(") :]
        assert scores.index("= exponents(") < scores.index("qk = keep_branch(")


def recomputed(lines):
    """Whether keys are masked before the softmax, each time followed by new early weights."""
    softmax = next(i for i, line in enumerate(lines) if "online_softmax(qk, early_exp2" in line)
    taken = [i for i in range(softmax) if "qk = keep_branch(" in lines[i]]
    for i in taken:
        # Behind it in its own block, or in one around it.
        depth = len(lines[i]) - len(lines[i].lstrip())
        for line in lines[i + 1 : softmax]:
            depth = min(depth, len(line) - len(line.lstrip()))
            if (
                "early_exp2 = early_weights(qk)" in line
                and len(line) - len(line.lstrip()) == depth
            ):
                break
        else:
            raise AssertionError(lines[i])
    return bool(taken)


@pytest.mark.parametrize(
    "mods",
    [
        {"mask_mod": causal, "runs": True},
        {"mask_mod": sliding_window(1024), "runs": True},
        {"mask_mod": sliding_window(1024)},
        {"mask_mod": sliding_window(1024), "runs": True, "score_mod": alibi(32, "cpu")},
        {"score_mod": key_bias},
        {},
    ],
    ids=["causal", "window", "window_without_runs", "window_alibi", "key_bias", "noop"],
)
def test_a_mask_is_followed_by_new_early_weights(mods, monkeypatch):
    """Early weights are exp2 of the exponents before a mask."""
    monkeypatch.setattr("flexattn.kernels.hopper.family.offered", lambda: True)
    wanted = problem(**mods)
    text = render(wanted.structure, default(wanted, H200, "gluon"), H200, "early").text
    # One copy with cross_tile_pipeline; else a work tile's first KV tile has one of its own.
    copies = [part.splitlines() for part in text.split("qk, early_exp2 = exponents(")[1:]]
    assert any([recomputed(lines) for lines in copies])
