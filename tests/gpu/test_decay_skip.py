"""Keys too far to count on a GPU: the same bits as with all of them, and fewer of them read."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import flexattn
from flexattn.catalogue import alibi, alibi_slopes, causal, causal_offset, document, sliding_window
from flexattn.frontend.launch_cache import launch_cache
from flexattn.runtime.build import builder
from tests.gradients import assert_gradients, cotangents
from tests.support import (
    ON_SM_90,
    PREFILL,
    assert_accurate,
    block_mask,
    captured,
    run,
    tensors,
)

GLUON = pytest.param(
    {"BACKEND": "GLUON"},
    id="gluon",
    marks=ON_SM_90,
)
pytestmark = pytest.mark.usefixtures("poisoned")
each_backend = pytest.mark.parametrize("options", [pytest.param(PREFILL, id="triton"), GLUON])

MASKS = {
    "none": lambda: None,
    "causal": lambda: causal,
    "offset": lambda: causal_offset(77),
    "behind": lambda: causal_offset(-1500),
    "window": lambda: sliding_window(2047),
    "documents": lambda: and_masks(document(torch.arange(2**14, device="cuda") // 3001), causal),
}


@pytest.fixture
def both(monkeypatch):
    """A call that leaves keys out and one by the same kernel that does not: the same bits."""

    def compared(q, k, v, options, max_scores=False, **call):
        def once():
            with torch.no_grad():
                return run(q, k, v, kernel_options=options, max_scores=max_scores, **call)

        found = once()
        with monkeypatch.context() as here:
            here.setattr("flexattn.runtime.decay_skip.LEAST_KEYS", 2**40)
            launch_cache.clear()
            compiled = builder().compiled
            assert_same(found, once())
            assert builder().compiled == compiled
        launch_cache.clear()
        return found

    return compared


def assert_same(found, whole):
    for name, one, other in zip(found._fields, found, whole, strict=True):
        if one is not None:
            same = torch.equal(one.nan_to_num(77.0), other.nan_to_num(77.0))
            assert same, f"{name}: {(one != other).sum()} differ, by {(one - other).abs().max()}"


@each_backend
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_same_bits_as_without_the_rule(mask, options):
    q, k, v = tensors(1, 16, 16, 4096, 4096, 128)
    blocks = block_mask(MASKS[mask](), q, k, per_batch=False, per_head=False)
    mod = alibi(16, "cuda")
    with torch.no_grad():
        assert_same(*(
            run(
                q, k, v, score_mod=mod, block_mask=blocks, max_scores=False,
                kernel_options={**options, "RULES_OFF": rules_off},
            )
            for rules_off in ("", "decay_skip")
        ))  # fmt: skip


@each_backend
@pytest.mark.parametrize("lengths", [(4096, 4096), (4001, 4093), (1023, 8191)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_the_same_bits_for_every_mask(mask, lengths, options, both):
    q, k, v = tensors(1, 16, 16, *lengths, 128)
    blocks = block_mask(MASKS[mask](), q, k, per_batch=False, per_head=False)
    both(q, k, v, options, score_mod=alibi(16, "cuda"), block_mask=blocks)


@each_backend
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_same_bits_for_every_head_dimension(mask, D, options, both):
    q, k, v = tensors(1, 16, 4, 4001, 4093, D, dtype=torch.float16)
    # The Gluon template takes 192 beside values of 128, as DeepSeek has them.
    v = v[..., :128].contiguous() if D == 192 else v
    blocks = block_mask(MASKS[mask](), q, k, per_batch=False, per_head=False)
    both(q, k, v, options, max_scores=True, score_mod=alibi(16, "cuda"), block_mask=blocks)


@each_backend
def test_far_values_are_not_read(options):
    """Head 0's weights halve with every key: who keeps a key 2048 on looks at none of these."""
    q, k, v = tensors(1, 16, 16, 4001, 4093, 128)
    v[:, :, :1024] = math.nan
    for mask in (None, causal_offset(92)):
        blocks = block_mask(mask, q, k, per_batch=False, per_head=False)
        call = {"score_mod": alibi(16, "cuda"), "block_mask": blocks, "kernel_options": options}
        out = run(q, k, v, max_scores=False, **call).out[0]
        assert out[0, 3072:].isfinite().all() and out[15, 3072:].isnan().all()


@each_backend
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_against_the_oracle(mask, options):
    q, k, v = tensors(2, 8, 2, 1999, 4093, 64, Bkv=1)
    mod, blocks = alibi(8, "cuda"), block_mask(MASKS[mask](), q, k)
    assert_accurate(
        q, k, v, score_mod=mod, block_mask=blocks, kernel_options=options, max_scores=False
    )


@each_backend
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_what_is_no_number_is_where_it_was(value, options, both):
    q, k, v = tensors(1, 16, 16, 2001, 4093, 128)
    q[0, 0, 5, 3] = k[0, 1, 2, 3] = value
    for mask in (None, causal_offset(2092)):
        blocks = block_mask(mask, q, k, per_batch=False, per_head=False)
        both(q, k, v, options, score_mod=alibi(16, "cuda"), block_mask=blocks)


