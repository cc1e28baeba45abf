"""Keys too far behind to count: left out where that is proven, and nothing else changes."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import BlockMask, and_masks

import flexattn
from flexattn.catalogue import (
    causal,
    causal_offset,
    document,
    padding,
    prefix_lm,
    sliding_window,
)
from flexattn.device import detect
from flexattn.errors import BuildError
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.decay_skip.source import ALL_KEYS
from flexattn.mods import bind
from flexattn.problem import Layout, Shape, make_problem
from flexattn.problem.inputs import Descales
from flexattn.problem.mask_lists import mask_class
from flexattn.runtime.build import builder
from flexattn.runtime.decay_skip import decay_window
from flexattn.settings import override
from tests.covering import each_choice
from tests.support import (
    DTYPES,
    LAYOUTS,
    PREFILL,
    assert_accurate,
    block_mask,
    inputs,
    random_runs,
    run,
)

pytestmark = pytest.mark.usefixtures("short_calls_too")
SMALL = {**PREFILL, "BLOCK_M": 16, "BLOCK_N": 16}
SLOPES = (8.0, 2.0, -1.0, 0.0)


@pytest.fixture
def short_calls_too(monkeypatch):
    """The lengths of tests are those where two kernels more do not pay."""
    for name in ("LEAST_KEYS", "LEAST_ROWS", "LEAST_SCORES"):
        monkeypatch.setattr(f"flexattn.runtime.decay_skip.{name}", 0)
    launch_cache.clear()
    yield
    launch_cache.clear()


def alibi(*slopes):
    slopes = torch.tensor(slopes or SLOPES)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def both(q, k, v, **call):
    """A call with the rule and without it, which must be the same bits; the first of them."""
    found = run(q, k, v, kernel_options=SMALL, **call)
    whole = run(q, k, v, kernel_options={**SMALL, "RULES_OFF": "decay_skip"}, **call)
    for name, one, other in zip(found._fields, found, whole, strict=True):
        same = torch.equal(one.nan_to_num(77.0), other.nan_to_num(77.0))
        assert same, f"{name} differs by {(one - other).abs().max()}"
    return found


def reads(far, q, k, v, **call):
    """Which rows of each head of the first batch have read the values of the first `far` keys."""
    v = v.clone()
    v[:, :, :far] = math.nan
    return run(q, k, v, kernel_options=SMALL, **call).out[0].isnan().any(-1)


MASKS = {
    "none": None,
    "causal": causal,
    "ahead": causal_offset(29),
    "behind": causal_offset(-21),
    "window": sliding_window(43),
    "prefix": prefix_lm(torch.tensor([70])),
    "padding": padding(torch.tensor([61])),
    "documents": and_masks(document(torch.arange(140) // 57), causal),
    "parity": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx + kv_idx) % 2 == 0),
}


@each_choice(name=MASKS, lengths=[(69, 97), (97, 69)])
def test_the_same_bits_as_without_the_rule(name, lengths):
    q, k, v = inputs(1, 4, 2, *lengths, dtype=torch.bfloat16)
    both(q, k, v, score_mod=alibi(), block_mask=block_mask(MASKS[name], q, k, 32))


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("mask", "dtype"), [*(("none", dtype) for dtype in DTYPES), ("causal", "fp32")]
)
def test_far_values_are_not_read(mask, dtype):
    """NaN in K would be a norm that proves nothing; in V nobody looks, and it stays there."""
    q, k, v = inputs(1, 4, 2, 69, 97, dtype=DTYPES[dtype])
    call = {"score_mod": alibi(), "block_mask": block_mask(MASKS[mask], q, k, 32)}
    found = both(q, k, v, **call)
    assert found.out.isfinite().all()
    # Rows 48 and on keep a key from 47 on, some 16 keys before which steep heads look at none.
    first = 48 if mask == "causal" else 0
    rows = reads(16, q, k, v, **call)[:, first:]
    assert not rows[0].any() and not (mask == "none" and rows[1].any()) and rows[2:].all()
    if dtype != "fp32":
        assert_accurate(q, k, v, kernel_options=SMALL, **call)


def test_the_keys_of_each_head_are_as_long_as_they_are():
    q, k, v = inputs(1, 4, 2, 69, 97)
    k[:, 1, :16] *= 60
    both(q, k, v, score_mod=alibi(2.0, 2.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("value", "where"),
    [(math.nan, "q"), (math.nan, "k"), (math.inf, "k"), (-math.inf, "both"), (3e38, "q")],
)
def test_what_is_no_number_in_q_or_k_is_where_it_was(value, where):
    q, k, v = inputs(1, 4, 2, 43, 97)
    if where != "k":
        q[0, 0, 5, 3] = value
    if where != "q":
        k[0, 0, 2, 3] = value
    for mask in (None, causal_offset(54)):
        both(q, k, v, score_mod=alibi(), block_mask=block_mask(mask, q, k, 32))


@pytest.mark.parametrize("slope", [math.nan, math.inf, 1e30, -2.0, 0.0])
def test_slopes_that_prove_nothing(slope):
    q, k, v = inputs(1, 4, 2, 43, 97)
    for mask in (None, causal_offset(54)):
        call = {"score_mod": alibi(*[slope] * 4), "block_mask": block_mask(mask, q, k, 32)}
        both(q, k, v, **call)
        if not math.isinf(slope) and slope < 1:
            assert reads(16, q, k, v, **call)[0][-16:].all()


@pytest.mark.parametrize("mask_mod", [causal, MASKS["parity"], None], ids=["upto", "rest", "all"])
def test_blocks_listed_against_what_the_mask_says(mask_mod):
    """A key counts as kept where its block is listed, too: no row's weights are left out."""
    draw = torch.Generator().manual_seed(11)
    q, k, v = inputs(2, 4, 2, 64, 128)
    for _ in range(2):
        mask = random_runs(mask_mod, 4, 64, 128, draw)
        both(q, k, v, score_mod=alibi(8.0, 4.0, 2.0, 1.0), block_mask=mask)


