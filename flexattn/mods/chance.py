"""Chance: what gives another number each time it is asked, and whether a trace has asked it."""

from __future__ import annotations

import datetime
import pickle
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flexattn.errors import UnsupportedError
from flexattn.mods.reads import Reads, nested
from flexattn.mods.refusal import Refusal

_RULE = "a mod gives the same score for the same position each time"
_DO = "ask for them outside of the mod, and capture a tensor of them"
_UNSEEDED = (types.BuiltinFunctionType, random.SystemRandom)
_CLOCKS = frozenset(("time", "datetime", "urandom", "secrets"))


def is_clock(fn: Any) -> bool:
    """Whether a function of C tells the time, or what the system draws by chance."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, type):
        return issubclass(owner, datetime.date)
    return getattr(owner, "__name__", "") == "time" or getattr(fn, "__name__", "") == "urandom"


class Chance:
    """What a callable may draw numbers from, and how it stood before the callable was traced.

    sources: generators and clocks that a look at the callable met. key: its identity's, of which
    code that names generators without holding one counts, too. Nothing else is looked at: another
    thread may draw at any time.
    """

    def __init__(self, sources: list[Any], key: list[Any]) -> None:
        generators = [each for each in sources if not isinstance(each, _UNSEEDED)]
        clocks = len(generators) < len(sources)
        codes = [each for each in key if type(each) is Reads and not each.library]
        imported = any(not each.trusted and _CLOCKS & each.names for each in codes)
        if generators or any("random" in each.names for each in codes) or _numpys(key):
            generators += _globals()
        self._before = [(each, _state(each)) for each in generators]
        self._watched: frozenset[types.CodeType] | None = None
        if imported or clocks:
            self._watched = frozenset(code for each in codes for code in nested(each.code))
        self._asked: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note which clocks the callable's own code asks; torch's asks them all the time."""
        codes, before = self._watched, sys.getprofile()
        if codes is None:
            yield
            return

        def note(frame: types.FrameType, event: str, called: Any) -> None:
            if event == "c_call" and frame.f_code in codes and is_clock(called):
                self._asked.append(called.__qualname__)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def check(self) -> None:
        """Raise Refusal where a generator has been drawn from, or a clock was asked."""
        drawn = [type(each) for each, before in self._before if _state(each) != before]
        if drawn or self._asked:
            got = f"asks for another number each time ({', '.join(self._asked)})"
            if drawn:
                got = f"draws random numbers ({drawn[0].__module__}.{drawn[0].__name__})"
            raise Refusal(got, _RULE, _DO, raises=UnsupportedError)


def _numpys(key: list[Any]) -> bool:
    return any(
        type(each) is types.ModuleType and each.__name__.startswith("numpy.random") for each in key
    )


def _globals() -> list[Any]:
    """Python's generator, and numpy's where it is imported."""
    numpys = getattr(sys.modules.get("numpy"), "random", None)  # which loads it when it is read
    numpys = getattr(numpys, "random_sample", None)
    owners = (getattr(each, "__self__", None) for each in (random.random, numpys))
    return [each for each in owners if each is not None]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    return pickle.dumps(generator)
