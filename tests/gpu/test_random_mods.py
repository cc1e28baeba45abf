"""Random mods on a GPU, at odd lengths, beside the float64 oracle."""

import pytest

from tests.random_mods.checking import check
from tests.random_mods.gradients import check_gradients

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("index", range(40))
def test_random_mod(index):
    """`python -m tests.random_mods check` has 500 of them."""
    check(seed=0, index=index, longest=400, device="cuda")


@pytest.mark.parametrize("index", range(10))
def test_gradients_of_a_random_mod(index):
    """`python -m tests.random_mods gradients` has 300 of them."""
    check_gradients(seed=0, index=index, longest=301, device="cuda")
