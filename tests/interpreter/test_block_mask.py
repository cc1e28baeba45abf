"""The kernel that classifies blocks, interpreted: it says what the CPU path says."""

import pytest
import torch

from flexattn.block_mask.classify import BlockClassifier, block_kinds
from flexattn.catalogue import causal, document, natten_2d, sliding_window
from flexattn.mods import bind
from tests.cases import CASES, case

CPU = torch.device("cpu")
MASKS = [c.name for c in CASES if c.make(1, 2, 1, 37, 53).mask_mod is not None]


def by_kernel(mask_mod, sizes, block, first_row=0):
    """Kinds [rows, kv blocks] from a row on, as the kernel writes them."""
    B, H, L, S = sizes
    rows = B * H * -(-L // block[0]) - first_row
    kinds = torch.full((rows, -(-S // block[1])), 77, dtype=torch.int8)
    BlockClassifier(bind(mask_mod, "mask"), sizes, block, CPU).run(kinds, first_row)
    return kinds


def by_torch(mask_mod, sizes, block):
    found = block_kinds(bind(mask_mod, "mask"), sizes, block, CPU)
    return found.view(-1, found.shape[-1])


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name):
    sizes, block = (2, 2, 37, 53), (16, 32)
    mask_mod = case(name).make(2, 2, 1, 37, 53).mask_mod
    assert torch.equal(by_kernel(mask_mod, sizes, block), by_torch(mask_mod, sizes, block))


@pytest.mark.parametrize("kept", [True, False])
def test_a_captured_bool_is_the_mask(kept):
    keep = torch.tensor(kept)
    sizes, block = (1, 2, 37, 53), (16, 32)
    found = by_kernel(lambda *positions: keep, sizes, block)
    assert torch.equal(found, by_torch(lambda *positions: keep, sizes, block))
    assert found.any() == kept


@pytest.mark.parametrize("block", [(32, 64), (37, 17), (128, 32)], ids=str)
@pytest.mark.parametrize(
    "mask_mod",
    [causal, sliding_window(30), natten_2d(9, 11, 5), document(torch.arange(99) * 7 // 50 % 4)],
    ids=["causal", "window", "natten", "unsorted documents"],
)
def test_blocks_of_any_size(mask_mod, block):
    sizes = (1, 1, 97, 99)
    assert torch.equal(by_kernel(mask_mod, sizes, block), by_torch(mask_mod, sizes, block))


def test_more_blocks_than_a_program_takes_and_rows_from_the_middle():
    sizes, block = (1, 2, 64, 300), (16, 1)
    want = by_torch(sliding_window(20), sizes, block)
    assert torch.equal(by_kernel(sliding_window(20), sizes, block, first_row=3), want[3:])


def test_captured_numbers_that_are_arguments():
    sizes, block = (1, 1, 130, 260), (32, 32)
    for window, flag in ((7, True), (50, True), (90, False)):

        def mask_mod(b, h, q_idx, kv_idx, window=window, flag=flag):
            near = (q_idx - kv_idx).abs() <= window
            return near & (kv_idx % 64 < 32) if flag else near

        assert torch.equal(by_kernel(mask_mod, sizes, block), by_torch(mask_mod, sizes, block))
        assert by_torch(mask_mod, sizes, block).any()


def test_an_empty_table():
    nothing = torch.zeros(0, dtype=torch.int32)

    def mask_mod(b, h, q_idx, kv_idx):
        return nothing[q_idx] <= kv_idx - 40

    sizes, block = (1, 1, 64, 96), (32, 32)
    found = by_kernel(mask_mod, sizes, block)
    assert torch.equal(found, by_torch(mask_mod, sizes, block)) and found.any()


@pytest.mark.parametrize("fraction", [0.5, 0.25])
def test_floats(fraction):
    limits = torch.tensor([40.0, torch.nan, 1e30])

    def mask_mod(b, h, q_idx, kv_idx):
        near = torch.minimum(q_idx * fraction, limits[h]) + torch.exp2(q_idx / 100.0)
        return (near >= kv_idx) | ((q_idx / 3).to(torch.int32) == kv_idx) | (kv_idx * 0.1 < 1)

    sizes, block = (1, 3, 130, 260), (32, 32)
    assert torch.equal(by_kernel(mask_mod, sizes, block), by_torch(mask_mod, sizes, block))
