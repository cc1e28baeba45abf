"""What make test leaves to make test-compile of a product of parameters."""

from itertools import combinations, product

import pytest

from tests.covering import each_choice, pairwise

VALUES = {"kind": "ab", "page": (0, 1, 3), "dtype": ("fp16", "bf16", "fp32"), "lse": (False, True)}


def rows(mark, often):
    _, params = mark.args
    return [each for each in params if not often or pytest.mark.long.mark not in _marks(each)]


def _marks(param):
    return [getattr(mark, "mark", mark) for mark in param.marks]


@pytest.mark.parametrize(("cover", "strength", "most"), [(pairwise, 2, 10), (each_choice, 1, 3)])
def test_rows_that_are_not_long_cover_what_they_say(cover, strength, most):
    mark = cover(**VALUES)
    whole, often = ([tuple(each.values) for each in rows(mark, x)] for x in (False, True))
    assert whole == list(product(*VALUES.values())) and strength < len(often) <= most
    for places in combinations(range(len(VALUES)), strength):
        met = {tuple(row[place] for place in places) for row in often}
        assert met == {tuple(row[place] for place in places) for row in whole}


def test_marks_and_ids_of_a_value_stay_its_own():
    value = pytest.param(3, id="three", marks=pytest.mark.slow)
    mark = each_choice(number=[1, value], other=["x"])
    _, (first, second) = mark.args
    assert (first.id, second.id) == ("1-x", "three-x")
    assert not first.marks and _marks(second) == [pytest.mark.slow.mark]
