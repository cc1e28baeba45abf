"""Knobs: fields of a config that a search turns and a template reads, with nothing said elsewhere.

A knob changes neither a config's tiles nor the memory and registers that limits count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import islice, product
from typing import Any, TypeVar

from flexattn.kernels.base.config import Config
from flexattn.problem import Structure

_C = TypeVar("_C", bound=Config)


def _always(structure: Structure) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Knob:
    others: tuple[object, ...]
    word: str
    moves: Callable[[Structure], bool]


def knob(
    default: Any, *others: Any, word: str, moves: Callable[[Structure], bool] = _always
) -> Any:
    """A field of a config with its default, and the other values that a search tries.

    word: what `short` says of a config in which it is turned. moves: whether it changes the kernel
    of a structure; a search leaves it alone where not.
    """
    return field(default=default, metadata={"knob": _Knob(others, word, moves)})


@lru_cache(maxsize=64)
def _knobs(kind: type) -> tuple[tuple[str, Any, _Knob], ...]:
    """Name, default and knob of each such field of a config class."""
    metadata = ((each, each.metadata.get("knob")) for each in fields(kind))
    return tuple((each.name, each.default, found) for each, found in metadata if found is not None)


def turned(config: _C, structure: Structure) -> Iterator[_C]:
    """Every setting of the knobs that move something for a structure, the config's own first."""
    moving = [
        (name, found.others) for name, _, found in _knobs(type(config)) if found.moves(structure)
    ]
    names = [name for name, _ in moving]
    yield config
    for setting in islice(
        product(*((getattr(config, n), *tried) for n, tried in moving)), 1, None
    ):
        yield replace(config, **dict(zip(names, setting, strict=True)))


def at_rest(config: _C) -> _C:
    """The config with every knob at its default."""
    resting = {name: default for name, default, _ in _knobs(type(config))}
    return replace(config, **resting) if resting else config


def words(config: Config) -> list[str]:
    """The words of the knobs that are turned, with the value where a knob has several others."""
    return [
        found.word if len(found.others) == 1 else f"{found.word}-{value}"
        for name, default, found in _knobs(type(config))
        if (value := getattr(config, name)) != default
    ]


def values(of: Any) -> dict[str, Any]:
    """All fields of a config, or of another dataclass, by name, for a template's context."""
    return {each.name: getattr(of, each.name) for each in fields(of)}
