"""Every mod of the catalogue on a GPU, and its block mask beside torch's own."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import flexattn
from tests.cases import CASES
from tests.support import DTYPES, KINDS, assert_accurate, call_of, lists_of

pytestmark = pytest.mark.usefixtures("poisoned")

# B, Hq, Hkv, L, S, D
SIZES = {"prefill": (2, 8, 2, 611, 747, 64), "decode": (3, 8, 2, 3, 2047, 64)}
MASKS = [c for c in CASES if c.make(1, 2, 1, 37, 53).mask_mod is not None]
FP32 = ("noop", "causal", "softcap_50", "relative_bias", "random_blocks_empty_rows", "nested")
BOTH = ("noop", "causal", "document", "natten_2d", "tree", "alibi_causal_document", "t5_bias")
# Compiling takes the time: each case has both kinds and both dtypes, and BOTH have all four pairs.
RUNS = [
    *((case, "prefill", "bf16") for case in CASES),
    *((case, "decode", "fp16") for case in CASES),
    *((case, "prefill", "fp16") for case in CASES if case.name in BOTH),
    *((case, "decode", "bf16") for case in CASES if case.name in BOTH),
    *((case, kind, "fp32") for kind in KINDS for case in CASES if case.name in FP32),
]


@pytest.mark.parametrize(
    ("entry", "kind", "dtype"), RUNS, ids=[f"{case}-{kind}-{dtype}" for case, kind, dtype in RUNS]
)
def test_every_case(entry, kind, dtype):
    given, call = call_of(entry, *SIZES[kind], dtype=DTYPES[dtype], device="cuda")
    assert_accurate(*given, kernel_options=KINDS[kind], **call)


def assert_same_lists(mask_mod, sizes, block):
    mine = flexattn.create_block_mask(mask_mod, *sizes, "cuda", block)
    theirs = torch_block_mask(mask_mod, *sizes, device="cuda", BLOCK_SIZE=block)
    assert mine.BLOCK_SIZE == theirs.BLOCK_SIZE and mine.seq_lengths == theirs.seq_lengths
    assert lists_of(mine) == lists_of(theirs)


@pytest.mark.parametrize("entry", MASKS, ids=str)
def test_block_masks_are_torchs(entry):
    """Counts and listed blocks, partial and full, at lengths that no block divides."""
    for shape in ((2, 4, 2, 611, 747), (1, 2, 1, 256, 384), (2, 2, 1, 1, 129)):
        B, Hq, _, L, S = shape
        mask_mod = entry.make(*shape, device="cuda").mask_mod
        assert_same_lists(mask_mod, (B, Hq, L, S), 128)


@pytest.mark.parametrize("block", [(64, 128), (128, 64), (48, 80), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["causal", "natten_2d", "head_windows"])
def test_block_masks_of_other_sizes_are_torchs(name, block):
    entry = next(c for c in MASKS if c.name == name)
    mask_mod = entry.make(2, 4, 2, 611, 747, device="cuda").mask_mod
    assert_same_lists(mask_mod, (2, 4, 611, 747), block)


def test_a_long_causal_mask_takes_memory_by_blocks():
    """torch's own takes 40 GiB for 65536 x 65536 unless it is compiled."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = flexattn.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 65536, 65536, device="cuda"
    )
    assert torch.cuda.max_memory_allocated() - before < 64 * 512 * 512
    assert mask.kv_num_blocks.sum() == 512 and mask.full_kv_num_blocks.sum() == 512 * 511 // 2
