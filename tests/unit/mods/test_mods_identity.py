"""What a mod is known by: whatever of its state changes is seen by the next bind()."""

import functools
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from flexattn.mods import bind
from flexattn.mods.bind import clear, stats
from tests.bound import value


def test_bools_and_zeros_are_told_apart():
    def mod(c):
        return lambda s, b, h, q, k: s * 0 + c

    for c in (True, 1, 1.0, 0.0, -0.0, False):
        got = value(mod(c), score=1.0)
        assert got == float(c)


def test_redefined_global_and_helper():
    scope = {"torch": torch}
    exec("W = 2\ndef helper(x): return x * W\ndef mod(s, b, h, q, k): return helper(s)", scope)
    assert value(scope["mod"]) == 2
    scope["W"] = 3
    assert value(scope["mod"]) == 3
    exec("def helper(x): return x + 10", scope)
    assert value(scope["mod"]) == 11


def test_attributes_containers_and_defaults():
    @dataclass(frozen=True)
    class Config:
        window: int
        flag: bool

    class Owner:
        level = 1

        def __init__(self):
            self.config, self.table = Config(2, True), {"w": [1, 2]}

        def scaled(self, x):
            return x * self.config.window

        def mod(self, s, b, h, q, k, extra=(1, 2)):
            s = self.scaled(s) + self.table["w"][1] + self.level + extra[0]
            return s if self.config.flag else -s

    owner = Owner()
    assert value(owner.mod) == 2 + 2 + 1 + 1
    owner.config = Config(5, True)
    assert value(owner.mod) == 5 + 2 + 1 + 1
    owner.table["w"][1] = 7
    assert value(owner.mod) == 5 + 7 + 1 + 1
    Owner.level = 4
    assert value(owner.mod) == 5 + 7 + 4 + 1
    owner.config = Config(6, False)
    assert value(owner.mod) == -(6 + 7 + 4 + 1)
    Owner.scaled = lambda self, x: x
    assert value(owner.mod) == -(1 + 7 + 4 + 1)


def test_objects_handed_on_are_looked_into():
    class Box:
        __slots__ = ("inner",)

    def peek(box, name):
        return getattr(box, name)["x"]

    box = Box()
    box.inner = {"x": 2.0}

    def mod(s, b, h, q, k):
        return s * peek(box, "inner")

    assert [value(mod), box.inner.update(x=3.0), value(mod)] == [2, None, 3]


def test_partial_arguments_and_shared_cells():
    def base(w, s, b, h, q, k, extra=0):
        return s * w + extra

    got = [value(functools.partial(base, w, extra=e)) for w, e in [(1, 0), (2, 5), (3, 6)]]
    assert got == [1, 7, 9]

    def twice(w):
        def helper(x):
            return x * w

        return lambda s, b, h, q, k: helper(s) + helper(s) + w

    assert [value(twice(w)) for w in (1, 2, 5)] == [3, 6, 15]


def test_an_object_reached_twice_is_never_half_replaced():
    class Holder:
        def __init__(self, w):
            self.w = w

    def make(w):
        one = Holder(w)
        both = [one, one]
        return lambda s, b, h, q, k: s * both[0].w + both[1].w

    assert [value(make(w), score=2.0) for w in (1, 2, 3, 4)] == [3, 6, 9, 12]


def test_a_number_inside_an_object_becomes_an_argument():
    class Scale:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return x * self.w

    pair = namedtuple("pair", "left right")

    def by_object(scale):
        return lambda s, b, h, q, k: scale(s)

    def by_tuple(both):
        return lambda s, b, h, q, k: s * both.left

    for make, wrap in [(by_object, Scale), (by_tuple, lambda w: pair(w, "x"))]:
        clear()
        assert [value(make(wrap(w))) for w in (2, 3, 4, 5)] == [2, 3, 4, 5]
        assert stats().traces == 2 and bind(make(wrap(6)), "score").scalars == (6,)


def test_modules_submodules_and_mode():
    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(2)])

        def forward(self, s, b, h, q, k):
            x = s.view(1)
            for layer in self.layers:
                x = layer(x)
            return x[0] if self.training else -x[0]

    gate = Gate()
    expected = gate(torch.tensor(1.0), 0, 0, 0, 0).item()
    assert value(gate) == pytest.approx(expected)
    gate.eval()
    assert value(gate) == pytest.approx(-expected)
    assert stats().traces == 2
    with torch.no_grad():
        gate.layers[0].weight.mul_(2)
    assert value(gate) == pytest.approx(gate(torch.tensor(1.0), 0, 0, 0, 0).item())


def test_opaque_state_is_traced_every_time_and_the_reason_is_logged_once(caplog):
    numbers = iter([1.0, 2.0, 3.0])

    def mod(s, b, h, q, k):
        return s * next(numbers)

    with caplog.at_level("INFO", "flexattn"):
        assert [value(mod), value(mod), value(mod)] == [1, 2, 3]
    (said,) = [each for each in caplog.messages if "traced at every call" in each]
    assert "mod" in said and "list_iterator, whose state nobody can see" in said


def test_an_owner_that_a_method_takes_among_others_is_followed():
    """`self` in *args was not looked at: the first value stayed for ever."""

    class Owner:
        gain = 2.0

        def mod(*args):
            return args[1] * args[0].gain

    owner = Owner()
    mod = functools.partial(owner.mod)
    assert value(mod) == 2
    owner.gain = 3.0
    assert value(mod) == 3
