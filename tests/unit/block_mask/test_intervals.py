"""Lists of intervals of keys: those that create_block_mask finds, and their lists by key."""

import pytest
import torch

from flexattn import create_block_mask
from flexattn.block_mask.intervals import LIST_BLOCK, interval_mask
from flexattn.problem.mask_lists import dense_blocks, known_runs, look_at_lists, query_lists
from flexattn.runtime.key_lists import BothLists


def maps(lists, columns):
    num, idx, full_num, full_idx, *_ = lists
    some = dense_blocks(num, idx, columns)
    return some, None if full_num is None else dense_blocks(full_num, full_idx, columns)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
def test_lists_are_those_of_the_blocks(seed, whole):
    draw = torch.Generator().manual_seed(seed)
    rows, keys = (int(x) for x in torch.randint(1, 1200, (2,), generator=draw))
    steps = torch.rand(2, rows, generator=draw) ** 8
    ends = (steps.cumsum(1) / steps.sum(1, keepdim=True) * keys).int()
    first, end = ends.amin(0), ends.amax(0)

    def mask_mod(b, h, q_idx, kv_idx):
        return (first[q_idx] <= kv_idx) & (kv_idx < end[q_idx])

    mask = interval_mask(first, end, keys, mask_mod, whole, by_key=True)
    columns, blocks = -(-keys // LIST_BLOCK), -(-rows // LIST_BLOCK)
    wanted = create_block_mask(mask_mod, None, None, rows, keys, "cpu")
    some, full = maps(query_lists(mask), columns)
    wanted_some, wanted_full = maps(query_lists(wanted), columns)
    if whole:
        assert torch.equal(full, wanted_full)
        assert not (wanted_some & ~some).any() and not (some & full).any()
    else:
        assert full is None and not ((wanted_some | wanted_full) & ~some).any()
    # Each list holds each block once, as lists by key are made of those by query.
    for each in query_lists(mask)[1::2]:
        if each is not None:
            assert torch.equal(each.sort(-1).values, torch.arange(columns).expand_as(each).int())
    both = BothLists.of(mask)
    for there, back in zip(maps(both.by_query, columns), maps(both.by_key, blocks), strict=True):
        assert there is back is None or torch.equal(there, back.mT)
    # What reading the lists finds is what was told.
    for lists, runs, width in (
        (both.by_query[:4], known_runs(mask), columns), (both.by_key[:4], both.by_key.runs, blocks)
    ):  # fmt: skip
        found = look_at_lists(tuple(lists), width)[1]
        listed = lists[0] + (0 if lists[2] is None else lists[2])
        assert torch.equal(found[listed > 0], runs[listed > 0])
        assert (runs[listed == 0][..., 0] == runs[listed == 0][..., 3]).all()
