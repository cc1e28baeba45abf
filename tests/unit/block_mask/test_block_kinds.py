"""Blocks decided by interval are what evaluating every lane says, and few are evaluated."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import and_masks, or_masks

from flexattn.block_mask import classify as module
from flexattn.block_mask.classify import EMPTY, FULL, PARTIAL, block_kinds
from flexattn.catalogue import (
    block_table,
    causal,
    document,
    document_offsets,
    natten_2d,
    prefix_lm,
    sliding_window,
)
from flexattn.mods import bind
from tests.cases import checkerboard

CPU = torch.device("cpu")


def every_lane(mask_mod, sizes, block):
    """The definition: EMPTY without a lane, FULL with all lanes of a whole block."""
    B, H, q_len, kv_len = sizes
    rows, cols = -(-q_len // block[0]), -(-kv_len // block[1])
    kept = torch.zeros(B, H, rows * block[0], cols * block[1], dtype=torch.bool)
    q, k = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    for b in range(B):
        for h in range(H):
            kept[b, h, :q_len, :kv_len] = mask_mod(torch.tensor(b), torch.tensor(h), q, k)
    tiles = kept.view(B, H, rows, block[0], cols, block[1])
    return tiles.any(5).any(3).to(torch.int8) + tiles.all(5).all(3).to(torch.int8)


NUMBERS = st.recursive(
    st.sampled_from([
        lambda b, h, q, k: q,
        lambda b, h, q, k: k,
        lambda b, h, q, k: q - k,
        lambda b, h, q, k: h + q,
        lambda b, h, q, k: b * 3 + k,
    ]),
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(1, 9)).map(lambda t: lambda *a: t[0](*a) // t[1]),
        st.tuples(inner, st.integers(1, 9)).map(lambda t: lambda *a: t[0](*a) % t[1]),
        st.tuples(inner, st.integers(-4, 4)).map(lambda t: lambda *a: t[0](*a) * t[1]),
        st.tuples(inner, st.integers(0, 20)).map(lambda t: lambda *a: t[0](*a).clamp(3, 3 + t[1])),
        inner.map(lambda f: lambda *a: f(*a).abs()),
        inner.map(lambda f: lambda *a: -f(*a)),
        st.tuples(inner, inner).map(lambda t: lambda *a: t[0](*a) + t[1](*a)),
        st.tuples(inner, inner).map(lambda t: lambda *a: torch.where(t[0](*a) > 4, t[1](*a), 7)),
    ),
    max_leaves=4,
)  # fmt: skip
COMPARISONS = st.sampled_from([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
MASKS = st.recursive(
    st.tuples(COMPARISONS, NUMBERS, st.integers(-3, 30)).map(
        lambda t: lambda *a: t[0](t[1](*a), t[2])
    ),
    lambda inner: st.one_of(
        inner.map(lambda f: lambda *a: ~f(*a)),
        st.tuples(inner, inner).map(lambda t: lambda *a: t[0](*a) & t[1](*a)),
        st.tuples(inner, inner).map(lambda t: lambda *a: t[0](*a) | t[1](*a)),
    ),
    max_leaves=3,
)


@settings(max_examples=60, deadline=None)
@given(
    MASKS, st.sampled_from([(1, 1, 37, 53), (2, 2, 19, 40)]), st.sampled_from([(8, 8), (5, 16)])
)
def test_intervals_never_contradict_the_lanes(mask, sizes, block):
    def mask_mod(b, h, q_idx, kv_idx):
        return mask(b, h, q_idx, kv_idx)

    found = block_kinds(bind(mask_mod, "mask"), sizes, block, CPU)
    assert torch.equal(found, every_lane(mask_mod, sizes, block))


@pytest.fixture
def evaluated(monkeypatch):
    """The numbers of blocks whose elements, or some of them, were evaluated."""
    seen = []
    exact = module.evaluate

    def counted(mod, env, *more):
        seen.append(env["q_idx"].shape[0])
        return exact(mod, env, *more)

    monkeypatch.setattr(module, "evaluate", counted)
    return seen


@pytest.mark.parametrize(
    ("mask_mod", "most"),
    [
        (causal, 64),
        (sliding_window(1024), 3 * 64),
        (or_masks(and_masks(causal, sliding_window(300)), lambda b, h, q, k: k < 128), 4 * 64),
        (document(torch.arange(8192) // 700), 11 * 24),
        (document_offsets(torch.arange(8192) // 700, torch.arange(13) * 700), 11 * 24),
        (prefix_lm(torch.tensor([3000])), 64),
        (natten_2d(64, 128, 7), 8 * 64),
        (checkerboard(128), 0),
        (block_table(torch.rand(1, 1, 64, 64) < 0.5, 128), 0),
    ],
    ids=[
        "causal", "window", "sinks", "documents", "offsets", "prefix", "natten", "cells", "table",
    ],
)  # fmt: skip
def test_few_blocks_are_looked_into(mask_mod, most, evaluated):
    """8192 x 8192: 4096 blocks, of which those on an edge alone need some of their elements."""
    kinds = block_kinds(bind(mask_mod, "mask"), (1, 1, 8192, 8192), (128, 128), CPU)
    assert sum(evaluated) <= most
    assert {int(kind) for kind in kinds.unique()} <= {EMPTY, PARTIAL, FULL}


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: q / 2 >= k,
        lambda b, h, q, k: (q * 0.25).to(torch.int32) + 10 >= k,
        lambda b, h, q, k: torch.sqrt(q * 192.0) + torch.tensor([0.5])[h] > k,
        lambda b, h, q, k: q // (k + 1) > 2,
    ],
    ids=["slope", "cast", "root", "divisor"],
)
def test_floats_and_divisors_that_move_are_asked_element_by_element(mask_mod, evaluated):
    sizes, block = (1, 1, 192, 185), (16, 16)
    found = block_kinds(bind(mask_mod, "mask"), sizes, block, CPU)
    assert torch.equal(found, every_lane(mask_mod, sizes, block))
    assert evaluated[0] == 12 * 12


@pytest.mark.parametrize("lengths", [(9001, 9500), (20, 70001)], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (16, 16)], ids=str)
def test_squares_of_blocks_change_nothing(lengths, block, monkeypatch):
    """Where there are many blocks, squares of them are decided first."""
    ids = torch.arange(70001) * 7 // 5000 % 5
    mask_mod = or_masks(and_masks(causal, document(ids)), lambda b, h, q, k: k % 640 > 600)
    many = block_kinds(bind(mask_mod, "mask"), (1, 1, *lengths), block, CPU)
    monkeypatch.setattr(module, "_FEW", 2**40)
    assert torch.equal(many, block_kinds(bind(mask_mod, "mask"), (1, 1, *lengths), block, CPU))


def test_heads_that_a_mask_does_not_name_are_worked_out_once(evaluated):
    kinds = block_kinds(bind(causal, "mask"), (2, 8, 512, 512), (128, 128), CPU)
    assert sum(evaluated) <= 4 and kinds.shape == (2, 8, 4, 4) and kinds.is_contiguous()


def test_what_memory_holds_is_asked_anew_in_each_call():
    lengths = torch.tensor([100])
    padding = bind(lambda b, h, q, k: k < lengths[b], "mask")
    before = block_kinds(padding, (1, 1, 128, 512), (128, 128), CPU)
    lengths.fill_(256)
    after = block_kinds(padding, (1, 1, 128, 512), (128, 128), CPU)
    assert before.flatten().tolist() == [PARTIAL, EMPTY, EMPTY, EMPTY]
    assert after.flatten().tolist() == [FULL, FULL, EMPTY, EMPTY]


def test_documents_in_order():
    ids = torch.arange(96) // 17
    mask_mod = and_masks(document(ids), causal)
    found = block_kinds(bind(mask_mod, "mask"), (1, 1, 96, 96), (16, 16), CPU)
    assert torch.equal(found, every_lane(mask_mod, (1, 1, 96, 96), (16, 16)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64])
def test_tables_of_any_integer(dtype):
    kept = (torch.arange(96) % 31 > 9).to(dtype)

    def mask_mod(b, h, q_idx, kv_idx):
        return kept[kv_idx].to(torch.int64) + kept[q_idx].to(torch.int64) > 0

    found = block_kinds(bind(mask_mod, "mask"), (1, 1, 96, 96), (8, 8), CPU)
    assert torch.equal(found, every_lane(mask_mod, (1, 1, 96, 96), (8, 8)))
