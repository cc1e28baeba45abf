"""After its last work tile a consumer with cross_tile_pipeline does one more KV tile, of none.

What mods read for it, and for the tile that would follow, must be inside their tensors: loads are
guarded at a tensor's end, and keys are never below 0. Once the tile that would follow began at key
-128, and a bias by key was read before its tensor.
"""

import re
from dataclasses import replace

import pytest

from flexattn.catalogue import causal
from flexattn.kernels.choose.defaults import default
from tests.families import render
from tests.problems import H200, problem

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
def test_keys_after_the_last_work_tile_are_not_negative(mods):
    text = source(**mods)
    tile = text[text.index("def consume_tile(") : text.index("def consume(")]
    end = re.search(r"end = gl\.where\(num_n_blocks > 0, end, (\d+)\)", tile)
    assert end and KEYS.search(tile, end.end())
    # i is 0 in the extra tile, 1 in the one after it.
    assert min(int(end.group(1)) - 1 - i for i in (0, 1)) >= 0


def test_the_first_key_after_the_last_work_tile_is_zero_with_lists():
    text = source(mask_mod=causal, score_mod=biased)
    last = text[text.index("# A work tile of -1 KV tiles") : text.index("# The last releases")]
    assert "store_scalar(starts_n.index(stage), 0)" in last
    assert last.index("store_scalar(starts_n.index(stage), 0)") < last.index(
        "mbarrier.arrive(k_full"
    )


def test_one_stage_rules_out_the_cross_tile_pipeline():
    """The producer would wait for the stage of the first K before it loads the first V."""
    assert "def consume_work_tile(" in source(stages=1)
    assert "def consume_work_tile(" not in source(stages=2)


def test_the_pipeline_drains_between_work_tiles_without_cross_tile_pipeline():
    assert "def consume_work_tile(" in source(cross_tile_pipeline=False)