def test_a_block_that_is_not_listed_is_no_anchor():
    """The mask keeps key 63 for row 63, but its blocks end at 16: those keys are all there is."""
    q, k, v = inputs(1, 4, 2, 64, 64)
    one = torch.ones(1, 1, 4, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        one, torch.zeros(1, 1, 4, 4, dtype=torch.int32),
        BLOCK_SIZE=(16, 16), mask_mod=causal, seq_lengths=(64, 64),
    )  # fmt: skip
    mask_class(mask)
    found = both(q, k, v, score_mod=alibi(), block_mask=mask)
    assert found.lse.isfinite().all() and found.out[0, 0, 63].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    q, k, v = (LAYOUTS[layout](x) for x in inputs(2, 4, 2, 43, 97, 24))
    both(q, k, v, score_mod=alibi(), block_mask=block_mask(causal_offset(54), q, k, 32))


@pytest.mark.parametrize("D", [40, 96])
def test_keys_of_one_batch_and_sinks(D):
    q, k, v = inputs(2, 4, 2, 43, 97, D, Bkv=1, dtype=torch.float16)
    call = {"score_mod": alibi(), "block_mask": block_mask(causal_offset(54), q, k, 32)}
    both(q, k, v, sinks=torch.tensor([3.0, -3.0, 0.0, 90.0]), **call)
    assert not reads(16, q, k, v, **call)[0][:32].any()


def test_slopes_that_change_between_calls():
    q, k, v = inputs(1, 4, 2, 43, 97)
    slopes = torch.tensor(SLOPES)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * 0.5 + slopes[h] * kv_idx

    assert not reads(16, q, k, v, score_mod=score_mod)[0].any()
    slopes[0] = 0.001
    assert reads(16, q, k, v, score_mod=score_mod)[0].all()
    both(q, k, v, score_mod=score_mod, scale=-0.7)


def test_a_short_call_has_the_same_kernel_and_visits_all_keys(monkeypatch):
    q, k, v = inputs(1, 4, 2, 43, 97)
    mod = alibi()
    call = {"score_mod": mod, "kernel_options": SMALL, "enable_gqa": True}
    path = flexattn.explain(q, k, v, **call).source
    monkeypatch.setattr("flexattn.runtime.decay_skip.LEAST_KEYS", 98)
    launch_cache.clear()
    assert flexattn.explain(q, k, v, **call).source == path
    assert reads(16, q, k, v, score_mod=mod)[0].all()


def test_where_its_kernels_do_not_build_all_keys_are_visited(monkeypatch, caplog):
    """The call ended in BuildError, though its own kernel serves without them."""
    q, k, v = inputs(1, 4, 2, 43, 97)
    wanted = both(q, k, v, score_mod=alibi())

    def refused(*args):
        raise BuildError("a check refused it")

    launch_cache.clear()
    double = SimpleNamespace(kernel=refused, sources=builder().sources)
    monkeypatch.setattr("flexattn.runtime.decay_skip.builder", lambda: double)
    with override(strict=False):
        found = both(q, k, v, score_mod=alibi())
    assert torch.equal(found.out, wanted.out) and "far keys are not left out" in caplog.text


