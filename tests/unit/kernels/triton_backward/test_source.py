"""What the text of a backward holds, and what it leaves out."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal, relative_bias, softcap
from flexattn.kernels.base.config import turned
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.kernels.triton_backward.source import render
from flexattn.mods.derivative import loaded_floats
from tests.problems import H200, problem

CONFIG = BackwardConfig(64, 128, 128, 64, 8, 2)


def structure(score_mod=None, mask_mod=None, grads=False, **more):
    found = problem("backward", score_mod=score_mod, mask_mod=mask_mod, **more).structure
    slots = loaded_floats(found.score.mod) if grads else ()
    return replace(found, grads=slots)


def text(given, config=CONFIG):
    return render(given, config, H200, "title").text


BIAS = relative_bias(torch.zeros(32, 128), 64)
TABLE, PLACES = torch.zeros(32, 128), torch.arange(9000) // 80


def test_gradients_of_captured_tensors_are_there_where_they_are_asked_for():
    assert "atomic" not in text(structure(BIAS))
    assert text(structure(BIAS, grads=True)).count("atomic_add") == 1


def test_a_relative_bias_is_summed_along_diagonals():
    assert "tl.gather" in text(structure(BIAS, grads=True))
    assert list(turned(CONFIG, structure(softcap(50.0)))) == [CONFIG]


@pytest.mark.parametrize("steps", [
    lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-8, 8) + 8],
    lambda s, b, h, q, k: s + TABLE[q // 3, (q - k) % 7],
    lambda s, b, h, q, k: s + TABLE[h, (q >= k).long()],
    lambda s, b, h, q, k: s + TABLE[h, PLACES[k]],
    lambda s, b, h, q, k: s + TABLE[h, torch.where(q < 9, q, 9)],
])  # fmt: skip
def test_the_ends_of_places_in_steps_are_summed_in_a_tile(steps):
    """Where neighbours have places of their own it would only cost time."""
    for each in turned(CONFIG, given := structure(steps, grads=True)):
        assert "add_steps(" in text(given, each)
    for moving in (BIAS, lambda s, b, h, q, k: s + TABLE[h, (q - k).abs() % 9]):
        assert "add_steps" not in text(structure(moving, grads=True))


def test_loops_are_guarded_where_a_search_asks_and_a_score_mod_reads_memory_inside():
    given = structure(BIAS, mask_mod=causal, runs=True)
    configs = list(turned(CONFIG, given))
    assert [each.guarded for each in configs] == [False, True]
    wide = structure(D=256)
    assert [each.guarded for each in turned(CONFIG, wide)] == [False, True]
    one, other = (text(given, each) for each in configs)
    assert "if begin < end:" not in one and other.count("if begin < end:") == 2
    kept = [line.strip() for line in other.splitlines() if "begin < end" not in line]
    assert kept[3:] == [line.strip() for line in one.splitlines()][3:], "and nothing else changes"
