"""A plan on several streams: a run waits for the last one, unless a graph captures it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from flexattn.serving.launching import Streams, launch_here


class Stream:
    """A stand-in for torch.cuda.Stream. waits: handles of the streams it waited for."""

    def __init__(self, handle):
        self.cuda_stream, self.waits, self.capturing = handle, [], False

    def wait_stream(self, other):
        self.waits.append(other.cuda_stream)


class Gpu:
    """What torch.cuda says of one GPU and its current stream."""

    def __init__(self):
        self.current = Stream(0)

    @contextmanager
    def stream(self, other):
        before, self.current = self.current, other
        yield
        self.current = before

    def current_stream(self, index):
        assert index == 3
        return self.current

    def is_current_stream_capturing(self):
        return self.current.capturing


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    for name in ("stream", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_a_run_on_another_stream_waits_for_the_last(gpu):
    """The stream that wrote the workspace first is the first one to be waited for."""
    streams, first, second = Streams(3), Stream(11), Stream(22)
    assert streams.last == 0
    for stream, waits in ((first, [0]), (second, [11]), (first, [0, 22])):
        with gpu.stream(stream):
            streams.follow()
        assert streams.last == stream.cuda_stream and stream.waits == waits


def test_a_captured_run_waits_for_nothing_and_is_not_remembered(gpu):
    """A wait for work outside of a graph ends its capture with an error."""
    streams, captured, later = Streams(3), Stream(11), Stream(22)
    captured.capturing = True
    with gpu.stream(captured):
        streams.follow()
    assert streams.last == 0 and not captured.waits
    with gpu.stream(later):
        streams.follow()
    assert later.waits == [0]


def test_a_run_does_not_join_the_capture_of_the_last_ones_stream(gpu):
    streams, first, second = Streams(3), Stream(11), Stream(22)
    with gpu.stream(first):
        streams.follow()
    first.capturing = True
    with gpu.stream(second):
        streams.follow()
    assert streams.last == 22 and not second.waits


def test_a_launch_follows_where_the_stream_is_another(gpu, monkeypatch):
    """Of runs on one stream nothing but its handle is compared."""
    launched, followed = [], []
    streams = Streams(3)
    handle = lambda index: gpu.current.cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handle, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    follow = Streams.follow
    monkeypatch.setattr(Streams, "follow", lambda self: (followed.append(1), follow(self)))
    ready = SimpleNamespace(launch=lambda stream, tensors: launched.append(stream))
    for stream in (gpu.current, first := Stream(11), first, Stream(22)):
        with gpu.stream(stream):
            launch_here(ready, 3, (), streams)
    assert launched == [0, 11, 11, 22] and len(followed) == 2


def test_without_a_gpu_there_is_no_stream():
    assert Streams(-1).last == -1
