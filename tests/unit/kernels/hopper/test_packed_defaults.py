"""The configs that packed sequences start from."""

import pytest
import torch

from flexattn.catalogue import causal, softcap
from flexattn.kernels.hopper.ragged import ragged_defaults
from flexattn.mods import bind
from flexattn.runtime.ragged import packed_problem
from tests.families import violated
from tests.problems import H200


def tilted_mask(b, h, q_idx, kv_idx):
    return q_idx + h >= kv_idx


CONSUMERS = {
    "long": ({}, 3),
    "short": ({"total": 20 * 500}, 2),
    "short of many heads": ({"total": 20 * 200, "heads": (8, 1)}, 3),
    "wide": ({"D": 80}, 2),
    "a score": ({"score": softcap(4.0)}, 2),
    "a mask of a head": ({"mask": tilted_mask}, 2),
}


@pytest.mark.parametrize("pack", CONSUMERS)
def test_consumers_of_packed_sequences(pack):
    """Three where heads are narrow and sequences fill their tiles: their lengths are not known."""
    asked, consumers = CONSUMERS[pack]
    given = {"total": 20 * 1000, "heads": (8, 8), "D": 64, "score": None, "mask": causal} | asked
    q, k, v = (
        torch.empty(given["total"], heads, given["D"], dtype=torch.bfloat16, device="meta")
        for heads in (*given["heads"], given["heads"][1])
    )
    found = packed_problem(
        q, k, v, 19, bind(given["score"], "score"), bind(given["mask"], "mask"), lse=True,
        positive_scale=True, sinks=False,
    )  # fmt: skip
    first = next(ragged_defaults(found, H200))
    assert first.consumers == consumers
    assert not violated(first, found.structure, H200)
