"""The planted faults: each stands where its row says, and the test that must catch it is there.

`python -m tests.faults` plants them.
"""

import ast
import re

import pytest

from tests.faults import FAULTS
from tests.faults.fault import ROOT


def test_there_are_enough_and_each_has_a_name():
    assert len(FAULTS) >= 60
    assert len({each.name for each in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    planted = fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
    if fault.file.endswith(".py"):
        ast.parse(planted)
    path, name = re.match(r"([\w/]+\.py)::(\w+)", fault.test).groups()
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
