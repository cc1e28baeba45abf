"""Block masks on a GPU: what the CPU path says, in little memory, and torch's lists by key."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import flexattn
from flexattn.catalogue import causal, document, natten_2d, prefix_lm, sliding_window
from tests.cases import CASES, case
from tests.support import captured

MASKS = [c.name for c in CASES if c.make(1, 2, 1, 37, 53).mask_mod is not None]
LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]


def assert_equal(ours, theirs):
    for name in LISTS:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None), name
        assert mine is None or torch.equal(mine.cpu(), other.cpu()), name


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (48, 80), (17, 31)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_torchs(name, block):
    B, H, L, S = 2, 3, 777, 1300
    make = case(name).make
    ours = flexattn.create_block_mask(
        make(B, H, 1, L, S, "cuda").mask_mod, B, H, L, S, "cuda", block
    )
    theirs = torch_block_mask(make(B, H, 1, L, S, "cuda").mask_mod, B, H, L, S, "cuda", block)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("separate", [True, False])
def test_more_rows_and_columns_than_one_program_lists(separate):
    window = sliding_window(5000)
    options = {"BLOCK_SIZE": 16, "separate_full_blocks": separate}
    found = [
        flexattn.create_block_mask(window, None, None, 20000, 20000, device, **options)
        for device in ("cuda", "cpu")
    ]
    assert_equal(*found)


def test_slabs_of_rows_change_nothing(monkeypatch):
    from flexattn.block_mask import classify as block_kinds

    mask_mod = case("natten_2d").make(1, 1, 1, 3000, 3000, "cuda").mask_mod
    whole = flexattn.create_block_mask(mask_mod, None, None, 3000, 3000, "cuda")
    monkeypatch.setattr(block_kinds, "_SLAB", 100)
    assert_equal(flexattn.create_block_mask(mask_mod, None, None, 3000, 3000, "cuda"), whole)


def test_an_unsorted_table_of_any_length():
    ids = torch.arange(70001) * 7 // 5000 % 5
    sizes = (None, None, 70001, 70001)
    on_gpu = flexattn.create_block_mask(document(ids.cuda()), *sizes, "cuda")
    assert_equal(on_gpu, flexattn.create_block_mask(document(ids), *sizes, "cpu"))


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda: causal,
        lambda: sliding_window(4096),
        lambda: document((torch.arange(65536) // 1025).cuda()),
        lambda: prefix_lm(torch.tensor([5000], device="cuda")),
        lambda: natten_2d(256, 256, 13),
    ],
    ids=["causal", "window", "documents", "prefix", "natten"],
)
def test_memory_is_that_of_the_blocks(mask_mod):
    mask_mod = mask_mod()
    flexattn.create_block_mask(mask_mod, None, None, 300, 300, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = flexattn.create_block_mask(mask_mod, None, None, 65536, 65536, "cuda")
    held = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before - held < 50e6
    assert mask.kv_indices.shape == (1, 1, 512, 512)


def test_under_capture():
    """No question to the device is asked, and a replay sees what a captured tensor holds then."""
    ids = (torch.arange(2000) // 300).cuda()

    def make():
        return flexattn.create_block_mask(document(ids), None, None, 2000, 2000, "cuda")

    make()
    graph, mask = captured(make)
    ids.copy_((torch.arange(2000) // 77).flip(0))
    graph.replay()
    torch.cuda.synchronize()
    want = flexattn.create_block_mask(document(ids), None, None, 2000, 2000, "cuda")
    assert torch.equal(mask.kv_num_blocks, want.kv_num_blocks)
    assert torch.equal(mask.full_kv_num_blocks, want.full_kv_num_blocks)
