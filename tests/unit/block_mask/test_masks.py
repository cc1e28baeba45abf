"""create_block_mask makes torch's BlockMask, with torch's contents, on the CPU."""

import re

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask as torch_block_mask,
    or_masks,
)

import flexattn
from flexattn.block_mask import classify as block_kinds
from flexattn.catalogue import causal, sliding_window
from flexattn.errors import InputError, UnsupportedError
from flexattn.settings import say_once
from tests.cases import CASES, case
from tests.support import lists_of

MASKS = [c for c in CASES if c.make(1, 2, 1, 37, 53).mask_mod is not None]
LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]
SHAPES = [(2, 3, 1, 37, 53), (1, 2, 1, 64, 32), (1, 2, 2, 1, 130), (2, 2, 1, 130, 1)]


def assert_same(mask_mod, B, H, L, S, block=16, **more):
    mine = flexattn.create_block_mask(mask_mod, B, H, L, S, "cpu", block, **more)
    theirs = torch_block_mask(mask_mod, B, H, L, S, device="cpu", BLOCK_SIZE=block, **more)
    assert isinstance(mine, BlockMask) and mine.mask_mod is mask_mod
    assert mine.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert mine.seq_lengths == theirs.seq_lengths and mine.shape == theirs.shape
    assert lists_of(mine) == lists_of(theirs)
    for name in LISTS:
        ours, other = getattr(mine, name), getattr(theirs, name)
        assert (ours is None) == (other is None)
        if ours is not None:
            assert ours.dtype == other.dtype and ours.is_contiguous() and torch.equal(ours, other)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entry", MASKS, ids=str)
def test_every_case_is_torchs(entry, shape):
    B, Hq, _, L, S = shape
    assert_same(entry.make(*shape).mask_mod, B, Hq, L, S)


@pytest.mark.parametrize("block", [7, (48, 80), (16, 64), (64, 16), 128, (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["causal", "natten_2d", "head_windows", "document"])
def test_blocks_of_any_size(name, block):
    assert_same(case(name).make(2, 3, 1, 61, 97).mask_mod, 2, 3, 61, 97, block)


@pytest.mark.parametrize(("B", "H"), [(None, None), (2, None), (None, 3), (1, 1)])
def test_batches_and_heads_that_are_not_given(B, H):
    assert_same(sliding_window(9), B, H, 37, 53)


@pytest.mark.parametrize("name", ["causal", "random_blocks", "noop_mask"])
def test_without_separate_full_blocks(name):
    mask_mod = case(name).make(2, 3, 1, 37, 53).mask_mod
    assert_same(mask_mod, 2, 3, 37, 53, separate_full_blocks=False)


def test_combined_masks():
    window = and_masks(causal, sliding_window(9))
    assert_same(window, None, None, 61, 61)
    assert_same(or_masks(window, lambda b, h, q, k: k < 5), None, None, 61, 61)


def test_a_block_that_reaches_past_a_length_is_not_full():
    """Marking it full would let a kernel skip the bounds that the mask stands for."""
    mask = flexattn.create_block_mask(flexattn.noop_mask, None, None, 40, 40, "cpu", 16)
    assert lists_of(mask)["full_kv"][1:] == [[0, 1], [0, 1], []]
    assert lists_of(mask)["kv"][1:] == [[2], [2], [0, 1, 2]]


def test_a_mask_may_divide_by_what_it_captures():
    """Past the last key a table reads as zero, and torch on the CPU raised ZeroDivisionError."""
    steps = torch.full((37,), 3)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx + kv_idx) % steps[kv_idx] < 5

    mine = flexattn.create_block_mask(mask_mod, 1, 1, 37, 37, "cpu", 16)
    theirs = torch_block_mask(mask_mod, 1, 1, 37, 37, device="cpu", BLOCK_SIZE=16)
    assert lists_of(mine) == lists_of(theirs)


def test_lengths_of_zero():
    for L, S in ((0, 53), (37, 0)):
        mask = flexattn.create_block_mask(causal, None, None, L, S, "cpu", 16)
        assert mask.seq_lengths == (L, S) and not mask.kv_num_blocks.any()


@pytest.mark.parametrize("block", [2**12, 2**30, (16, 2**40)])
def test_blocks_far_longer_than_the_lengths(block):
    """Where bounds left a block open all of it was looked at, past the lengths, too."""
    there = torch.ones(37, 53, dtype=torch.bool)
    for mask_mod in (causal, lambda b, h, q, k: there[q, k], lambda b, h, q, k: k < 0):
        mask = flexattn.create_block_mask(mask_mod, None, None, 37, 53, "cpu", block)
        rows = [1] if isinstance(block, int) else [1, 1, 1]
        some = bool(mask_mod(0, 0, torch.tensor(36), torch.tensor(0)))
        assert mask.kv_num_blocks.flatten().tolist() == [some * each for each in rows]
        assert not mask.full_kv_num_blocks.any()


def test_metadata_for_torchs_kernels_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"compute_dq_write_order=True(?s:.*)torch's create"
    ):
        flexattn.create_block_mask(causal, 1, 1, 64, 64, "cpu", compute_dq_write_order=True)


