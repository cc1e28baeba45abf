"""Zeroes that launches count from: each has its own, and a captured graph makes one."""

import pytest
import torch

from flexattn import counters
from flexattn.counters import counter

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(counters, "_left", counters._Left())


def test_no_two_launches_have_the_same():
    found = [counter(CPU, stream) for stream in (1, 2) for _ in range(2 * counters._MADE + 3)]
    assert all(each.shape == (1,) and each.dtype == torch.int32 for each in found)
    assert len({each.data_ptr() for each in found}) == len(found)
    for each in found:
        each += 7  # as a kernel does
    assert int(counter(CPU, 1)) == int(counter(CPU, 2)) == 0


def test_a_captured_launch_makes_its_zero(monkeypatch):
    kept = counter(CPU, 1).untyped_storage().data_ptr()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    found = counter(CPU, 1)
    assert int(found) == 0 and found.untyped_storage().data_ptr() != kept
    assert counter(CPU, -1).untyped_storage().nbytes() == 4


def test_streams_that_come_and_go_hold_no_memory():
    for stream in range(3 * counters._STREAMS):
        counter(CPU, stream)
    assert len(counters._left.by_stream) <= counters._STREAMS
