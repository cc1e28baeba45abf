"""Static defaults against what is measured: times beside the default, standings, fits of costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench import fit_costs
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


def rows(model):
    """Records whose times are those of other costs than the model's."""
    other = replace(model.costs, step=2 * model.costs.step, merge=model.costs.merge / 3)
    made = []
    for batch, keys in ((1, 8192), (4, 3000), (10, 16384), (64, 1024)):
        wanted = replace(problem("decode", kv_len=keys), B=batch)
        first = next(iter(model.rules(wanted, H200)))
        configs = (first, *model.alternatives(wanted, first, H200))
        us = {each: model.expected(wanted, each, H200, other).us for each in configs}
        made.append(found(us, wanted, f"model{batch} decode"))
    return fit_costs.rows_of(model, made)


def test_a_fit_comes_nearer_to_the_costs_that_times_were_made_with():
    model = fit_costs.MODELS["decode"]
    made = rows(model)
    costs = fit_costs.fitted(model, model.costs, made)
    before, after = (fit_costs.loss(model, each, made) for each in (model.costs, costs))
    assert after < before / 10
    assert costs == fit_costs.fitted(model, model.costs, made)


def test_a_judge_lets_the_model_choose_among_timed_configs_alone():
    model = fit_costs.MODELS["decode"]
    (row,) = fit_costs.rows_of(model, [found({FIRST: 10.0, replace(FIRST, num_warps=8): 5.0})])
    assert fit_costs.judged(model, model.costs, row) == (0.5, 0.5, row.first)
    slow = replace(DECODE, B=10, kv_len=2**17)
    first = next(iter(model.rules(slow, H200)))
    split = replace(first, num_splits=4)
    (row,) = fit_costs.rows_of(model, [found({first: 10.0, split: 8.0}, slow)])
    assert fit_costs.judged(model, model.costs, row) == (0.8, 1.0, split)


def test_prefill_studies_of_older_templates_are_left_out_of_the_fit():
    wanted = problem("prefill")
    times_ = {default(wanted, H200): 1.0}
    study = replace(found(times_, wanted), path=Path("configs/studies/one.json"))
    assert fit_costs.rows_of(fit_costs.MODELS["hopper"], [study]) == []
    assert len(fit_costs.rows_of(fit_costs.MODELS["hopper"], [found(times_, wanted)])) == 1


@pytest.mark.long
def test_on_shipped_records_no_model_is_behind_the_rules(capsys):
    """Means and least of both, which the tables of docs/tuning.md have."""
    every = list(measured())
    for name, model in fit_costs.MODELS.items():
        pairs = [
            fit_costs.judged(model, model.costs, row)[:2]
            for row in fit_costs.rows_of(model, every)
        ]
        assert len(pairs) > (10 if name == "triton" else 40), name
        assert all(chosen >= rules - 0.005 for rules, chosen in pairs if rules == rules), name
    assert main([]) == 0
    assert "| prefill |" in capsys.readouterr().out
    page = Path(__file__).parents[3] / "docs" / "tuning.md"
    assert table_of_fields(map(won_by_fields, every)) in page.read_text(encoding="utf-8")
