"""Random mods through the real templates, in Triton's CPU interpreter."""

import pytest

from tests.random_mods.checking import check
from tests.random_mods.gradients import check_gradients

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, of removed lanes
]


@pytest.mark.parametrize("index", range(12))
def test_random_mod(index):
    """`FLEXATTN_INTERPRET=1 python -m tests.random_mods check` has more of them."""
    check(seed=0, index=index, longest=101, device="cpu")


@pytest.mark.parametrize("index", range(4, 14))
def test_gradients_of_a_random_mod(index):
    """`FLEXATTN_INTERPRET=1 python -m tests.random_mods gradients` has 300."""
    check_gradients(seed=0, index=index, longest=31, device="cpu")
