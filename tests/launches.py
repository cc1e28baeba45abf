"""A stand-in for a built kernel, and what a run launches."""

import torch

from flexattn.kernels.base.binding import bind_arguments
from flexattn.runtime.build import TritonLaunch, builder


def launches_of(monkeypatch, run, *makers):
    """What run() returns, and its launches; it allocates and compiles nothing.

    makers: functions that it may not call, as modules and names.
    """
    plain, before, count = TritonLaunch.launch, builder().compiled, []

    def refused(*args, **kwargs):
        raise AssertionError("a run allocates nothing")

    def counted(launch, stream, given):
        count.append(launch)
        return plain(launch, stream, given)

    names = ("empty", "zeros", "empty_strided", "full", "empty_like")
    with monkeypatch.context() as patch:
        patch.setattr(TritonLaunch, "launch", counted)
        for module, name in (*((torch, each) for each in names), *makers):
            patch.setattr(module, name, refused)
        got = run()
    assert builder().compiled == before
    return got, count


class Recorded:
    """As flexattn.runtime.build.Kernel; values by the names of arguments.

    fixed: those of the last `prepare`, None where a launch gives one. launched: of every launch.
    """

    def __init__(self, source):
        self.source, self.launched = source, []
        self.names = [argument.name for argument in source.arguments]

    def prepare(self, programs, fixed, given, boxes=None, spare=()):
        self.programs, self.boxes = programs, boxes or {}
        self.bound = bind_arguments(self.source.arguments, fixed, given, boxes, spare)
        self.fixed = dict(zip(self.names, self.bound.fixed, strict=True))
        return self

    def launch(self, stream, given):
        assert len(given) == self.bound.passed
        values = dict(self.fixed)
        for argument, place in self.bound.given:
            values[self.names[argument]] = given[place]
        self.launched.append(values)
