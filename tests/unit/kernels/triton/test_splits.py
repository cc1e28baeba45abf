"""Decode's splits by sizes: what a mask leaves, what fills the SMs, and where nothing changes."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, strategies as st

from flexattn.catalogue import sliding_window
from flexattn.kernels.choose.defaults import candidates, default
from flexattn.kernels.triton.config import decode_grid
from flexattn.kernels.triton.family import DECODE
from tests.problems import A100, H200, problem

CHUNKS = Path(__file__).parents[4] / "bench/results/h200-chunks.json"


def decoded(D, B, group, keys, mask_class=""):
    mask = {"mask_mod": sliding_window(127), "runs": True} if mask_class else {}
    found = problem("decode", D, group=group, kv_len=keys, **mask)
    return replace(found, B=B, Hq=8 * group, mask_class=mask_class)


def test_keys_that_a_window_leaves_are_not_split():
    """64 heads over 8, 128 keys in a window: measured, 10.8 us by two splits and 7.8 by one."""
    for keys, mask_class in ((8192, "d1/64 i1 runs"), (4097, "d1/16 i1 runs")):
        assert default(decoded(64, 8, 8, keys, mask_class), H200).num_splits == 1
    assert default(decoded(64, 8, 8, 8192, "d1/64 i1 runs"), A100).num_splits == 0


def test_splits_that_fill_the_sms_stay_where_nothing_gains():
    for batch, keys in ((1, 8192), (1, 131072), (8, 8192), (64, 4096), (256, 1024)):
        assert default(decoded(128, batch, 4, keys), H200).num_splits == 0


def test_a_batch_that_leaves_half_of_the_sms_idle_is_split():
    """80 programs on 132 SMs: none of the records has such a batch."""
    found = default(decoded(128, 10, 4, 16384), H200)
    assert found.num_splits > 1


@pytest.mark.parametrize(
    ("B", "group", "rows", "keys", "D", "splits"),
    [(8, 8, 17, 57547, 64, 2), (1, 8, 17, 32768, 64, 16), (4, 8, 17, 32768, 128, 5)],
)
def test_tall_tiles_fill_what_an_sm_holds(B, group, rows, keys, D, splits):
    """192 tiles of 64 rows on 132 SMs, which hold three of them each: measured, 718 us unsplit and
    495 by two splits.
    """
    wanted = replace(decoded(D, B, group, keys), q_len=rows)
    found = default(wanted, H200)
    assert found.BLOCK_M == 64
    assert decode_grid(wanted, found, H200).num_splits == splits


def test_chunks_have_the_number_of_splits_that_was_fastest():
    """What the rule was read from, over the fastest number of splits that was timed."""
    found = []
    for B, Hq, Hkv, q_len, kv_len, D, us in json.loads(CHUNKS.read_text())["chunks"]:
        wanted = problem("decode", D, group=Hq // Hkv, q_len=q_len, kv_len=kv_len)
        wanted = replace(wanted, B=B, Hq=Hq, Hkv=Hkv)
        splits = decode_grid(wanted, default(wanted, H200), H200).num_splits
        times = {name: time for name, time in us.items() if name.startswith("decode")}
        found.append(times[f"decode-{splits}"] / min(times.values()))
    assert mean(found) < 1.02


def test_the_same_kernel_without_a_number_comes_next():
    """Whoever exported it without the number has it: splits are an argument."""
    first, second, *_ = candidates(decoded(64, 8, 8, 8192, "d1/64 i1 runs"), H200)
    assert replace(first, num_splits=0) == second


def test_wide_heads_have_two_tiles_under_way():
    wide = replace(problem("decode", 576, 512, group=16, kv_len=4096), B=128, Hq=16, Hkv=1)
    assert default(wide, H200).num_stages == 3


@pytest.mark.parametrize("D", [64, 576])
@pytest.mark.parametrize("mask_class", ["", "unknown"])
def test_splits_decide_no_text(D, mask_class):
    wanted = decoded(D, 8, 8, 8192, mask_class)
    config = default(wanted, H200)
    hashes = {
        DECODE.render(wanted.structure, replace(config, num_splits=splits), H200, "").hash
        for splits in (0, 1, 7)
    }
    assert len(hashes) == 1
    assert DECODE.as_rendered(replace(config, num_splits=7)) == replace(config, num_splits=0)


@given(
    st.sampled_from([64, 128, 256]), st.integers(1, 300), st.sampled_from([1, 4, 16]),
    st.integers(1, 10**6), st.sampled_from(["", "unknown", "d1/64 i1 runs"]),
)  # fmt: skip
def test_each_split_has_a_tile_of_keys(D, B, group, keys, name):
    wanted = decoded(D, B, group, keys, name)
    config = default(wanted, H200)
    grid = decode_grid(wanted, config, H200)
    assert 1 <= grid.num_splits <= max(1, -(-keys // config.BLOCK_N))
