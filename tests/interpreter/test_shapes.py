"""Head counts, head dimensions, lengths and strides through the real templates, interpreted."""

import pytest
import torch

import flexattn
from flexattn.catalogue import alibi, causal, head_windows, sliding_window, softcap
from flexattn.errors import UnsupportedError
from tests.covering import pairwise
from tests.support import (
    DTYPES,
    KINDS,
    LAYOUTS,
    assert_accurate,
    block_mask,
    heads_inside,
    inputs,
    spaced,
)

each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("group", [1, 3, 5, 8])
def test_any_number_of_query_heads_per_key_head(group, kind):
    """torch's decode kernel takes powers of two alone."""
    q, k, v = inputs(2, 2 * group, 2, 19, 45)
    mask = block_mask(causal, q, k, 16)
    score_mod = alibi(2 * group, "cpu")
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=KINDS[kind])


@pytest.mark.oldest
@each_kind
@pytest.mark.parametrize(
    ("D", "Dv"),
    [(16, 16), (24, 24), (80, 80), (96, 96), (112, 112), (192, 128), (64, 40), (576, 512)],
    ids=lambda n: str(n),
)
def test_head_dimensions(D, Dv, kind):
    q, k, v = inputs(1, 2, 1, 5, 37, D, Dv, dtype=torch.float16)
    assert_accurate(q, k, v, score_mod=softcap(30.0), kernel_options=KINDS[kind])


@pytest.mark.parametrize("D", [1, 7, 17])
def test_head_dimensions_below_a_tile(D):
    q, k, v = inputs(1, 2, 1, 5, 37, D)
    assert_accurate(q, k, v)


@pairwise(S=[0, 1, 127, 130], L=[0, 1, 63, 130], kind=KINDS)
def test_lengths(S, L, kind):
    q, k, v = inputs(1, 2, 1, L, S)
    got = assert_accurate(q, k, v, score_mod=softcap(50.0), kernel_options=KINDS[kind])
    assert got.out.shape == (1, 2, L, 16) and got.lse.shape == (1, 2, L)


@each_kind
@pytest.mark.parametrize(("L", "S"), [(1, 63), (63, 1), (63, 127), (127, 63)])
def test_lengths_with_a_mask(L, S, kind):
    q, k, v = inputs(1, 2, 1, L, S)
    mask = block_mask(causal, q, k, 32)
    assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, kind):
    q, k, v = (LAYOUTS[layout](x) for x in inputs(2, 4, 2, 21, 45, 24))
    got = assert_accurate(q, k, v, score_mod=softcap(50.0), kernel_options=KINDS[kind])
    assert got.out.stride(-1) == 1


def test_the_copy_engine_is_asked_for_strides_that_it_cannot_read():
    """It was an error, where torch takes USE_TMA for a hint."""
    q, k, v = (spaced(x) for x in inputs(1, 2, 1, 21, 45, 16))
    assert_accurate(q, k, v, kernel_options=KINDS["prefill"] | {"USE_TMA": True})


def test_one_tensor_strided_and_the_others_not():
    q, k, v = inputs(2, 4, 2, 21, 45, 24)
    for tensors in ((spaced(q), k, v), (q, spaced(k), v), (q, k, spaced(v))):
        assert_accurate(*tensors)


@each_kind
def test_the_output_lies_as_the_query_does(kind):
    q, k, v = (heads_inside(x) for x in inputs(2, 4, 2, 21, 45, 24))
    got = assert_accurate(q, k, v, kernel_options=KINDS[kind])
    assert got.out.transpose(1, 2).is_contiguous()


@each_kind
def test_expanded_keys_are_not_copied_in_meaning(kind):
    """Keys shared by batches through a stride of 0 and keys of batch 1 are one thing."""
    q, k, v = inputs(3, 4, 2, 9, 45, 16, Bkv=1)
    one = assert_accurate(q, k, v, kernel_options=KINDS[kind])
    k, v = (x.expand(3, -1, -1, -1) for x in (k, v))
    assert torch.equal(assert_accurate(q, k, v, kernel_options=KINDS[kind]).out, one.out)


def test_keys_of_batch_one_against_many_queries():
    """Others sized their grid or their strides by the keys' batch and failed on large ones."""
    q, k, v = inputs(301, 1, 1, 3, 17, 16, Bkv=1)
    assert_accurate(q, k, v)


@each_kind
@pytest.mark.parametrize("per_batch", [True, False], ids=["per_batch", "any_batch"])
@pytest.mark.parametrize("per_head", [True, False], ids=["per_head", "any_head"])
def test_masks_per_head_and_per_batch(per_head, per_batch, kind):
    """A mask of each query head within one group, also in decode, which torch's does not take."""
    windows = head_windows(torch.tensor([0, 3, 9, 30, 5, 50]))
    ends = torch.tensor([11, 45])

    def mask_mod(b, h, q_idx, kv_idx):
        keep = windows(b, h, q_idx, kv_idx) if per_head else q_idx >= kv_idx
        return keep & (kv_idx < ends[b]) if per_batch else keep

    q, k, v = inputs(2, 6, 2, 33, 45)
    mask = block_mask(mask_mod, q, k, 16, per_batch, per_head)
    assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_and_scalar_scales(dtype):
    for scale in (0.5, 0.0, -0.25):
        q, k, v = inputs(1, 2, 1, 19, 45, dtype=DTYPES[dtype])
        mask = block_mask(sliding_window(9), q, k, 16)
        assert_accurate(q, k, v, scale=scale, block_mask=mask)
        assert_accurate(q, k, v, scale=scale, score_mod=softcap(5.0))


def test_a_captured_table_of_vmap_is_refused():
    """A kernel reads it as it lies in memory; q, k and v of torch.vmap were refused already."""
    q, k, v = inputs(1, 2, 1, 5, 7)

    def attend(bias):
        mod = lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx]  # noqa: E731
        return flexattn.flex_attention(q, k, v, mod, enable_gqa=True)

    with pytest.raises(UnsupportedError, match="vmap"):
        torch.vmap(attend)(torch.randn(3, 7))
