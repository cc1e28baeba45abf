"""Random mods are served on an H200, on a machine that has none."""

import pytest

from tests.random_mods.compiling import compiled
from tests.random_mods.outcomes import Task

pytestmark = [pytest.mark.full_matrix, pytest.mark.oldest]


@pytest.mark.parametrize("index", range(30))
def test_random_mod(index):
    """`python -m tests.random_mods compile` has 2,000 of them."""
    found = compiled(Task(seed=0, index=index))
    assert found.how == "served", f"{found.mod}\n{found.call}\n{found.message}"
