"""The class of a mask: coarse, found once, kept with the mask, and never by a second look."""

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import (
    BlockMask,
    _create_empty_block_mask,
    create_block_mask as torch_block_mask,
)

import flexattn
from flexattn import create_block_mask
from flexattn.catalogue.masks import causal, sliding_window
from flexattn.problem import mask_lists as module
from flexattn.problem.mask_lists import (
    UNKNOWN,
    keeps_all,
    known_class,
    look_at_lists,
    mask_class,
    representative,
)
from tests.support import inputs


def named(mask_mod, q_len, kv_len=None, **sizes):
    sizes = {"B": None, "H": None, **sizes}
    return mask_class(create_block_mask(mask_mod, **sizes, Q_LEN=q_len, KV_LEN=kv_len or q_len))


def everything(b, h, q_idx, kv_idx):
    return kv_idx >= 0


def nothing(b, h, q_idx, kv_idx):
    return kv_idx < 0


def sink_and_window(b, h, q_idx, kv_idx):
    return (kv_idx < 4) | ((q_idx >= kv_idx) & (q_idx - kv_idx < 256))


def padding(lengths):
    lengths = torch.tensor(lengths)
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: named(causal, 4096), "d1/2 i2 runs"),
        (lambda: named(causal, 8192), "d1/2 i2 runs"),
        (lambda: named(causal, 8191), "d1/2 i2 runs"),
        (lambda: named(everything, 512), "d1 i1 runs"),
        (lambda: named(nothing, 512), "empty"),
        (lambda: named(sliding_window(512), 8192), "d1/16 i1 runs"),
        (lambda: named(sliding_window(512), 4096), "d1/8 i1 runs"),
        (lambda: named(sink_and_window, 4096), "d1/8 i1 gaps"),
        (lambda: named(padding([8192, 8192, 700, 300]), 1, 8192, B=4), "d1/2 i2 runs"),
        (lambda: named(padding([8192, 8192, 900, 200]), 1, 8192, B=4), "d1/2 i2 runs"),
        (lambda: named(padding([8192] * 4), 1, 8192, B=4), "d1 i1 runs"),
        (lambda: named(padding([100] * 15 + [8192]), 1, 8192, B=16), "d1/16 i16 runs"),
    ],
)
def test_classes_of_masks(found, expected):
    assert found() == expected


@pytest.mark.parametrize("separate", [True, False])
def test_full_blocks_count_wherever_they_are_listed(separate):
    mask = create_block_mask(causal, None, None, 2048, 2048, separate_full_blocks=separate)
    assert mask_class(mask) == mask_class(torch_block_mask(causal, None, None, 2048, 2048, "cpu"))


def test_order_and_padding_of_the_lists_do_not_matter():
    num = torch.tensor([[[2, 1]]])
    one, other = torch.tensor([[[[0, 1, 7, 7], [3, 0, 0, 0]]]]), torch.tensor([[[[1, 0], [3, 9]]]])
    assert (
        look_at_lists((num, one, None, None), 4)[0]
        == look_at_lists((num, other, None, None), 4)[0]
    )


def test_found_once_and_kept_with_the_mask(monkeypatch):
    looks = []
    plain = module.look_at_lists
    monkeypatch.setattr(module, "look_at_lists", lambda *args: looks.append(1) or plain(*args))
    mask = create_block_mask(causal, None, None, 1024, 1024)
    assert known_class(mask) is None and not looks
    first = mask_class(mask)
    mask.kv_num_blocks.zero_()  # contents may change from call to call
    assert [mask_class(mask) for _ in range(3)] == [first] * 3
    assert known_class(mask) == first and looks == [1]
    mask_class(create_block_mask(causal, None, None, 1024, 1024))
    assert looks == [1, 1]


def test_one_read_back_for_a_mask_and_none_afterwards(monkeypatch):
    """Whatever waits for a device goes through one of these."""
    waits = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda *args, plain=plain, name=name, **kw: waits.append(name) or plain(*args, **kw),
        )
    mask = create_block_mask(causal, None, None, 1024, 1024, device="cpu")
    waits.clear()
    mask_class(mask)
    assert waits == ["tolist"]
    for _ in range(5):
        mask_class(mask)
    assert waits == ["tolist"]