def test_a_gpu_looks_at_no_more_of_a_block_than_it_can_count():
    """A block of 2^30 x 2^30 was 2^48 turns of its loop; one of 2^16 x 2^16 counts to 2^32."""
    assert block_kinds._looked_at((128, 4096), (1, 1, 5, 7)) == (128, 4096)
    assert block_kinds._looked_at((2**30, 2**30), (1, 1, 5, 9000)) == (2**12, 2**14)
    with pytest.raises(InputError, match="in 32 bits"):
        block_kinds._looked_at((2**16, 2**16), (1, 1, 2**16, 2**16))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"mask_mod": None}, "mask_mod is None"), ({"Q_LEN": 2**40}, "Q_LEN is from 0 to"),
     ({"H": 10**30}, "H is from 1 to"), ({"B": -1}, "B is from 0 to")],
)  # fmt: skip
def test_what_no_mask_has_is_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        flexattn.create_block_mask(
            **{"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": 5, "KV_LEN": 5, "device": "cpu"}
            | wrong
        )


def test_slices_of_rows_change_nothing(monkeypatch):
    """Memory is bounded by evaluating some rows of blocks at a time."""
    mask_mod = case("natten_2d").make(1, 2, 1, 97, 61).mask_mod
    whole = flexattn.create_block_mask(mask_mod, 1, 2, 97, 61, "cpu", 16)
    monkeypatch.setattr(block_kinds, "_CHUNK", 1)
    sliced = flexattn.create_block_mask(mask_mod, 1, 2, 97, 61, "cpu", 16)
    assert lists_of(whole) == lists_of(sliced)


def test_the_dense_mask_is_the_mask_mod():
    mask = flexattn.create_block_mask(causal, None, None, 32, 48, "cpu", 16)
    assert torch.equal(mask.to_dense()[0, 0].bool(), torch.ones(2, 3).tril().bool())


def test_torchs_own_names_are_reexported():
    from torch.nn.attention import flex_attention as theirs

    for name in ("AuxOutput", "AuxRequest", "BlockMask", "and_masks", "create_mask", "noop_mask"):
        assert getattr(flexattn, name) is getattr(theirs, name)


def test_a_mask_of_head_0_that_serves_other_heads_is_said_to_be(caplog):
    """torch's eager function asks the mask_mod of each head; kernels walk the lists."""
    q, k, v = (torch.randn(2, 3, 40, 16) for _ in "qkv")

    def said(mask_mod, B, H, q=q, k=k, v=v):
        say_once.cache_clear()
        caplog.clear()
        mask = flexattn.create_block_mask(mask_mod, B, H, 40, 40, "cpu", 16)
        flexattn.flex_attention(q, k, v, block_mask=mask)
        return [record.getMessage() for record in caplog.records if record.name == "flexattn"]

    def by_head(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (h == 1)

    def by_request(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (b == 1)

    (of_heads,) = said(by_head, None, None)
    assert "reads h" in of_heads and "pass H=3 to create_block_mask" in of_heads
    (of_requests,) = said(by_request, None, 3)
    assert "reads b" in of_requests and "pass B=2" in of_requests
    assert said(by_head, None, 3) == said(by_request, 2, None) == said(causal, None, None) == []
    assert said(by_head, None, None, q[:, :1], k[:, :1], v[:, :1]) == []


@pytest.mark.parametrize("more", [{}, {"block": (16, 8), "separate_full_blocks": False}])
def test_an_empty_batch_has_an_empty_mask(more):
    """B=0 was refused, where torch and flex_attention serve it."""
    assert_same(causal, 0, None, 40, 40, **more)
    mask = flexattn.create_block_mask(causal, 0, None, 40, 40, "cpu")
    assert mask.shape == (0, 1, 40, 40) and "sparsity=0.00%" in str(mask)
    q = torch.randn(0, 2, 40, 16)
    assert flexattn.flex_attention(q, q, q, block_mask=mask).shape == q.shape


def test_what_an_error_of_other_lengths_advises_works():
    """It advised torch's _adjust, which raises IndexError where it crops the keys alone."""
    mask = flexattn.create_block_mask(causal, None, None, 256, 256, "cpu", 32)
    q, k = torch.randn(1, 1, 256, 16), torch.randn(1, 1, 130, 16)
    with pytest.raises(InputError, match="create it anew") as raised:
        flexattn.flex_attention(q, k, k, block_mask=mask)
    (advice,) = re.findall(r"create_block_mask\(.*?\)", str(raised.value))
    names = {"block_mask": mask, "B": None, "H": None, "q_len": 256, "kv_len": 130}
    names |= {"query": q, "create_block_mask": flexattn.create_block_mask}
    anew = eval(advice, names)
    assert flexattn.flex_attention(q, k, k, block_mask=anew).shape == q.shape
