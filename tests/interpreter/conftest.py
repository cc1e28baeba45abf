import os

import pytest

from tests.quick_interpreter import hurry

if os.environ.get("TRITON_INTERPRET") == "1":
    hurry()


@pytest.fixture(autouse=True)
def every_output_is_written(poisoned):
    """What a kernel leaves out is NaN, in all tests of this folder."""


@pytest.fixture
def work(monkeypatch):
    """Counts of what calls build, render and trace."""
    from tests.work import counting, forget

    yield counting(monkeypatch)
    forget()
