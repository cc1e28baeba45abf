"""Pictures: exact where they say so, of any length, in a terminal, a file and a notebook."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import flexattn
from flexattn import visualize
from flexattn.block_mask.visual import Picture
from flexattn.catalogue import alibi, causal, document, sliding_window, softcap
from flexattn.errors import InputError, ModError
from tests.cases import causal_score
from tests.processes import python


def dense(mask_mod, L, S):
    return create_mask(mask_mod, 1, 1, L, S, "cpu")[0, 0].float()


def test_a_cell_for_each_position_is_the_mask():
    mask_mod = sliding_window(9)
    found = visualize(mask_mod, 37, 53, block_size=16)
    assert torch.equal(found.share, dense(mask_mod, 37, 53))
    assert found.kept == pytest.approx(dense(mask_mod, 37, 53).mean().item())
    block_mask = flexattn.create_block_mask(mask_mod, 1, 1, 37, 53, "cpu", 16)
    assert torch.equal(found.classes > 0, block_mask.to_dense()[0, 0] > 0)
    same = visualize(block_mask)
    assert torch.equal(same.share, found.share) and torch.equal(same.classes, found.classes)


@pytest.mark.parametrize("mask_mod", [causal, document(torch.arange(600) // 70)])
def test_decided_cells_are_exact_and_open_ones_are_near(mask_mod):
    found = visualize(mask_mod, 600, 500, cells=20)
    want = dense(mask_mod, 600, 500).view(20, 30, 20, 25).mean((1, 3))
    assert torch.equal(found.share == 0, want == 0) and torch.equal(found.share == 1, want == 1)
    assert (found.share - want).abs().max() < 0.15 and abs(found.kept - want.mean()) < 0.01


@pytest.mark.parametrize("length", [1, 2, 129, 2**26])
def test_any_length(length):
    found = visualize(causal, length)
    assert max(found.share.shape) <= 128 and max(found.classes.shape) <= 128
    assert found.kept == pytest.approx((length + 1) / 2 / length, abs=0.01)
    assert len(str(found).splitlines()) <= 40


def test_several_blocks_a_cell():
    found = visualize(causal, 4096, cells=16, block_size=64)
    assert found.per_cell == 4 and torch.equal(
        found.classes, torch.full((16, 16), 2).tril(-1) + torch.eye(16).long()
    )
    assert "4 x 4 blocks of 64 x 64: empty 46.9%, partial 6.2%, full 46.9%" in str(found)


def test_one_head_of_one_batch():
    table = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    found = visualize(lambda b, h, q, k: table[b, h, q, k], 8, b=1, h=2)
    assert torch.equal(found.share, table[1, 2].float())


def test_scores():
    found = visualize(causal_score, 64, score=1.5)
    assert found.share is None and found.classes is None
    want = torch.full((64, 64), -torch.inf).triu(1).masked_fill(torch.ones(64, 64).tril() > 0, 1.5)
    assert torch.equal(found.scores, want) and "49.2% removed" in str(found)
    assert torch.equal(
        visualize(softcap(2.0), 9, score=3.0).scores.unique(), 2 * torch.tanh(torch.tensor([1.5]))
    )
    slope = 2.0**-8
    far = visualize(alibi(1, "cpu"), 2**20).scores
    assert far.shape == (128, 128) and far.min() < -slope * 2**19


def test_characters():
    assert str(visualize(causal, 3, block_size=2)).splitlines() == [
        "causal: 3 queries x 3 keys", "┌───┐", "│█  │", "│██ │", "│███│", "└───┘", "66.7% kept",
        "blocks of 2 x 2: empty 25.0%, partial 75.0%, full 0.0%",
    ]  # fmt: skip


@pytest.mark.parametrize("mod", [causal, alibi(4, "cpu"), causal_score])
def test_a_figure_in_a_file_and_in_a_notebook(mod, tmp_path):
    pytest.importorskip("matplotlib")
    found = visualize(mod, 1000, 1300)
    path = found.save(tmp_path / "new" / "mask.png")
    assert path.read_bytes()[:8] == found._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"
    assert found.save(tmp_path / "mask.svg").read_text().lstrip().startswith("<?xml")


def test_characters_need_no_matplotlib():
    code = """
import sys
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
import flexattn
found = flexattn.visualize(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 300)
assert "kept" in str(found) and found._repr_png_() is None
try:
    found.save("mask.png")
except flexattn.errors.UnsupportedError as error:
    assert "pip install 'flexattn[viz]'" in error.do and "print(picture)" in error.do
else:
    raise AssertionError
"""
    python("-c", code)


@pytest.mark.parametrize("arguments", [(), (0,), (4, 0)])
def test_lengths_are_asked_for(arguments):
    with pytest.raises(InputError, match="at least 1"):
        visualize(causal, *arguments)


@pytest.mark.parametrize("place", [{"b": -1}, {"h": -2}])
def test_batches_and_heads_count_from_zero(place):
    with pytest.raises(InputError, match="from 0 on"):
        visualize(causal, 8, **place)


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ModError):
        visualize(lambda b, h, q_idx, kv_idx: bool(q_idx > kv_idx), 8)
    assert isinstance(visualize(causal, 8), Picture)
