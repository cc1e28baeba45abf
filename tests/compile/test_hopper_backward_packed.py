"""Hopper's backward of packed sequences compiles with no device, and keeps its registers."""

from itertools import product

import pytest
import torch

from flexattn.catalogue import causal, relative_bias, sliding_window, softcap
from flexattn.kernels.hopper.family import PREFILL
from flexattn.kernels.hopper_backward.family import BACKWARD
from flexattn.mods import bind
from flexattn.runtime.build import compile_source
from flexattn.runtime.ragged import packed_backward_problem, packed_problem
from flexattn.runtime.resources import resources
from tests.compile.product_loops import product_loops
from tests.problems import H200

MASKS = {"full": None, "causal": causal, "window": sliding_window(1000)}
TABLE = torch.zeros(8, 400, dtype=torch.bfloat16)
SCORES = {
    "capped": softcap(30.0),
    "learned": relative_bias(TABLE, 200),
    "slopes": lambda s, b, h, q, k: s + TABLE[h, 0] * (k - q),
    "temperatures": lambda s, b, h, q, k: s * TABLE[h, 0],
    "clamped": lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-99, 99) + 99],
}
LEARNED = [("learned", 4), ("learned", 1), ("clamped", 4)]
OF_HEADS = [("slopes", 4), ("temperatures", 4)]
QUICK = [(64, "causal", 4), (64, "learned", 4)]
EVERY = [
    *product((64, 80, 96, 128, 192, 256), MASKS, (1, 4)),
    *product((64, 128), ["capped", "in order"], (4,)),
    *((D, *each) for D in (64, 128, 256) for each in LEARNED),
    *((D, *each) for D in (64, 128) for each in OF_HEADS),
]


def compiled(D, name, group):
    """The default of a pack, and how many words each of its loops of products spills."""
    q = torch.empty(300, 2 * group, D, dtype=torch.bfloat16)
    k = torch.empty(300, 2, D, dtype=torch.bfloat16)
    mods = bind(SCORES.get(name), "score"), bind(MASKS.get(name, causal), "mask")
    slots = (0,) if (name, group) in LEARNED + OF_HEADS else ()
    problem = packed_backward_problem(q, k, k, 3, *mods, slots)
    config = next(BACKWARD.able(problem, H200))
    if name == "in order":
        config = BACKWARD.made_deterministic(config, problem.structure)
    around = BACKWARD.around(problem, config, H200)
    for each in (*around.before, around.trim, around.after):
        assert not resources(compile_source(each, H200), H200).starved
    found = compile_source(BACKWARD.render(problem.structure, config, H200, "test"), H200)
    taken = resources(found, H200)
    assert not taken.serialised and taken.shared <= H200.shared_memory, taken
    used = BACKWARD.limits.resources(config, problem.structure, H200)
    assert abs(used[0] - taken.shared) <= 512
    return [words for _, words in product_loops(found.asm["cubin"])]


@pytest.mark.parametrize(("D", "name", "group"), QUICK, ids=str)
def test_defaults_keep_their_registers(D, name, group):
    spilled = compiled(D, name, group)
    assert spilled and not any(spilled), spilled


@pytest.mark.full_matrix
@pytest.mark.parametrize(("D", "name", "group"), EVERY, ids=str)
def test_every_default_overlaps_its_products(D, name, group):
    spilled = compiled(D, name, group)
    # Beside slopes the distances of a tile's scores are held for their gradients.
    assert spilled and max(spilled) <= (46 if (D, name) == (128, "slopes") else 12), spilled


@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.full_matrix)])
@pytest.mark.parametrize("name", ["learned", "clamped"])
def test_a_forward_that_reads_by_distance_keeps_its_registers(name, D):
    q, k = (torch.empty(300, heads, D, dtype=torch.bfloat16) for heads in (8, 2))
    mods = bind(SCORES[name], "score"), bind(causal, "mask")
    problem = packed_problem(q, k, k, 3, *mods, lse=True, positive_scale=True, sinks=False)
    config = next(PREFILL.able(problem, H200))
    found = compile_source(PREFILL.render(problem.structure, config, H200, "test"), H200)
    assert not resources(found, H200).serialised
    assert not any(words for _, words in product_loops(found.asm["cubin"]))