@pytest.mark.parametrize("offset", [0.0, 3e8, -1e30, math.nan])
def test_slopes_that_what_is_added_to_them_rounds_away(offset):
    """As far from 0 as that float32 has no number between the scores of a key and the next."""
    q, k, v = inputs(1, 4, 2, 43, 97)
    biases = torch.tensor([offset, 0.0, 0.0, 0.0])

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (4.0 * (kv_idx - q_idx) + biases[h])

    both(q, k, v, score_mod=score_mod)
    rows = reads(16, q, k, v, score_mod=score_mod)
    assert rows[0].all().item() is not (offset == 0) and not rows[1].any()


def test_a_factor_of_the_scores_counts_and_the_scale_too():
    q, k, v = inputs(1, 4, 2, 43, 197)
    near = alibi()
    far = lambda s, b, h, q_idx, kv_idx: near(s * 64.0, b, h, q_idx, kv_idx)  # noqa: E731
    assert not reads(128, q, k, v, score_mod=near)[0].any()
    assert reads(128, q, k, v, score_mod=far)[0].all()
    assert reads(128, q, k, v, score_mod=near, scale=-16.0)[0].all()


def window_of(q, k, slopes, scale, factors=None):
    """What the two kernels find, [B, Hq]. factors: of the heads of q and k, of eight bits."""
    B, Hq, q_len, D = q.shape
    score = bind(alibi(*slopes), "score")
    shape = Shape(B, Hq, k.shape[1], q_len, k.shape[2], D, D)
    layout = Layout(True, True, True, False)
    dtype = "float32" if factors is None else "float8_e4m3fn"
    problem = make_problem("prefill", dtype, shape, score, None, None, layout)
    values = {"Q": q, "K": k, "sm_scale": scale, "DECAY_WINDOW": None}
    fixed = {}
    if factors is not None:
        fixed = factors.strides()
        values |= {"Q_DESCALE": factors.q, "K_DESCALE": factors.k}
    values |= captured_values(problem.structure.score, score)
    found = decay_window(problem, q, k, list(values), detect(q.device), -1, fixed)
    memory = values["DECAY_WINDOW"] = found.scratch[0].empty(-1)
    for kernel in found.kernels:
        kernel.launch(-1, list(values.values()))
    return memory[: B * Hq].view(B, Hq)


def test_the_decay_window_of_each_head_by_hand():
    q, k, _ = inputs(3, 4, 2, 133, 257, Bkv=1)
    slopes = torch.tensor(SLOPES)
    found = window_of(q, k, SLOPES, 0.25)
    largest = q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1).repeat_interleave(2, 1)
    wanted = (2.02 * 0.25 * largest * math.log2(math.e) + 150) / (slopes * math.log2(math.e))
    assert ((found - wanted)[:, :2].abs() <= 1.001).all()
    assert (found[:, 2:] == ALL_KEYS).all()


def test_factors_of_eight_bits_count():
    q, k, _ = (x.to(torch.float8_e4m3fn) for x in inputs(3, 4, 2, 133, 257, Bkv=1))
    factors = Descales(torch.rand(3, 4) + 0.5, torch.rand(1, 2) + 0.5, None)
    wide = q.float() * factors.q[..., None, None], k.float() * factors.k[..., None, None]
    found = window_of(q, k, SLOPES, 0.25, factors)
    wanted = window_of(*wide, SLOPES, 0.25)
    assert ((found - wanted).abs() <= 1).all() and (found[:, 0] < 200).all()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**16),
    st.lists(st.floats(0.01, 40.0), min_size=2, max_size=2), st.floats(-3, 3),
    st.floats(0.0, 6.0), st.booleans(),
)  # fmt: skip
def test_no_key_that_is_left_out_weighs_anything(L, S, seed, slopes, scale, spread, aligned):
    """Against float64: before the decay window of a kept key, weights are below 2^-140."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, n, 16, generator=draw) * 2.0**spread for n in (L, S))
    if aligned:  # the worst that the bound allows: scores that are as large as norms let them be
        k = q[:, :, :1].expand(-1, -1, S, -1) * torch.randn(S, 1, generator=draw)
    window = window_of(q, k, slopes, scale).double()
    steps = torch.tensor(slopes).double()[:, None, None]
    scores = q.double() @ k.double().mT * scale + steps * torch.arange(S)
    # Any key may be the one that a row keeps, and then the largest there is.
    for kept in {S - 1, S // 2}:
        shown = scores[..., : kept + 1]
        exponents = (shown - shown[..., kept:]) / math.log(2)
        far = torch.arange(kept + 1) < kept - window[..., None, None]
        assert not (far & (exponents > -140)).any()
