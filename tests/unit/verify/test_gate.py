"""The gate passes what is right and fails what is not, however small the difference."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from flexattn.errors import InputError
from flexattn.reference import Precision, attention
from flexattn.verify import gate
from flexattn.verify.gate import judge
from tests.cases import case

B, Hq, L, S, EV = 2, 3, 37, 53, 24
DTYPE = torch.bfloat16


def runs(dtype=DTYPE, name="random_blocks_empty_rows"):
    """A working run as a kernel would give it, the oracle's and the reference run's."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(s, generator=draw).to(dtype)
        for s in ((B, Hq, L, 16), (B, 1, S, 16), (B, 1, S, EV))
    )
    mask = create_block_mask(
        case(name).make(B, Hq, 1, L, S).mask_mod, B, Hq, L, S, device="cpu", BLOCK_SIZE=16
    )
    order = (Precision.WORKING, Precision.ORACLE, Precision.ROUNDED)
    return [attention(q, k, v, block_mask=mask, precision=p) for p in order]


def replaced(run, **tensors):
    return run._replace(
        **{name: change(getattr(run, name).clone()) for name, change in tensors.items()}
    )


def at(*index, value):
    def change(x):
        x[index] = value
        return x

    return change


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["causal", "random_blocks_empty_rows"])
def test_a_correct_run_passes(dtype, name):
    verdict = judge(*runs(dtype, name), dtype)
    assert verdict.passed, verdict.message()
    assert [r.name for r in verdict.rows] == [
        f"{t} {kind}" for t in ("out", "lse", "max_scores") for kind in ("max", "rms")
    ]
    assert verdict.message().startswith("passed") and not verdict.worst


def test_the_reference_run_itself_passes():
    got, oracle, rounded = runs()
    assert judge(rounded, oracle, rounded, DTYPE).passed
    assert got.out.dtype == rounded.out.dtype


@pytest.mark.parametrize("name", ["out", "lse", "max_scores"])
def test_the_edge_of_the_budget(name):
    got, oracle, rounded = runs(torch.float32)
    oracle = oracle._replace(**{name: getattr(oracle, name).float().double()})
    place = (1, 2, 36, 5)[: getattr(got, name).dim()]
    fair = judge(got, oracle, rounded, torch.float32)
    budget = next(r.budget for r in fair.rows if r.name == f"{name} max")
    centre = float(getattr(oracle, name)[place])
    for factor, passes in ((0.9, True), (1.1, False)):
        moved = replaced(got, **{name: at(*place, value=centre + factor * budget)})
        verdict = judge(moved, oracle, rounded, torch.float32)
        row = next(r for r in verdict.rows if r.name == f"{name} max")
        assert row.passed is passes, verdict.message()
    assert verdict.worst[0].index == place and not verdict.passed


def test_a_small_error_everywhere_fails_by_rms():
    got, oracle, rounded = runs(torch.float32)
    rms = next(
        r.budget for r in judge(got, oracle, rounded, torch.float32).rows if "rms" in r.name
    )
    kept = (oracle.lse != -math.inf)[..., None]
    noisy = got._replace(out=torch.where(kept, oracle.out + 1.2 * rms, 0.0).float())
    verdict = judge(noisy, oracle, rounded, torch.float32)
    assert not next(r for r in verdict.rows if r.name == "out rms").passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["out", "lse", "max_scores"])
def test_values_that_are_not_finite_fail(name, value):
    got, oracle, rounded = runs()
    bad = replaced(got, **{name: at(1, 0, 3, value=value)})
    verdict = judge(bad, oracle, rounded, DTYPE)
    assert not verdict.passed and verdict.worst[0].index[:3] == (1, 0, 3)
    assert ("NaN" in verdict.message()) or not math.isnan(value)


def test_fully_masked_rows_are_exact():
    got, oracle, rounded = runs()
    row = tuple((oracle.lse == -math.inf).nonzero()[0].tolist())
    tiny = replaced(got, out=at(*row, 7, value=1e-30))
    assert "fully masked" in judge(tiny, oracle, rounded, DTYPE).message()
    finite = replaced(got, lse=at(*row, value=-1e30))
    assert not judge(finite, oracle, rounded, DTYPE).passed


