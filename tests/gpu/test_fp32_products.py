"""Products of float32 on a GPU: parts of bfloat16 hold its budget, whatever the inputs' size.

The first tests are of what serves by default, the last ones of what has to be asked for.
"""

import math

import pytest
import torch

from flexattn.catalogue import alibi, causal, softcap
from flexattn.reference import Precision, attention
from tests.gradients import assert_gradients
from tests.support import DECODE, PREFILL, assert_accurate, block_mask, inputs, run

pytestmark = pytest.mark.usefixtures("poisoned")
DIMS = [32, 64, 128]


def on_gpu(*sizes):
    return inputs(*sizes, device="cuda")


def peaked(q, k, v):
    """Scores of some 30, a few far above."""
    q, k = 10 * q, k.clone()
    q[:, :, ::97] *= 8
    k[:, :, ::211] *= 10
    return q, k, 100 * v


def far_values(q, k, v):
    v = v.clone()
    v[:, :, ::53] *= 1e4
    return 3 * q, k, v


def of_one_sign(q, k, v):
    """What tensor cores cut off in sums adds up: three products of tf32 fail here."""
    return q.abs(), k.abs(), v.abs() + 1


def as_drawn(q, k, v):
    return q, k, v


INPUTS = {f.__name__: f for f in (as_drawn, peaked, far_values, of_one_sign)}


@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize("made", INPUTS)
def test_within_the_budget_of_float32(made, D):
    q, k, v = INPUTS[made](*on_gpu(2, 4, 2, 517, 1033, D))
    assert_accurate(q, k, v)
    assert_accurate(q, k, v, block_mask=block_mask(causal, q, k))


def off(q, k, v, score_mod, products):
    """The largest error of the output with those products."""
    options = {"FLOAT32_PRECISION": products}
    got = run(q, k, v, score_mod=score_mod, kernel_options=options).out
    exact = attention(q, k, v, score_mod=score_mod, precision=Precision.ORACLE).out
    return (got.double() - exact).abs().max().item()


@pytest.mark.parametrize("D", DIMS)
def test_mods(D):
    q, k, v = on_gpu(2, 4, 2, 517, 1033, D)
    assert_accurate(q, k, v, score_mod=softcap(20.0))
    # Of a bias of hundreds the sum decides, with FMA too, whose largest error at 32 columns is
    # 1.12 of the budget here: parts add nothing to it.
    found = {name: off(q, k, v, alibi(4, "cuda"), name) for name in ("bf16x6", "ieee")}
    assert found["bf16x6"] <= 1.1 * found["ieee"], found


@pytest.mark.parametrize("setting", ["none", "ieee", "tf32"])
def test_as_torch_has_it(setting, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", setting)
    for D in (64, 128, 256):
        q, k, v = on_gpu(2, 4, 2, 301, 433, D)
        assert_accurate(q, k, v)
        assert_gradients(q, k, v, mask_mod=causal, block=128)


def test_infinite_values_stay_infinite():
    """Lower parts of round numbers are 0, and 0 times infinity is NaN."""
    q, k, v = on_gpu(1, 2, 2, 300, 300, 64)
    v[:, :, 40] = math.inf
    found = run(q.round(), k.round(), v).out
    assert (found == math.inf).all()


@pytest.mark.parametrize("D", [16, 80, 96, 112])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_other_head_dimensions_where_asked(kind, D):
    # The worst of a few rows says little of a kernel: decoding has few in a batch.
    batch, rows, template = (24, 5, DECODE) if kind == "decode" else (2, 517, PREFILL)
    q, k, v = on_gpu(batch, 4, 2, rows, 1033, D)
    assert_accurate(q, k, v, kernel_options={**template, "FLOAT32_PRECISION": "bf16x6"})


@pytest.mark.parametrize("D", DIMS)
def test_decode_where_asked(D):
    options = {**DECODE, "FLOAT32_PRECISION": "bf16x6"}
    for make in INPUTS.values():
        assert_accurate(*make(*on_gpu(24, 4, 2, 5, 1033, D)), kernel_options=options)


@pytest.mark.parametrize("D", [32, 64, 96, 128])
def test_gradients_where_asked(D):
    q, k, v = on_gpu(2, 4, 2, 301, 433, D)
    cap = softcap(20.0)
    asked = {"FLOAT32_PRECISION": "bf16x6"}
    # Peaked weights are not among them: with FMA, too, their gradients are 1.05 of the budget.
    assert_gradients(q, k, v, kernel_options=asked)
    assert_gradients(q, k, v, mask_mod=causal, block=128, kernel_options=asked)
    assert_gradients(q, k, v, make=lambda: cap, kernel_options=asked)
