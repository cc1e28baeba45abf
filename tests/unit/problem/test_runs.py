"""Runs of a BlockMask: what its rows' ends say, and for how long they hold."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexattn import create_block_mask
from flexattn.catalogue.masks import causal, document, sliding_window
from flexattn.problem.mask_lists import known_runs, look_at_lists, mask_class
from flexattn.runtime.launch import Lists


def lists(*rows, full=()):
    """Lists of one head: a list of blocks for each row, padded with the number of columns."""

    def dense(rows):
        width = max(map(len, rows), default=0)
        padded = [[*row, *[7] * (width - len(row))] for row in rows]
        counts = torch.tensor([len(row) for row in rows])
        return counts, torch.tensor(padded).view(len(rows), width)

    return *dense(rows), *(dense(full) if full else (None, None))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lists([0, 1], [2], []), [[0, 2, 0, 2], [2, 3, 2, 3], [0, 0, 0, 0]]),
        (lists([0, 3], [], full=([1, 2], [4, 5])), [[0, 1, 3, 4], [4, 4, 6, 6]]),
        (lists([0], [3], full=([], [4])), [[0, 1, 0, 1], [3, 4, 5, 5]]),
        (lists([0, 2]), None),
        (lists([1, 0]), None),  # not in order: nobody says that it is a run
        (lists([0, 0, 2]), None),  # as many as a run has, and a gap
        (lists([1], full=([0, 2],)), None),  # the full ones do not join up
        (lists([0, 1, 3], full=([1],)), None),  # listed twice
        (lists([0, 3], full=([0, 3],)), None),
        (lists([0], full=([2],)), None),
    ],
)
def test_runs_of_lists(given, expected):
    _, runs = look_at_lists(given, 6)
    assert (None if runs is None else runs.tolist()) == expected
    assert runs is None or runs.dtype == torch.int32


def made(mask_mod=causal, length=640):
    mask = create_block_mask(mask_mod, None, None, length, length)
    mask_class(mask)
    return mask


def test_runs_are_kept_with_the_mask():
    mask = made(sliding_window(300))
    assert known_runs(mask)[0, 0].tolist() == [
        [0, 1, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [1, 3, 4, 5],
    ]  # fmt: skip
    assert known_runs(mask) is known_runs(mask)
    found = Lists.of(mask)
    assert found.runs is known_runs(mask) and found.sparsity((128, 128), 1).runs


def test_apart_documents_are_no_runs():
    mask = made(document(torch.tensor([0, 1, 0, 1, 0]).repeat_interleave(128)))
    assert known_runs(mask) is None and not Lists.of(mask).sparsity((128, 128), 1).runs


WRITES = {
    "item": lambda x: x[0, 0].__setitem__(1, 0),
    "view": lambda x: x.view(-1)[1:].sub_(1),
    "out": lambda x: torch.add(x, 1, out=x),
    "copy_": lambda x: x.copy_(x + 1),
    "detached": lambda x: x.detach().zero_(),
    "no_grad": torch.no_grad()(lambda x: x.fill_(1)),
}


@pytest.mark.parametrize("name", ["kv_num_blocks", "full_kv_indices"])
@pytest.mark.parametrize("how", WRITES)
def test_every_write_of_torch_is_seen(name, how):
    mask = made()
    WRITES[how](getattr(mask, name))
    assert known_runs(mask) is None


def test_a_write_that_torch_does_not_count_is_seen_once_it_is_said():
    """As create_block_mask's docstring has it: nothing on the host tells of such a write."""
    for write in (lambda x: x.data.zero_(), lambda x: x.numpy().fill(0)):
        mask = made()
        write(mask.kv_num_blocks)
        assert known_runs(mask) is not None
        mask.kv_num_blocks.add_(0)
        assert known_runs(mask) is None


@pytest.mark.parametrize("name", ["kv_num_blocks", "full_kv_indices"])
def test_lists_that_are_written_to_are_walked_from_then_on(name):
    mask = made()
    getattr(mask, name).add_(0)
    assert known_runs(mask) is None
    mask = made()
    setattr(mask, name, getattr(mask, name).clone())
    assert known_runs(mask) is None and known_runs(made()) is not None


def test_lists_that_are_turned_in_place_have_no_runs():
    """Of square lists the turned ones have the same memory, shape and version."""
    mask = made()
    assert mask.kv_indices.shape[-1] == mask.kv_indices.shape[-2]
    mask.kv_indices.data = mask.kv_indices.data.transpose(-1, -2)
    assert known_runs(mask) is None


def test_what_cannot_be_watched_has_no_runs():
    with torch.inference_mode():
        mask = torch_flex.create_block_mask(causal, None, None, 640, 640, "cpu")
        assert mask_class(mask) == "d1/2 i2 runs" and known_runs(mask) is None


def test_nothing_is_known_before_somebody_looks():
    mask = create_block_mask(causal, None, None, 640, 640)
    assert known_runs(mask) is None
    mask_class(mask)
    part = mask[:, :, :2]
    assert isinstance(part, BlockMask) and known_runs(part) is None