class Captured(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_unknown_while_a_graph_is_captured_and_known_later(monkeypatch):
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    mask = create_block_mask(causal, None, None, 1024, 1024)
    mask.kv_num_blocks = mask.kv_num_blocks.as_subclass(Captured)
    assert mask_class(mask) == UNKNOWN and known_class(mask) is None
    capturing[0] = False
    mask.kv_num_blocks = mask.kv_num_blocks.as_subclass(torch.Tensor)
    known = mask_class(mask)
    assert known == "d1/2 i2 runs"
    capturing[0] = True
    assert mask_class(mask) == known


def test_unknown_without_data():
    with FakeTensorMode():
        lists = (torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2).int())
        fake = BlockMask.from_kv_blocks(*lists)
    assert mask_class(fake) == UNKNOWN
    meta = create_block_mask(causal, None, None, 256, 256).to("meta")
    assert mask_class(meta) == UNKNOWN


def test_a_kept_class_hinders_nothing_else():
    mask = create_block_mask(everything, 2, None, 512, 512)
    mask_class(mask)
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    assert torch.utils._pytree.tree_unflatten(leaves, spec).shape == mask.shape
    assert known_class(mask.to("cpu")) in (None, mask_class(mask))
    assert pickle.loads(pickle.dumps(mask.kv_indices)).equal(mask.kv_indices)


@pytest.mark.parametrize("lengths", [(1, 1), (5, 300), (37, 2)], ids=str)
def test_torchs_mask_of_everything_is_no_mask_on_the_cpu(lengths):
    """It is made for lengths of 1 and fits all, as torch has it: ours refused other lengths."""
    q, k, v = inputs(2, 2, 2, *lengths)
    mask = _create_empty_block_mask(q, k)
    got = flexattn.flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(got, flexattn.flex_attention(q, k, v))
    got, wanted = (
        flexattn.flex_attention(q.requires_grad_(), k, v, block_mask=each).sum()
        for each in (mask, None)
    )
    assert torch.equal(*(torch.autograd.grad(each, q)[0] for each in (got, wanted)))


def test_what_is_not_that_mask():
    q, k, _ = inputs()
    for name, value in (
        ("mask_mod", causal),
        ("BLOCK_SIZE", (2**30, 128)),
        ("kv_num_blocks", torch.zeros(1, 1, 1, dtype=torch.int32)),
        ("kv_indices", torch.ones(1, 1, 1, 1, dtype=torch.int32)),
        ("full_kv_num_blocks", torch.ones(1, 1, 1, dtype=torch.int32)),
    ):
        mask = _create_empty_block_mask(q, k)
        assert keeps_all(mask)
        setattr(mask, name, value)
        assert not keeps_all(mask), name
    with FakeTensorMode():
        assert not keeps_all(_create_empty_block_mask(torch.ones(1), torch.ones(1)))


CLASSES = [
    "d1 i1 runs", "d1/2 i1 runs", "d1/2 i2 runs", "d1/2 i2 gaps", "d1/4 i1 gaps", "d1/4 i4 runs",
    "d1/8 i2 runs", "d1/8 i8 gaps", "d1/16 i1 runs", "d1/16 i16 runs", "empty",
]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("blocks", [64, 100])
def test_a_representative_is_of_its_class(name, blocks):
    dense = representative(name, blocks, blocks)
    counts = dense.sum(-1)
    indices = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True)
    assert look_at_lists((counts, indices, None, None), blocks)[0] == name


def test_of_an_unknown_class_causal_is_the_representative():
    assert representative(UNKNOWN, 64, 64).equal(representative("d1/2 i2 runs", 64, 64))
    assert representative("d1/4 i2 runs", 1, 1).shape == (1, 1)
    assert representative("d1/64 i16 gaps", 3, 2).any(-1).all()
