"""Trials as lines: what repeats stands once, and files of earlier versions read alike."""

import json
from dataclasses import replace

import pytest

from flexattn.errors import CacheError
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.records.codec import decode, encode, lines, whole_trials
from flexattn.records.record import Gated, Trial

TILE = PrefillConfig(128, 64, 4, 3)
GATE = Gated("out max", 4e-4, 2e-3, 6e-4, True)
RMS = replace(GATE, name="out rms", budget=3e-4)
FIRST = Trial(TILE, 168, gate=GATE, screening=(21.5, 21.25))
TRIALS = (
    FIRST,
    replace(FIRST, config=replace(TILE, num_stages=2)),
    replace(FIRST, gate=RMS),
    Trial(HopperPrefillConfig(2, 128, 2, 240), gate=replace(RMS, error=1e-5)),
    Trial(HopperPrefillConfig(2, 64, 2, 240), gate=replace(GATE, passed=False)),
    Trial(TILE),
)


def parsed(trials):
    return json.loads(f"[{lines(trials, encode)}]")


def test_a_line_says_in_what_it_differs_from_the_first_of_its_kind():
    columns, first, other, rms, hopper, narrow, last = parsed(TRIALS)
    assert columns[:6] == "config registers spills shared_memory gate screening".split()
    assert first == [encode(TILE), 168, 0, 0, encode(GATE), [21.5, 21.25]]
    assert other == [{"num_stages": 2}, 168, 0, 0, {}, [21.5, 21.25]]
    assert rms == [{}, 168, 0, 0, encode(RMS), [21.5, 21.25]]
    assert hopper == [encode(TRIALS[3].config), 0, 0, 0, {"name": "out rms", "error": 1e-5}]
    assert narrow[0] == {"type": "HopperPrefillConfig", "BLOCK_N": 64}
    assert narrow[1:] == [0, 0, 0, {"passed": False}]
    assert last == [{}]


def test_the_first_config_may_stand_before_the_lines():
    config = encode(replace(TILE, num_stages=2))
    rows = json.loads(f"[{lines(TRIALS, encode, config)}]")
    assert [row[0] for row in rows[1:4]] == [{"num_stages": 3}, {}, {"num_stages": 3}]
    assert decode(tuple[Trial, ...], whole_trials(rows, config), "trials") == TRIALS
    with pytest.raises(CacheError):
        decode(tuple[Trial, ...], whole_trials(rows, "no config"), "trials")


def test_they_come_back():
    assert decode(tuple[Trial, ...], whole_trials(parsed(TRIALS)), "trials") == TRIALS


def test_whole_lines_of_earlier_files_read_alike():
    earlier = [
        {name: each for name, each in encode(trial).items() if each is not None}
        for trial in TRIALS
    ]
    assert decode(tuple[Trial, ...], whole_trials(earlier), "trials") == TRIALS


@pytest.mark.parametrize(
    "rows",
    [
        5,
        [5],
        [{"config": 5}],
        [{"config": {"num_stages": 2}}],
        [{"config": {"type": ["PrefillConfig"]}}],
        [{"config": encode(TILE)}, {"config": {"type": "HopperPrefillConfig", "BLOCK_N": 64}}],
        [{"config": encode(TILE) | {f"x{i}": 0 for i in range(100)}}, {"config": {}}],
        [{"config": encode(TILE), "gate": {"error": 1.0}}],
        [["config", "registers"], 5],
        [["config", "registers"], [encode(TILE), 1, 2]],
        [["config", "colour"], [encode(TILE), 1]],
        [["registers", "config"], [encode(TILE), 1]],
        [[["config"]], [encode(TILE)]],
    ],
)
def test_lines_that_no_first_one_completes_are_refused(rows):
    with pytest.raises(CacheError):
        decode(tuple[Trial, ...], whole_trials(rows), "trials")
