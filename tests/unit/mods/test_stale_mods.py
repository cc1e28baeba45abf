"""What a mod reads is seen when it changes, or refused: no number is ever stale."""

import builtins
import enum
import functools
import math
import random
import types

import pytest
import torch

from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind, look, watch
from flexattn.mods.bind import clear, record, stats
from flexattn.mods.identity import identify
from tests.random_mods.changes import restored

NAMES = ("score", "b", "h", "q_idx", "kv_idx")


@pytest.fixture(autouse=True)
def unchanged():
    with restored():
        yield


class Calls:
    """Calls of one mod at one position, as a repeated call tells them: by guards, or bind()."""

    def __init__(self, fn):
        self.fn, self.guards = fn, None

    def __call__(self):
        if self.guards is None or not self.guards.hold(self.fn):
            self.bound = bind(self.fn, "score")
            self.guards = watch(self.fn, "score", self.bound)
        env = {name: torch.tensor(4) for name in NAMES} | {"score": torch.tensor(1.0)}
        return evaluate(self.bound.mod, env, self.bound.tensors, self.bound.scalars).item()


def tensor(**attributes):
    made = torch.ones(8)
    vars(made).update(attributes)
    return made


def peek(thing):
    return thing.x


class Slots:
    __slots__ = ("__x",)

    def __init__(self, x):
        self.change(x)

    def change(self, x):
        self.__x = x

    def read(self):
        return self.__x


class Hidden(set):
    pass


class Member(enum.Enum):
    ONE = 1


class Number(int):
    pass


class Meta(type):
    gain = 2.0


class OfMeta(metaclass=Meta):
    pass


class Dunder:
    __gain__ = _abc_gain = 2.0


def with_x(thing):
    thing.x = 2.0
    return thing


def function():
    pass


def gain(cls):
    return cls.gain


def dunder(thing):
    return thing.__gain__


def abc_gain(cls):
    return cls._abc_gain


def three(thing):
    thing.x = 3.0


