"""What tests of a failing build share."""

import pytest

from flexattn.runtime import dispatch
from flexattn.runtime.outcomes import memory
from flexattn.settings import override


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A user's directory of this test's own, no records, and nothing that an earlier test knew."""
    memory().forget()
    monkeypatch.setattr("flexattn.kernels.hopper.family.offered", lambda: True)
    with override(cache_dir=tmp_path, cache=(), mode="off", strict=False):
        yield tmp_path
    memory().forget()


@pytest.fixture(autouse=True)
def spills_are_told(monkeypatch):
    """A stand-in's machine code is what its loops spill."""
    monkeypatch.setattr(dispatch, "loop_spills", lambda code: (code[0], 0, code[1]))
