"""Estimates: when a model's choice goes before the rules' own."""

import pytest

from flexattn.kernels.base.estimate import ESTIMATE_MARGIN, Estimate, best_first

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