# Each gives 2 times the score, and 3 times it after the change.
CHANGES = {
    "attribute of a tensor": (tensor(x=2.0), lambda t: t.x * t[3], three),
    "attribute of a parameter": (
        with_x(torch.nn.Parameter(torch.ones(8))), lambda t: peek(t) * t[3], three,
    ),
    "attribute that a tensor gets": (tensor(), lambda t: getattr(t, "x", 2.0) * t[3], three),
    "attribute of a tensor before its method": (
        tensor(), lambda t: t.sum() / 4, lambda t: setattr(t, "sum", lambda: 12.0),
    ),
    "requires_grad": (
        tensor(), lambda t: (3 if t.requires_grad else 2) * t[3], lambda t: t.requires_grad_(),
    ),
    "grad": (
        torch.ones(8, requires_grad=True),
        lambda t: 2 if t.grad is None else 3,
        lambda t: setattr(t, "grad", torch.ones(8)),
    ),
    "builtin": (
        None, lambda _: abs(-2), lambda _: setattr(builtins, "abs", lambda x: 3),
    ),
    "grad mode": (
        None,
        lambda _: 2 if torch.is_grad_enabled() else 3,
        lambda _: torch.set_grad_enabled(False),
    ),
    "grad mode by another name": (
        torch.is_grad_enabled, lambda on: 2 if on() else 3,
        lambda _: torch.set_grad_enabled(False),
    ),
    "attribute of a function": (with_x(function), peek, three),
    "attribute of a member": (with_x(Member.ONE), peek, three),
    "attribute of a number": (with_x(Number(7)), peek, three),
    "attribute of a metaclass": (OfMeta, gain, lambda _: setattr(Meta, "gain", 3.0)),
    "dunder attribute of a class": (
        Dunder(), dunder, lambda _: setattr(Dunder, "__gain__", 3.0),
    ),
    "attribute as of an ABC": (Dunder, abc_gain, lambda _: setattr(Dunder, "_abc_gain", 3.0)),
    "private slot": (Slots(2.0), lambda s: s.read(), lambda s: s.change(3.0)),
    "items that only C sees": (Hidden([2.0]), max, lambda s: s.add(3.0)),
    "partial of a class of its own": (
        type("Partial", (functools.partial,), {})(lambda x: x, x=2.0), lambda f: f(),
        lambda f: f.keywords.update(x=3.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_seen(case):
    """Each of these gave the first call's number for ever, from bind() or by its guards."""
    held, read, change = CHANGES[case]
    calls = Calls(lambda s, b, h, q, k: s * read(held))
    assert [calls(), calls()] == [2, 2]
    change(held)
    assert [calls(), calls()] == [3, 3]


def test_a_number_that_was_not_replaced_is_no_argument():
    """A copy of an object kept its `__dict__`, and both proofs of lifting held for that."""
    held = with_x(types.SimpleNamespace())
    calls = Calls(lambda s, b, h, q, k: s * held.__dict__["x"])
    for held.x in (2.0, 3.0, 4.0, 5.0):
        assert calls() == held.x


def test_a_length_read_by_a_captured_method():
    """A method of a type of C was told by the list it belongs to, and not by what that holds."""
    items = [0, 0]
    length = items.__len__
    calls = Calls(lambda s, b, h, q, k: s * length())
    assert calls() == 2
    items.append(0)
    assert calls() == 3


def test_the_default_dtype_decides_a_trace():
    """A logarithm of an index stayed a float32 after torch.set_default_dtype(), at every call."""
    calls = Calls(lambda s, b, h, q, k: s + torch.log(q + 1))
    first = calls()
    assert first == pytest.approx(1 + math.log(5), rel=1e-6)
    for _ in range(2):
        torch.set_default_dtype(torch.bfloat16)
        assert calls() == 1 + torch.tensor(math.log(5)).item()
        torch.set_default_dtype(torch.float32)
        assert calls() == first
    assert stats().traces == 2


def test_autocast_is_no_part_of_a_trace():
    """A mod that was first called under autocast kept its products in bfloat16 outside of it."""
    x = torch.linspace(0, 1, 24).view(8, 3)
    calls = Calls(lambda s, b, h, q, k: s + x[q] @ x[k])
    with torch.autocast("cpu", torch.bfloat16):
        first = calls()
    assert calls() == first == 1 + (x[4] @ x[4]).item()


def test_the_grad_mode_is_read_beside_a_learned_tensor():
    """Such a mod is traced in the mode that it asks for, whatever requires grad there."""
    table = torch.full((8,), 2.0, requires_grad=True)
    calls = Calls(lambda s, b, h, q, k: s * table[q] if torch.is_grad_enabled() else s - table[q])
    for grad, expected in ((True, 2.0), (False, -1.0), (True, 2.0)):
        torch.set_grad_enabled(grad)
        assert calls() == expected
    assert stats().traces == 2


def test_what_only_a_trace_asked_costs_others_nothing():
    """Who asks for requires_grad is traced at every call; who does not has one, and its guards."""
    learned = torch.ones(8, requires_grad=True)
    tables = [torch.ones(8), learned, tensor(loaded_by="a note")]

    def asking(t):
        return lambda s, b, h, q, k: s * (2 if t.requires_grad else 3) + t[h]

    def plain(t):
        return lambda s, b, h, q, k: s + t[h]

    for make, traces, guarded in ((asking, 6, 0), (plain, 1, 6)):
        clear()
        made = [make(t) for t in tables * 2]
        bounds = [bind(fn, "score") for fn in made]
        watched = [watch(*each) for each in zip(made, ["score"] * 6, bounds, strict=True)]
        assert stats().traces == traces
        assert sum(each is not None for each in watched) == guarded


def test_a_guard_knows_what_the_bound_mod_read_not_what_is_there_by_now():
    scale, table = 2.0, torch.ones(8)

    def mod(s, b, h, q, k):
        return s * scale + table[h]

    bound, identity = look(mod, "score")
    assert watch(mod, "score", bound, identity).hold(mod)
    scale = 3.0
    assert not watch(mod, "score", bound, identity).hold(mod)
    again = bind(mod, "score")
    assert watch(mod, "score", again, identity) is None  # of another value of scale


def test_a_mod_that_asks_for_grad_is_not_recorded(tmp_path):
    held = torch.ones(8)

    def mod(s, b, h, q, k):
        return s * 2 if held.requires_grad else s + held[h]

    assert not record(mod, "score", tmp_path)


def test_a_look_at_a_usual_mod_notes_no_more_than_before():
    """Guards are for what a mod reads: a plain one has neither bearers nor sources."""
    table = torch.ones(8)
    found = identify(lambda s, b, h, q, k: s + table[h] * 2, "score")
    assert (found.bearers, found.generators, found.clocks, found.grad) == ([], [], [], True)
    assert found.watchable and found.reason is None


def test_a_generator_may_have_attributes():
    """One of a module whose name begins as random's was taken for a library's, state and all."""
    walk = type("Walk", (random.Random,), {"__module__": "random_walks"})()
    plain = random.Random(1)
    for generator in (walk, plain):
        generator.x = 2.0
        call = Calls(lambda s, b, h, q, k, g=generator: s + peek(g))
        assert call() == 3.0
        generator.x = 5.0
        assert call() == 6.0
