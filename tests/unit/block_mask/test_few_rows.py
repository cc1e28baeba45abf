"""The mask of few rows lists the blocks that create_block_mask lists."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.block_mask.create import create_block_mask
from flexattn.block_mask.few_rows import few_rows
from flexattn.catalogue import causal, sliding_window
from flexattn.problem.mask_class import known_class

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
    # By key: each listed block has the one block of rows.
    assert torch.equal(mask.q_num_blocks.expand(3, 1, -1), wanted.to_dense()[:, :, 0])
    assert not mask.q_indices.any() and not mask.pending
    assert mask.kv_indices.sort(-1).values.flatten(0, 2).eq(torch.arange(-(-keys // 128))).all()
