"""Lists by key come when they are read, and are torch's own."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask as torch_block_mask,
    flex_attention,
)
from torch.utils import _pytree as pytree

import flexattn
from flexattn.block_mask import lists as lists_module
from flexattn.catalogue import causal, head_windows, sliding_window
from flexattn.mods.bind import clear

MAKERS = flexattn.create_block_mask, torch_block_mask
BY_KEY = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


@pytest.fixture
def built(monkeypatch):
    """A list that grows with each pair of lists that is built."""
    seen = []
    plain = lists_module.transposed
    monkeypatch.setattr(lists_module, "transposed", lambda *a: seen.append(1) or plain(*a))
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
    assert type(pickle.loads(pickle.dumps(ours))) is BlockMask
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        ours.nothing_of_that_name  # noqa: B018


@pytest.fixture
def registered(monkeypatch):
    """torch's BlockMask as a node of pytrees, as programs register it, whenever they do."""
    made = pytree.NodeDef(
        BlockMask, BlockMask._flatten, BlockMask._unflatten, BlockMask._flatten_with_keys
    )
    monkeypatch.setitem(pytree.SUPPORTED_NODES, BlockMask, made)


def test_what_knows_torchs_mask_knows_ours(registered):
    """Ours was a subclass, one opaque leaf to pytree: tree_map moved nothing, in silence."""
    ours, theirs = masks()
    assert type(ours) is BlockMask and len(pytree.tree_leaves(ours)) == 8
    moved = pytree.tree_map(lambda x: x.to("meta"), {"mask": ours})["mask"]
    assert moved.kv_indices.is_meta and moved.q_indices.is_meta
    leaves, spec = pytree.tree_flatten(ours)
    assert_equal(pytree.tree_unflatten(leaves, spec), theirs)
    keys = [pytree.keystr(key) for key, _ in pytree.tree_flatten_with_path(ours)[0]]
    assert keys == [pytree.keystr(key) for key, _ in pytree.tree_flatten_with_path(theirs)[0]]


def test_a_program_with_a_mask_for_its_input_is_exported(registered):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return flexattn.flex_attention(q, k, v, block_mask=mask)

    q, k, v = torch.randn(3, 1, 2, 48, 16).unbind()
    mask = flexattn.create_block_mask(causal, None, None, 48, 48, "cpu", 16)
    program = torch.export.export(Layer(), (q, k, v, mask), strict=True).module()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(program(q, k, v, mask), wanted)


def test_parts_of_a_pipeline_have_the_masks_of_their_batches():
    split = pytest.importorskip("torch.distributed.pipelining.microbatch")._split_block_mask
    ours, theirs = (make(causal, 4, None, 48, 48, "cpu", 16) for make in MAKERS)
    for mine, other in zip(split(ours, 2), split(theirs, 2), strict=True):
        assert type(mine) is BlockMask and torch.equal(mine.q_indices, other.q_indices)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "mode",
    [lambda: torch.device("meta"), torch.inference_mode, default_dtype],
    ids=["device", "inference", "dtype"],
)
def test_modes_of_a_program_have_no_part_in_a_mask(mode):
    """Some of its tensors were made on the default device, whatever `device` said."""
    ids, table = torch.arange(300) // 20, torch.linspace(-1, 1, 300)
    mods = {
        "causal": causal,
        "documents": lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
        "table": lambda b, h, q_idx, kv_idx: table[q_idx] * 0.3 > table[kv_idx],
    }
    for mod in mods.values():
        wanted = torch_block_mask(mod, None, None, 300, 300, "cpu", 16)
        picture = str(flexattn.visualize(mod, 64, 64))
        clear()
        with mode():
            got = flexattn.create_block_mask(mod, None, None, 300, 300, "cpu", 16)
            assert not got.q_indices.is_inference()
            assert str(flexattn.visualize(mod, 64, 64)) == picture
        wanted.mask_mod = mod
        assert_equal(got, wanted)


def test_a_fake_mode_makes_a_fake_mask():
    """It decides for torch's function, and so for ours."""
    with FakeTensorMode():
        ours, theirs = (make(causal, 1, 2, 300, 500, "cpu", 64) for make in MAKERS)
    assert ours.shape == theirs.shape and type(ours.kv_indices) is FakeTensor
    assert ours.kv_indices.shape == theirs.kv_indices.shape
    real, _ = masks()
    with FakeTensorMode():
        assert type(real.q_indices) is torch.Tensor
