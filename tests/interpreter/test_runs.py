"""Runs of blocks, and the mask's own bounds on keys: tiles skipped, and tiles left unmasked."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import flexattn
from flexattn.catalogue import (
    causal,
    causal_offset,
    dilated_window,
    document,
    head_windows,
    padding,
    prefix_lm,
    sliding_window,
)
from flexattn.problem.mask_lists import known_runs, mask_class
from tests.covering import each_choice
from tests.support import (
    DECODE,
    KINDS,
    PREFILL,
    assert_accurate,
    block_mask,
    inputs,
    random_runs,
    run,
)

each_kind = pytest.mark.parametrize("kind", KINDS)
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16}
FAR = torch.iinfo(torch.int64)

MODS = {
    "causal": causal,
    "offset": causal_offset(29),
    "behind": causal_offset(-20),
    "window": sliding_window(23),
    "dilated": dilated_window(37, 3),
    "prefix": prefix_lm(torch.tensor([0, 70])),
    "padding": padding(torch.tensor([61, FAR.max])),
    "heads": head_windows(torch.tensor([5, FAR.max, FAR.min])),
}
IDS = {
    # Documents that end inside of blocks and at their ends, one block that holds several.
    "sorted": torch.arange(7).repeat_interleave(torch.tensor([19, 13, 32, 3, 2, 1, 27])),
    "long": torch.arange(2).repeat_interleave(torch.tensor([45, 52])),
    "alternating": torch.arange(97) // 5 % 2,
    "one": torch.zeros(97, dtype=torch.int64),
    # One document goes on behind another, within a block and in the next ones.
    "resumed": (torch.arange(97) // 10 == 4).int(),
    "back": torch.arange(97) // 29 * -(2**40),
}
DOCUMENTS = {f"documents_{name}": document(ids) for name, ids in IDS.items()}
DOCUMENTS |= {f"{name}_causal": and_masks(mod, causal) for name, mod in DOCUMENTS.items()}
DOCUMENTS["documents_window"] = and_masks(document(IDS["long"]), sliding_window(23))
MODS |= DOCUMENTS
# Nobody's keys are behind its end.
MODS["documents_short_list"] = and_masks(
    document(IDS["long"][:50]), lambda b, h, q_idx, kv_idx: kv_idx < 50
)


@pytest.mark.oldest
@each_choice(name=MODS, kind=KINDS)
def test_tiles_narrower_than_the_blocks(name, kind):
    """Two tiles of rows and of keys in a block, of which a mask needs some."""
    q, k, v = inputs(2, 3, 3, 43, 77)
    mask = block_mask(MODS[name], q, k, 32)
    mask_class(mask)
    assert known_runs(mask) is not None
    assert_accurate(q, k, v, block_mask=mask, kernel_options={**KINDS[kind], **SMALL})


@each_choice(name=["causal", "window", "padding", "heads", *DOCUMENTS], kind=KINDS)
def test_blocks_listed_against_what_the_mask_says(name, kind):
    """Full blocks are full whatever mask_mod says, and what is not listed is not read."""
    draw = torch.Generator().manual_seed(11)
    q, k, v = inputs(2, 3, 1, 64, 96)
    for _ in range(2):
        mask = random_runs(MODS[name], 3, 64, 96, draw)
        assert known_runs(mask) is not None
        assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])


@each_kind
def test_tiles_that_no_row_keeps_are_not_visited(kind):
    """A weight of zero times infinity is NaN: where the values are, nobody may look."""
    q, k, v = inputs(1, 2, 1, 16, 128)
    mask_mod = MODS["window"] if kind == "prefill" else lambda b, h, i, j: (j >= 35) & (j < 70)
    mask = block_mask(mask_mod, q, k, (16, 128), False, False)
    first, last = (0, 16) if kind == "prefill" else (32, 80)
    v[:, :, :first] = v[:, :, last:] = math.inf
    got = run(q, k, v, block_mask=mask, kernel_options={**KINDS[kind], "BLOCK_N": 16})
    assert got.out.isfinite().all()
    whole = run(q, k, v, block_mask=mask, kernel_options={**KINDS[kind], "BLOCK_N": 64})
    assert whole.out.isnan().any()


@each_kind
def test_lists_written_to_between_calls(kind):
    q, k, v = inputs(1, 2, 1, 40, 64)
    mask = block_mask(causal, q, k, 16, False, False)
    assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])
    mask.kv_num_blocks[:, :, 1] = 0
    mask.kv_num_blocks[:, :, 2] -= 1
    got = assert_accurate(q, k, v, block_mask=mask, kernel_options=KINDS[kind])
    assert got.out[:, :, 16:32].any() and known_runs(mask) is None


@pytest.mark.parametrize("past", [lambda x: x.data, lambda x: x.detach().numpy()])
def test_lists_written_past_torchs_count_of_writes(past):
    """Nothing shows such a write where rows have runs: create_block_mask's words say so to us."""
    q, k, v = inputs(1, 2, 1, 40, 64)
    mask = block_mask(causal, q, k, 16, False, False)
    before = assert_accurate(q, k, v, block_mask=mask, kernel_options=PREFILL)
    past(mask.kv_num_blocks)[:, :, 1] = 0
    mask.kv_num_blocks.add_(0)
    got = assert_accurate(q, k, v, block_mask=mask, kernel_options=PREFILL)
    changed = (got.out != before.out).any(-1)[0, 0]
    assert changed[16:32].all() and not changed[:16].any()
    assert all(each in flexattn.create_block_mask.__doc__ for each in (".data", "add_(0)"))


def test_the_same_answer_as_from_lists():
    q, k, v = inputs(1, 2, 1, 43, 77)
    mask = block_mask(sliding_window(31), q, k, 32)
    for options in (PREFILL, DECODE):
        runs = run(q, k, v, block_mask=mask, kernel_options=options)
        found = flexattn.explain(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
        text = found.source.read_text()
        assert "RUNS" in text and "KV_IDX" not in text
        copied = block_mask(sliding_window(31), q, k, 32)
        mask_class(copied)
        copied.kv_indices.add_(0)
        lists = run(q, k, v, block_mask=copied, kernel_options=options)
        torch.testing.assert_close(runs.out, lists.out)
        torch.testing.assert_close(runs.lse, lists.lse)
