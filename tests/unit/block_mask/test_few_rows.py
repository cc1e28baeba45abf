"""The mask of few rows lists the blocks that create_block_mask lists."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import and_masks

from flexattn.block_mask.create import create_block_mask
from flexattn.block_mask.lists import few_rows, lists_pending, positions
from flexattn.catalogue import causal, sliding_window
from flexattn.problem.mask_lists import known_class

CPU = torch.device("cpu")


def at(offset):
    return lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + offset, kv_idx)


def window(offset):
    return lambda b, h, q_idx, kv_idx: sliding_window(70)(b, h, q_idx + offset, kv_idx)


PADDING = torch.ones(3, 700, dtype=torch.bool)
PADDING[1, :300], PADDING[2] = False, False
MASKS = {
    "causal": at(400),
    "window": window(torch.tensor(400)),
    "padding": and_masks(at(650), lambda b, h, q_idx, kv_idx: PADDING[b, kv_idx]),
    "no key": lambda b, h, q_idx, kv_idx: kv_idx < 0,
    "of rows alone": lambda b, h, q_idx, kv_idx: q_idx >= 0,
}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("keys", [1, 256, 700])
@pytest.mark.parametrize("name", MASKS)
def test_the_blocks_are_those_of_create_block_mask(name, keys, rows):
    mask_mod = MASKS[name]
    mask = few_rows(mask_mod, 3, rows, keys, CPU)
    wanted = create_block_mask(mask_mod, 3, None, rows, keys, CPU)
    assert torch.equal(mask.to_dense().expand(3, -1, -1, -1), wanted.to_dense())
    assert mask.full_kv_num_blocks is None and known_class(mask) is not None
    listed = mask.kv_num_blocks.expand(3, 1, 1)
    assert torch.equal(listed, wanted.kv_num_blocks + wanted.full_kv_num_blocks)
    # By key: each listed block has the one block of rows, which no step of decoding asks for.
    assert lists_pending(mask)
    assert torch.equal(mask.q_num_blocks.expand(3, 1, -1), wanted.to_dense()[:, :, 0])
    assert not mask.q_indices.any()
    assert mask.kv_indices.sort(-1).values.flatten(0, 2).eq(torch.arange(-(-keys // 128))).all()


def test_a_step_of_a_cache_whose_size_stays_makes_no_positions_anew():
    with torch.inference_mode():
        made = positions(3, 1, 700, CPU)
    assert all(one is other for one, other in zip(made, positions(3, 1, 700, CPU), strict=True))
    assert not any(each.is_inference() for each in made)
    assert [tuple(each.shape) for each in made] == [(3, 1, 1), (), (1, 1, 1), (768,)]
    assert made[3].max() == 699 and torch.equal(made[3][:700], torch.arange(700))
    assert positions(3, 1, 699, CPU)[3].max() == 698


def test_positions_of_a_trace_are_not_given_to_others():
    with FakeTensorMode():
        assert type(positions(3, 1, 500, CPU)[3]) is not torch.Tensor
    assert type(positions(3, 1, 500, CPU)[3]) is torch.Tensor