def test_poison_that_nobody_overwrote_fails():
    got, oracle, rounded = runs()
    poisoned = torch.full_like(got.out, torch.nan)
    poisoned[:, :, :-1] = got.out[:, :, :-1]
    verdict = judge((poisoned, None, None), oracle, rounded, DTYPE)
    assert verdict.faults == (f"out has NaN where the oracle has none: {B * Hq * EV}",)
    assert len(verdict.worst) == 8


def test_shapes_and_dtypes():
    got, oracle, rounded = runs()
    wide = got._replace(out=got.out.float())
    assert (
        "dtype torch.float32, not torch.bfloat16" in judge(wide, oracle, rounded, DTYPE).message()
    )
    low = got._replace(lse=got.lse.half())
    assert not judge(low, oracle, rounded, DTYPE).passed
    short = got._replace(out=got.out[:, :, 1:])
    assert "shape (2, 3, 36, 24)" in judge(short, oracle, rounded, DTYPE).faults[0]


def test_what_cannot_be_judged_is_no_pass():
    got, oracle, rounded = runs()
    with pytest.raises(InputError, match="no tensor"):
        judge((None, None, None), oracle, rounded, DTYPE)
    with pytest.raises(InputError, match="lse"):
        judge(got, (oracle.out, None, None), rounded, DTYPE)
    assert judge((got.out, None, None), (oracle.out, None, None), rounded, DTYPE).passed


def test_empty_tensors_pass():
    empty = (torch.zeros(2, 3, 0, 8), torch.zeros(2, 3, 0), torch.zeros(2, 3, 0))
    assert judge(empty, empty, empty, torch.float32).passed


def test_chunks_change_nothing(monkeypatch):
    got, oracle, rounded = runs()
    bad = replaced(got, out=at(1, 1, 30, 3, value=9.0), lse=at(0, 2, 2, value=math.nan))
    whole = judge(bad, oracle, rounded, DTYPE)
    monkeypatch.setattr(gate, "_CHUNK", 61)
    split = judge(bad, oracle, rounded, DTYPE)
    assert split.faults == whole.faults
    assert [s.index for s in split.worst] == [s.index for s in whole.worst]
    for a, b in zip(split.rows, whole.rows, strict=True):
        assert (a.error, a.budget) == pytest.approx((b.error, b.budget), rel=1e-12)


def test_the_message_shows_both_values():
    got, oracle, rounded = runs()
    bad = replaced(got, out=at(1, 1, 3, 7, value=9.0))
    text = judge(bad, oracle, rounded, DTYPE).message()
    assert "FAILED" in text and "over budget" in text
    assert f"out[1, 1, 3, 7]  got 9  oracle {float(oracle.out[1, 1, 3, 7]):.9g}" in text
    assert text.count("  oracle ") == 8


@settings(max_examples=40, deadline=None)
@given(power=st.integers(-30, 30), noise=st.floats(0.0, 0.1), seed=st.integers(0, 99))
def test_a_power_of_two_scales_every_row(power, noise, seed):
    draw = torch.Generator().manual_seed(seed)
    oracle = torch.randn(3, 7, 5, generator=draw, dtype=torch.float64)
    rounded = oracle.to(DTYPE)
    got = (oracle + noise * torch.randn(3, 7, 5, generator=draw)).to(DTYPE)
    factor = 2.0**power
    plain = judge((got, None, None), (oracle, None, None), (rounded, None, None), DTYPE)
    scaled = judge(
        (got * factor, None, None),
        (oracle * factor, None, None),
        (rounded * factor, None, None),
        DTYPE,
    )
    assert plain.passed == scaled.passed
    for a, b in zip(plain.rows, scaled.rows, strict=True):
        assert (a.error * factor, a.budget * factor) == pytest.approx(
            (b.error, b.budget), rel=1e-12
        )
