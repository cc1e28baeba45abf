"""Chance: what gives another number each time it is asked, and whether a trace has asked it."""

from __future__ import annotations

import datetime
import pickle
import random
import sys
import types
from typing import Any

from flexattn.mods.expr import Expr
from flexattn.mods.reads import Reads
from flexattn.mods.refusal import Refusal

__all__ = ["Chance", "is_clock"]

_RULE = "a mod gives the same score for the same position each time"
_DO = "draw them outside of the mod and capture the tensor"


def is_clock(fn: types.BuiltinFunctionType) -> bool:
    """Whether a function of C tells the time, or what the system draws by chance."""
    owner = fn.__self__
    if isinstance(owner, type):
        return issubclass(owner, datetime.date)
    return getattr(owner, "__name__", "") == "time" or fn.__name__ == "urandom"


class Chance:
    """What a callable may draw numbers from, and how it stood before the callable was traced.

    sources: generators and clocks that a look at the callable met. key: its identity's, of which
    code that names generators without holding one counts, too. Nothing else is looked at: another
    thread may draw at any time.
    """

    def __init__(self, sources: list[Any], key: list[Any]) -> None:
        clocks = (types.BuiltinFunctionType, random.SystemRandom)
        generators = [each for each in sources if not isinstance(each, clocks)]
        codes = [each for each in key if type(each) is Reads and not each.library]
        self.clocks = len(generators) < len(sources) or any(
            not each.trusted and {"time", "datetime", "urandom", "secrets"} & each.names
            for each in codes
        )
        if generators or any("random" in each.names for each in codes) or _numpys(key):
            generators += _globals()
        self._before = [(each, _state(each)) for each in generators]

    def check(self) -> None:
        """Raise Refusal where one of the generators has been drawn from."""
        for generator, before in self._before:
            if _state(generator) != before:
                kind = type(generator)
                raise _refused(f"draws random numbers ({kind.__module__}.{kind.__name__})")

    def compare(self, once: Expr, again: Expr) -> None:
        """Raise Refusal where two traces of a callable that asks a clock are not the same."""
        if once is not again:
            raise _refused("reads the clock, or draws what no seed repeats")


def _refused(got: str) -> Refusal:
    return Refusal(got, _RULE, _DO, unsupported=True)


def _numpys(key: list[Any]) -> bool:
    return any(
        type(each) is types.ModuleType and each.__name__.startswith("numpy.random") for each in key
    )


def _globals() -> list[Any]:
    """Python's generator, and numpy's where it is imported."""
    numpys = getattr(sys.modules.get("numpy.random"), "random_sample", None)
    owners = (getattr(each, "__self__", None) for each in (random.random, numpys))
    return [each for each in owners if each is not None]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    return pickle.dumps(generator)