@each_backend
def test_a_graph_replays_with_slopes_and_inputs_that_change_in_place(options):
    q, k, v = tensors(1, 16, 16, 4001, 4093, 128)
    slopes = alibi_slopes(16, "cuda")

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    blocks = block_mask(causal, q, k, per_batch=False, per_head=False)
    call = {
        "score_mod": score_mod, "block_mask": blocks, "kernel_options": options,
        "max_scores": False,
    }  # fmt: skip
    with torch.no_grad():
        graph, got = captured(lambda: run(q, k, v, **call))
    for x in (q, k, v):
        x.copy_(2 * torch.randn_like(x))
    slopes.copy_(slopes.flip(0) / 4)
    graph.replay()
    torch.cuda.synchronize()
    wanted = run(q, k, v, **call)
    assert torch.equal(got.out, wanted.out) and torch.equal(got.lse, wanted.lse)


@each_backend
def test_short_and_long_calls_share_a_kernel(options):
    mod = alibi(16, "cuda")
    q, k, v = tensors(1, 16, 16, 4001, 4093, 128)
    run(q, k, v, score_mod=mod, kernel_options=options, max_scores=False)
    before = builder().compiled
    for lengths in ((4095, 4097), (2000, 8192), (2000, 1000)):
        q, k, v = tensors(1, 16, 16, *lengths, 128)
        run(q, k, v, score_mod=mod, kernel_options=options, max_scores=False)
    assert builder().compiled == before


each_backward = pytest.mark.parametrize(
    "options", [pytest.param({"BACKEND": "TRITON"}, id="triton"), GLUON]
)


def gradients_of(q, k, v, dout, mask, slopes, options):
    """Those of q, k and v; slopes: of the bias."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flexattn.flex_attention(*given, score_mod, mask, enable_gqa=True, kernel_options=options)
    return torch.autograd.grad(out, given, dout)


@each_backward
@pytest.mark.parametrize(
    "sizes", [(4096, 4096, 128), (4001, 4093, 64), (1023, 8191, 128)], ids=str
)
@pytest.mark.parametrize("heads", [(16, 16), (16, 4)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_the_same_bits_in_order(mask, heads, sizes, options):
    """A tile of dQ waits for those that add to it alone, and is added to in their order."""
    L, S, D = sizes
    q, k, v = tensors(2, *heads, L, S, D, Bkv=1 if heads[1] < 16 else 2)
    dout, _ = cotangents(q, v, False)
    blocks = block_mask(MASKS[mask](), q, k, per_batch=False, per_head=False)
    slopes = alibi_slopes(16, "cuda")
    found, whole = (
        gradients_of(
            q, k, v, dout, blocks, slopes, {**options, "DETERMINISTIC": True, "RULES_OFF": off}
        )
        for off in ("", "decay_skip")
    )
    for ours, wanted in zip(found, whole, strict=True):
        assert ours.isfinite().all() and torch.equal(ours, wanted)


@each_backward
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_do_not_read_far_tiles(D, options):
    """Head 0's weights halve with every key: rows from 2048 on have none of the first keys."""
    q, k, v = tensors(1, 16, 16, 4096, 4096, D)
    dout, _ = cotangents(q, v, False)
    dout[:, :, 2048:] = math.nan
    blocks = block_mask(causal, q, k, per_batch=False, per_head=False)
    falling = alibi_slopes(16, "cuda")
    for slopes in (falling, torch.full_like(falling, math.nan), -falling):
        dq, dk, dv = gradients_of(q, k, v, dout, blocks, slopes, options)
        proven = bool(slopes[0] > 0)
        assert dv[0, 0, :1024].isfinite().all().item() is proven
        assert dk[0, 0, :1024].isfinite().all().item() is proven
        assert dv[0, 15, :1024].isnan().all() and dq[0, :, 2048:].isnan().all()


@pytest.fixture
def short_calls_too(monkeypatch):
    for name in ("LEAST_KEYS", "LEAST_ROWS", "LEAST_SCORES"):
        monkeypatch.setattr(f"flexattn.runtime.decay_skip.{name}", 0)
    monkeypatch.setattr("flexattn.runtime.decay_skip.LEAST_BACKWARD_KEYS", 0)
    launch_cache.clear()
    yield
    launch_cache.clear()


@each_backward
@pytest.mark.usefixtures("short_calls_too")
@pytest.mark.parametrize("lengths", [(1024, 1024), (777, 1111)], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_gradients_against_the_oracle(mask, heads, lengths, options):
    q, k, v = tensors(2, *heads, *lengths, 128)
    mask_mod = {"none": None, "causal": causal, "window": sliding_window(400)}[mask]
    assert_gradients(
        q, k, v, mask_mod=mask_mod, block=128, make=lambda: alibi(8, "cuda"),
        kernel_options=options,
    )  # fmt: skip


@pytest.mark.usefixtures("short_calls_too")
def test_gradients_of_slopes_that_are_learned():
    def learned(slopes):
        return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)

    q, k, v = tensors(2, 8, 8, 1024, 1024, 64)
    slopes = (alibi_slopes(8, "cuda"),)
    assert_gradients(q, k, v, mask_mod=causal, block=128, make=learned, tensors=slopes)


@each_backward
def test_a_graph_replays_gradients_with_slopes_that_change_in_place(options):
    q, k, v = tensors(1, 16, 16, 4096, 4096, 128)
    dout, _ = cotangents(q, v, False)
    blocks = block_mask(causal, q, k, per_batch=False, per_head=False)
    slopes = alibi_slopes(16, "cuda")
    call = (q, k, v, dout, blocks, slopes, {**options, "DETERMINISTIC": True})
    graph, found = captured(lambda: gradients_of(*call))
    slopes.copy_(slopes.flip(0) / 4)
    graph.replay()
    torch.cuda.synchronize()
    for ours, wanted in zip(found, gradients_of(*call), strict=True):
        assert torch.equal(ours, wanted)
