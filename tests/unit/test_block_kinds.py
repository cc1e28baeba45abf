"""Blocks decided by interval are what evaluating every lane says, and few are evaluated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, or_masks

from flexattn import block_kinds as module
from flexattn.block_kinds import EMPTY, FULL, PARTIAL, block_kinds
from flexattn.catalogue import causal, document, sliding_window
from flexattn.mods import bind

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


@settings(max_examples=150, deadline=None)
@given(
    MASKS, st.sampled_from([(1, 1, 37, 53), (2, 2, 19, 40)]), st.sampled_from([(8, 8), (5, 16)])
)
def test_intervals_never_contradict_the_lanes(mask, sizes, block):
    def mask_mod(b, h, q_idx, kv_idx):
        return mask(b, h, q_idx, kv_idx)

    found = block_kinds(bind(mask_mod, "mask"), sizes, block, CPU)
    assert torch.equal(found, every_lane(mask_mod, sizes, block))


@pytest.mark.parametrize(
    ("mask_mod", "most"),
    [
        (causal, 64),
        (sliding_window(1024), 3 * 64),
        (or_masks(and_masks(causal, sliding_window(300)), lambda b, h, q, k: k < 128), 4 * 64),
    ],
    ids=["causal", "window", "sinks"],
)
def test_few_blocks_are_evaluated(mask_mod, most, monkeypatch):
    """8192 x 8192: 4096 blocks, of which those on an edge alone need their lanes."""
    seen = []
    exact = module.evaluate

    def counted(mod, env, *more):
        seen.append(env["q_idx"].shape[0])
        return exact(mod, env, *more)

    monkeypatch.setattr(module, "evaluate", counted)
    kinds = block_kinds(bind(mask_mod, "mask"), (1, 1, 8192, 8192), (128, 128), CPU)
    assert sum(seen) <= most
    assert {int(kind) for kind in kinds.unique()} <= {EMPTY, PARTIAL, FULL}


def test_what_memory_says_is_evaluated():
    ids = torch.arange(96) // 17
    mask_mod = and_masks(document(ids), causal)
    found = block_kinds(bind(mask_mod, "mask"), (1, 1, 96, 96), (16, 16), CPU)
    assert torch.equal(found, every_lane(mask_mod, (1, 1, 96, 96), (16, 16)))
