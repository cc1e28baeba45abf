"""A stand-in for a built kernel, which says what each of its arguments was given."""

from flexattn.kernels.base.binding import bind


class Recorded:
    """As flexattn.runtime.build.Kernel; values by the names of arguments.

    fixed: those of the last `prepare`, None where a launch gives one. launched: of every launch.
    """

    def __init__(self, source):
        self.source, self.launched = source, []
        self.names = [argument.name for argument in source.arguments]

    def prepare(self, programs, fixed, given, boxes=None, spare=()):
        self.programs, self.boxes = programs, boxes or {}
        self.bound = bind(self.source.arguments, fixed, given, boxes, spare)
        self.fixed = dict(zip(self.names, self.bound.fixed, strict=True))
        return self

    def launch(self, stream, given):
        assert len(given) == self.bound.passed
        values = dict(self.fixed)
        for argument, place in self.bound.given:
            values[self.names[argument]] = given[place]
        self.launched.append(values)
