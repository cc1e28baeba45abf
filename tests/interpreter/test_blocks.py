"""Sparse block sizes against tile sizes, empty rows, splits, and forced configs, interpreted."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, document, padding, sliding_window
from flexattn.errors import ConfigError
from tests.cases import case
from tests.covering import each_choice, pairwise
from tests.support import DECODE, KINDS, PREFILL, assert_accurate, block_mask, call_of, inputs

each_kind = pytest.mark.parametrize("kind", KINDS)


def nothing(b, h, q_idx, kv_idx):
    return q_idx < 0


@pairwise(
    block=[(128, 64), (64, 128), (256, 256), (48, 80), (17, 31), (1, 16), (512, 512)],
    length=[384, 127],
    kind=KINDS,
)
def test_block_sizes(block, length, kind):
    """A sparse block of 256 over a length of 384 made others read past the end of K and V, and
    (128, 64) failed with some of their default configs. Blocks that no tile divides work too."""
    q, k, v = inputs(1, 2, 1, 65 if length == 127 else 129, length, dtype=torch.float16)
    if block == (1, 16):
        q = q[:, :, :9].contiguous()
    mask = block_mask(sliding_window(100), q, k, block, False, False)
    assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])


@each_kind
def test_keys_past_the_end_are_never_read(kind):
    """What lies behind K and V in memory may be NaN, and a block that reaches there is partial."""
    q, k, v = inputs(1, 2, 1, 33, 97)
    padded = [torch.full((1, 1, 256, 16), float("nan")) for _ in (k, v)]
    for wide, x in zip(padded, (k, v), strict=True):
        wide[:, :, :97] = x
    k, v = (x[:, :, :97] for x in padded)
    mask = block_mask(causal, q, k, 64)
    assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])
    assert_accurate(q, k, v, kernel_options=KINDS[kind])


@each_kind
def test_more_packed_rows_than_a_sparse_block_has(kind):
    """q_len times the group above the sparse block made others refuse or read a wrong row."""
    q, k, v = inputs(1, 16, 2, 21, 45)
    mask = block_mask(sliding_window(13), q, k, (16, 32))
    assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])


@each_kind
@pytest.mark.parametrize("block", [16, 32])
def test_rows_with_no_key_give_zeros(block, kind):
    q, k, v = inputs(2, 3, 1, 37, 53, dtype=torch.float16)
    mask = block_mask(nothing, q, k, block)
    got = assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])
    assert not got.out.any() and (got.lse == -torch.inf).all()
    assert (got.max_scores == -torch.inf).all()


@each_kind
def test_a_score_of_minus_infinity_everywhere_gives_zeros(kind):
    q, k, v = inputs()

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx > 20, score, -float("inf"))

    got = assert_accurate(q, k, v, score_mod=score_mod, kernel_options=KINDS[kind])
    assert not got.out[:, :, :21].any() and got.out[:, :, 21:].all()


@pytest.mark.oldest
@each_choice(
    mod=["noop", "padding", "random_blocks_empty_rows", "alibi"], splits=[1, 2, 3, 5, 7, 64]
)
def test_splits_of_the_keys(mod, splits):
    """Counts that do not divide the tiles, more splits than tiles, and splits with no key."""
    given, call = call_of(case(mod), 2, 6, 2, 3, 173, block=32)
    options = {**DECODE, "SPLIT_KV": splits, "BLOCK_N": 16}
    assert_accurate(*given, kernel_options=options, **call)


def test_every_number_of_splits_gives_the_same_answer():
    q, k, v = inputs(1, 4, 1, 1, 301)
    mask = block_mask(padding(torch.tensor([77])), q, k, 64)
    call = {"block_mask": mask, "enable_gqa": True}
    outs = [
        flexattn.flex_attention(q, k, v, kernel_options={**DECODE, "SPLIT_KV": n}, **call)
        for n in (1, 4, 9)
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@pytest.mark.parametrize(("BLOCK_M", "BLOCK_N"), [(16, 16), (64, 16), (16, 64), (128, 32)])
@each_kind
def test_forced_tiles(BLOCK_M, BLOCK_N, kind):
    q, k, v = inputs(1, 4, 2, 45, 101)
    forced = {**KINDS[kind], "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    doc_ids = torch.arange(101) // 23
    mask = block_mask(document(doc_ids), q, k, 128)
    assert_accurate(q, k, v, block_mask=mask, kernel_options=forced)
    found = flexattn.explain(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=forced)
    assert (found.config.BLOCK_M, found.config.BLOCK_N) == (BLOCK_M, BLOCK_N)


def test_a_tile_wider_than_the_block_is_refused():
    q, k, v = inputs()
    mask = block_mask(causal, q, k, 16)
    with pytest.raises(ConfigError, match="wider than the mask's block of 16"):
        flexattn.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, kernel_options={**PREFILL, "BLOCK_N": 64}
        )


def test_a_mask_without_full_blocks():
    q, k, v = inputs()
    mask = flexattn.create_block_mask(causal, 2, 3, 37, 53, "cpu", 16, separate_full_blocks=False)
    assert mask.full_kv_num_blocks is None
    for options in KINDS.values():
        assert_accurate(q, k, v, block_mask=mask, kernel_options=options)


def test_a_mask_that_torch_made():
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = inputs()
    mask = create_block_mask(sliding_window(12), 2, 3, 37, 53, device="cpu", BLOCK_SIZE=16)
    assert_accurate(q, k, v, block_mask=mask)
