"""Estimates: when a model's choice goes before the rules' own."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal
from flexattn.kernels.base.estimate import (
    ESTIMATE_MARGIN,
    Estimate,
    best_first,
    key_tiles,
    memory_time,
)
from tests.problems import H200, problem

RULES = ["a", "b"]


def told(**us):
    return lambda config: Estimate(us[config], "products", 1.0) if config in us else None


@pytest.mark.parametrize(
    ("us", "found"),
    [
        ({"a": 10.0, "c": 9.0, "d": 8.0}, ["d", "a", "b"]),
        ({"a": 10.0, "c": 10.0 / ESTIMATE_MARGIN + 0.01, "d": 11.0}, ["a", "b"]),
        ({"a": 10.0, "b": 8.0}, ["a", "b"]),
        ({"c": 1.0}, ["a", "b"]),
    ],
    ids=["the fastest", "too little", "no alternative", "none of the first"],
)
def test_one_config_goes_first_where_it_gains_by_the_margin(us, found):
    assert list(best_first(RULES, ["c", "d"], told(**us))) == found


def test_an_alternative_that_the_rules_have_too_is_there_once():
    assert list(best_first(RULES, ["b"], told(a=10.0, b=8.0))) == ["b", "a"]


def test_what_cannot_run_neither_leads_nor_is_compared_with():
    us = told(a=1.0, b=10.0, c=2.0, d=3.0)
    found = best_first(RULES, ["c", "d"], us, lambda each: each not in "ac")
    assert list(found) == ["d", "a", "b"]
    assert list(best_first(RULES, ["c"], us, lambda each: False)) == RULES


def test_it_says_what_it_expects_in_words():
    assert str(Estimate(12.345, "memory", 1.5)) == "12.3 us expected, bound by memory, 1.5 waves"


def masked(q_len, kv_len, mask_class):
    found = problem("prefill", 64, mask_mod=causal, runs=True)
    return replace(found, B=2, Hq=4, Hkv=2, q_len=q_len, kv_len=kv_len, mask_class=mask_class)


@pytest.mark.parametrize(("rows", "keys"), [(128, 64), (64, 128), (192, 128), (64, 64)])
def test_tiles_of_a_causal_mask_are_counted(rows, keys):
    """Over a square of some tiles: what the rows of each tile see, whole tiles of keys."""
    for length in (512, 1000, 1024, 4096):
        ends = [min(length, end) for end in range(rows, length + rows, rows)]
        counts = [-(-end // keys) for end in ends]
        mean, most = key_tiles(masked(length, length, "d1/2 i2 runs"), rows, keys)
        assert mean == pytest.approx(sum(counts) / len(counts), rel=0.13)
        assert most == max(counts)


def test_no_tile_visits_more_than_there_are():
    for length in (1, 64, 300, 1024):
        mean, most = key_tiles(masked(length, length, "d1/2 i2 runs"), 64, 64)
        assert most <= max(mean, -(-length // 64))


def test_memory_gives_no_keys_that_no_row_sees():
    """A chunk of a window: its time grew with the cache, 237 us where a kernel took 17."""
    near, far = (
        memory_time(masked(512, keys, name), H200)
        for keys, name in ((1024, "d1/2 i1 runs"), (16384, "d1/32 i1 runs"))
    )
    assert far < 2 * near
    whole = memory_time(masked(4096, 4096, "d1/2 i2 runs"), H200)
    assert whole == memory_time(masked(4096, 4096, "d1 i1 runs"), H200)
