"""Static defaults against what is measured: times beside the default, and standings."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.measured import Measured, measured, paired, times
from bench.static_defaults import main, standing, table, table_of_fields, won_by_fields
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import short
from flexattn.records.record import Failed, Gated, Trial
from tests.problems import H200, problem

GOOD, RED = (Gated("out", 0.0, 1.0, 0.0, passed) for passed in (True, False))
DECODE = replace(problem("decode", kv_len=8192), B=8)
FIRST = default(DECODE, H200)
A, B, C, D = (replace(FIRST, num_splits=splits) for splits in (3, 4, 5, 6))


def found(times, wanted=DECODE, title="llama decode"):
    return Measured(title, "3.9.0", wanted, H200, times, Path("v1/record.json"))


def test_times_are_those_beside_the_default_in_the_same_rounds():
    trials = (
        Trial(FIRST, gate=GOOD, screening=(10.0, 20.0, 10.0), finals=()),
        Trial(A, gate=GOOD, screening=(10.0, 5.0), start=1),
        Trial(B, gate=RED, screening=(1.0,)),
        Trial(C, failed=Failed("run", "Error", "no")),
        Trial(D, gate=GOOD, same_code_as=1),
    )
    assert paired(trials, 0)[A] == [(10.0, 20.0), (5.0, 10.0)]
    assert times(trials, 0) == {FIRST: 10.0, A: 5.0, D: 5.0}
    raced = (replace(trials[0], finals=(8.0, 16.0)), replace(trials[1], finals=(6.0, 12.0)))
    assert times(raced, 0) == {FIRST: 12.0, A: 9.0}


def test_a_config_that_is_compiled_otherwise_has_the_time_of_its_tiles():
    wanted = problem("prefill")
    config = default(wanted, H200)
    other = replace(config, ptxas="another")
    assert found({other: 5.0}, wanted).time(config) == 5.0
    assert found({other: 5.0}, wanted).time(replace(config, num_stages=9)) is None


def test_a_default_stands_where_its_time_is_and_without_one_nowhere():
    near, far, none = (
        standing(found(us)) for us in ({FIRST: 10.0, A: 9.5}, {FIRST: 10.0, A: 8.0}, {A: 8.0})
    )
    assert (near.ratio, far.ratio, none.ratio) == (0.95, 0.8, None)
    assert (far.default, far.best) == (short(FIRST), short(A))
    text = table([near, far, none])
    assert "| decode | 3 | 0.8718 | 0.800 | 1 | 1 |" in text
    assert text.count("llama decode") == 1 and "0.800 decode" in text
    assert "| decode | 1 | - | - | - | 1 |" in table([none])


def test_a_field_wins_what_the_best_config_with_the_defaults_value_loses():
    wide = replace(A, BLOCK_N=2 * FIRST.BLOCK_N)
    first = won_by_fields(found({FIRST: 10.0, A: 9.0, wide: 8.0}))
    assert first == {("DecodeConfig", "num_splits"): 1.25, ("DecodeConfig", "BLOCK_N"): 9 / 8}
    text = table_of_fields([first, won_by_fields(found({FIRST: 9.0, A: 9.1}))])
    assert "| `DecodeConfig` | `num_splits` | 2 | 1 | 1 | 25.0 % |" in text
    assert "| `DecodeConfig` | `BLOCK_N` | 1 | 1 | 1 | 12.5 % |" in text


@pytest.mark.long
def test_the_page_has_the_table_of_fields(capsys):
    assert main([]) == 0
    assert "| prefill |" in capsys.readouterr().out
    page = Path(__file__).parents[3] / "docs" / "tuning.md"
    assert table_of_fields(map(won_by_fields, measured())) in page.read_text(encoding="utf-8")
