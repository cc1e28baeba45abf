"""Lists by key come when they are read, and are torch's own."""

import copy
import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask as torch_block_mask,
    flex_attention,
)

import flexattn
from flexattn.block_mask import lazy as lazy_mask
from flexattn.catalogue import causal, head_windows, sliding_window

BY_KEY = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


@pytest.fixture
def built(monkeypatch):
    """A list that grows with each pair of lists that is built."""
    seen = []
    plain = lazy_mask.transposed
    monkeypatch.setattr(lazy_mask, "transposed", lambda *a: seen.append(1) or plain(*a))
    return seen


def masks(mask_mod=causal, L=300, S=500, **more):
    ours = flexattn.create_block_mask(mask_mod, 1, 2, L, S, "cpu", 64, **more)
    return ours, torch_block_mask(mask_mod, 1, 2, L, S, "cpu", 64, **more)


def assert_equal(ours, theirs):
    for name in BlockMask.__annotations__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        same = torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
        assert same, name


@pytest.mark.parametrize("name", BY_KEY)
def test_they_are_built_on_first_use_and_once(name, built):
    ours, theirs = masks()
    assert isinstance(ours, BlockMask) and not built
    assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert_equal(ours, theirs)
    assert len(built) == 2


def test_attention_of_ours_needs_none(built):
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 500, 16)
    with torch.no_grad():
        flexattn.flex_attention(q, k, k, block_mask=masks()[0])
    assert not built


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torchs_attention_takes_it():
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 500, 16)
    ours, theirs = masks(sliding_window(70))
    assert torch.equal(
        flex_attention(q, k, k, block_mask=ours), flex_attention(q, k, k, block_mask=theirs)
    )


def test_a_compiler_sees_torchs_own_way():
    ours, theirs = masks(head_windows(torch.tensor([5, 100])))

    @torch.compile(backend="eager", fullgraph=True)
    def total(mask):
        return mask.q_indices.sum() + mask.q_num_blocks.sum()

    assert total(ours) == theirs.q_indices.sum() + theirs.q_num_blocks.sum()


@pytest.mark.parametrize("separate", [True, False])
def test_torchs_methods(separate):
    ours, theirs = masks(separate_full_blocks=separate)
    assert repr(ours) == repr(theirs) and str(ours) == str(theirs)
    assert ours.sparsity() == theirs.sparsity() and ours.numel() == theirs.numel()
    for change in (
        lambda mask: mask[:, 1:],
        lambda mask: mask._adjust(200, 400),
        lambda mask: mask.to("cpu"),
        copy.copy,
        copy.deepcopy,
    ):
        mine, other = change(ours), change(theirs)
        other.mask_mod = mine.mask_mod = causal
        assert_equal(mine, other)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert ours.as_tuple()[:2] == (300, 500)


def test_lists_that_are_set_stay():
    ours, theirs = masks()
    other = torch.zeros_like(theirs.q_indices)
    ours.q_indices = other
    assert ours.q_indices is other
    assert torch.equal(ours.full_q_indices, theirs.full_q_indices)
    assert ours.q_indices is other and torch.equal(ours.q_num_blocks, theirs.q_num_blocks)


def test_a_copy_from_a_pickle():
    ours, theirs = masks()
    assert_equal(pickle.loads(pickle.dumps(ours)), theirs)
