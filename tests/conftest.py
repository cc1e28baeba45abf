"""What every folder of tests shares."""

import os

# Read once, when flexattn is imported: batches, and what mods read, are checked in every test.
os.environ.setdefault("FLEXATTN_CHECK", "1")
# A kernel that does not build is an error, and no other one passes its test in its place.
os.environ.setdefault("FLEXATTN_STRICT", "1")

import pytest

from flexattn.mods.bind import clear
from tests.support import poison


def pytest_addoption(parser):
    parser.addoption(
        "--accept-golden", action="store_true", help="write the rendered kernels as the goldens"
    )


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that torch.empty hands out holds NaN, so an output that nobody wrote is seen."""
    poison(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_traced():
    """A number that another test traced with another value would be an argument."""
    clear()
