"""Behind its last unit a consumer of the Hopper template works on one more tile, of no unit.

What mods read for it, and for the tile that would follow, must lie in their tensors: loads are
guarded at a tensor's end, and keys are never below 0. Once the tile that would follow began at key
-128, and a bias by key was read before its tensor.
"""

import re
from dataclasses import replace

import pytest

from flexattn.catalogue import causal
from flexattn.device import named
from flexattn.kernels.choose.defaults import default
from tests.families import render
from tests.problems import problem

H200 = named("nvidia-h200")
KEYS = re.compile(r"start_n = \(end - 1 - i\) \* BLOCK_N")


def biased(score, b, h, q_idx, kv_idx):
    return score - 0.5 * kv_idx


def source(stages=2, cross_tile_pipeline=True, **mods):
    wanted = problem("prefill", 128, **mods)
    config = replace(
        default(wanted, H200, "gluon"), num_stages=stages, cross_tile_pipeline=cross_tile_pipeline
    )
    return render(wanted.structure, config, H200, "test").text


@pytest.mark.parametrize(
    "mods",
    [{"score_mod": biased}, {"score_mod": biased, "mask_mod": causal, "runs": True}],
    ids=["dense", "runs"],
)
def test_keys_of_no_unit_are_not_below_zero(mods):
    text = source(**mods)
    tile = text[text.index("def consume_tile(") : text.index("def consume(")]
    told = re.search(r"end = gl\.where\(num_listed > 0, end, (\d+)\)", tile)
    assert told and KEYS.search(tile, told.end())
    # Of the tile that no unit has i is 0, of the one behind it 1.
    assert min(int(told.group(1)) - 1 - i for i in (0, 1)) >= 0


def test_the_list_of_no_unit_begins_at_zero():
    text = source(mask_mod=causal, score_mod=biased)
    last = text[text.index("# No number of tiles ends") : text.index("# What the consumers gave")]
    assert "note(starts.index(slot), 0)" in last
    assert last.index("note(starts.index(slot), 0)") < last.index("mbarrier.arrive(k_full")


def test_one_stage_makes_no_chain():
    """The loading warp waits for the first keys' place before it loads the first values."""
    assert "def consume_unit(" in source(stages=1)
    assert "def consume_unit(" not in source(stages=2)


def test_units_stand_apart_where_they_are_told_to():
    assert "def consume_unit(" in source(cross_tile_pipeline=False)
