"""Random mods through the real templates, in Triton's CPU interpreter."""

import pytest

from tests.random_mods.battery import CATALOGUE, FORMS, check_battery, part_of
from tests.random_mods.checking import check
from tests.random_mods.gradients import check_gradients
from tests.random_mods.outcomes import Task


@pytest.mark.parametrize("index", range(12))
def test_random_mod(index):
    """`FLEXATTN_INTERPRET=1 python -m tests.random_mods check` has more of them."""
    check(seed=0, index=index, longest=101, device="cpu")


@pytest.mark.parametrize("index", range(4, 14))
def test_gradients_of_a_random_mod(index):
    """`FLEXATTN_INTERPRET=1 python -m tests.random_mods gradients` has 300."""
    check_gradients(seed=0, index=index, longest=31, device="cpu")


@pytest.mark.parametrize("form", FORMS)
def test_a_mod_rich_in_divisions(form):
    """`python -m tests.random_mods battery` has 500, and the catalogue, for a Triton release."""
    tasks = (Task(0, index, 31) for index in range(len(CATALOGUE), 2 * len(CATALOGUE)))
    check_battery(next(task for task in tasks if part_of(task)[1] == form), "cpu")
