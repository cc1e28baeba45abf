"""Zeroes that launches count from: each has its own, and a captured graph makes one."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from flexattn.runtime import launch
from flexattn.runtime.launch import counter

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_left", launch._Left())


def test_no_two_launches_have_the_same():
    found = [counter(CPU, 0) for _ in range(2 * launch._MADE + 3)]
    assert all(each.shape == (1,) and each.dtype == torch.int32 for each in found)
    assert len({each.data_ptr() for each in found}) == len(found)
    for each in found:
        each += 7  # as a kernel does
    assert int(counter(CPU, 0)) == 0


def test_a_captured_launch_makes_its_zero(monkeypatch):
    kept = counter(CPU, 0).untyped_storage().data_ptr()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    found = counter(CPU, 0)
    assert int(found) == 0 and found.untyped_storage().data_ptr() != kept


@pytest.mark.parametrize("stream", [-1, 77])
def test_other_streams_keep_nothing(stream):
    """torch.compile warms its graphs up on a stream whose memory is the graph's."""
    assert counter(CPU, stream).untyped_storage().nbytes() == 4
    assert not launch._left.on


def test_what_a_transform_makes_is_not_kept():
    """The zeroes of one call that failed were 511 later calls', which failed too."""
    with FakeTensorMode():
        assert counter(CPU, 0).shape == (1,)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: (counter(CPU, 0), x.sum())[1])(torch.ones(3))
    torch.func.functionalize(lambda x: (counter(CPU, 0), x + 1)[1])(torch.ones(3))
    assert not launch._left.on
    assert int(counter(CPU, 0)) == 0 and launch._left.on
