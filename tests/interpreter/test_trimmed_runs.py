"""Ends of a mask's runs as Hopper's backward walks them: without tiles that keep nothing."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn import create_block_mask
from flexattn.catalogue import causal, causal_offset, document, sliding_window
from flexattn.device import detect, named
from flexattn.frontend.gradients import AskedGradients, _problem
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.source import render_trim
from flexattn.mods import bind
from flexattn.runtime.backward import TRIMMED, trimmed_for
from flexattn.runtime.build import builder
from flexattn.runtime.key_lists import BothLists

H200, CPU = named("nvidia-h200"), detect(torch.device("cpu"))
B, HEADS, ROWS, KEYS = 2, 4, 1130, 1070
IDS = torch.stack([torch.arange(ROWS) // 257, (torch.arange(ROWS) + 71) // 340])
ENDS = torch.tensor([ROWS, 300, 0, 965])


def by_batch(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (IDS[b, q_idx] == IDS[b, kv_idx])


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx < ENDS[h])


MASKS = {
    "causal": causal,
    "ahead": causal_offset(129),
    "behind": causal_offset(-221),
    "window": sliding_window(343),
    "documents": and_masks(document(IDS[0]), causal),
    "both ways": document(IDS[1]),
    "by batch": by_batch,
    "by head": by_head,
}


@pytest.mark.parametrize("tile", [(64, 128), (128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_runs_end_where_the_mask_keeps_something(name, tile):
    mask_mod, (rows, keys) = MASKS[name], tile
    sizes = (B if name == "by batch" else None, HEADS if name == "by head" else None)
    mask = create_block_mask(mask_mod, *sizes, ROWS, KEYS, device="cpu")
    lists, bound = BothLists.of(mask), bind(mask_mod, "mask")
    q, k = (torch.zeros(B, HEADS, n, 64, dtype=torch.bfloat16) for n in (ROWS, KEYS))
    problem = _problem(AskedGradients(None, bound, mask, 1.0, NONE, ()), (q, k, k), lists, H200)
    config = HopperBackwardConfig(*tile, 2, trimmed=True)
    source = render_trim(problem.structure, config, CPU)
    tiles = -(-KEYS // keys)
    (batches, heads), told = trimmed_for(problem, lists, tiles)
    assert (batches, heads) == (sizes[0] or 1, sizes[1] or 1)
    runs = lists.by_key.runs
    assert runs is not None
    found = torch.full((batches, heads, tiles, 4), -7, dtype=torch.int32)
    fixed = {
        "Q_RUNS": runs, TRIMMED: found, "num_tiles": tiles, "q_len": ROWS, "kv_len": KEYS,
        "stride_q_mask_b": runs.shape[1] * runs.shape[2], "stride_q_mask_h": runs.shape[2],
        **told, **captured_values(problem.structure.mask, bound),
    }  # fmt: skip
    launch = (
        builder().kernel(source, CPU, -1).prepare(batches * heads * tiles, fixed, (), spare=fixed)
    )
    launch.launch(-1, ())

    q_idx, kv_idx = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None]
    for b in range(batches):
        for h in range(heads):
            kept = mask_mod(torch.tensor(b), torch.tensor(h), q_idx, kv_idx)
            for n, run in enumerate(found[b, h].tolist()):
                first, full_first, full_end, end = run
                ours = kept[:, n * keys : (n + 1) * keys].split(rows)
                some = [m for m, each in enumerate(ours) if each.any()]
                assert list(range(first, end)) == some
                full = full_first < full_end
                assert (first <= full_first and full_end <= end) or not full
                assert all(ours[m].all() for m in range(full_first, full_end))
                # Full tiles that are none lie behind a run's end: see problem/mask_lists.py.
                assert full or (full_first, full_end) == (end, first)
    wider = runs[..., 3] * 128 - runs[..., 0] * 128
    narrower = (found[..., 3] - found[..., 0]) * rows
    if name in ("documents", "by batch", "by head") and keys == 128 and rows == 64:
        assert int(narrower.sum()) < int(wider.sum())
