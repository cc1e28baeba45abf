"""Knobs: fields of a config that a search turns and a template reads, with nothing said elsewhere.

A knob changes neither a config's tiles nor the memory and registers that feasibility counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from itertools import product
from typing import Any, TypeVar

from flexattn.kernels.base.config import Config
from flexattn.problem import Structure

__all__ = ["at_rest", "knob", "turned", "values", "words"]

C = TypeVar("C", bound=Config)


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


def _knobs(config: Config) -> Iterator[tuple[Field[Any], _Knob]]:
    return ((each, each.metadata["knob"]) for each in fields(config) if "knob" in each.metadata)


def turned(config: C, structure: Structure) -> Iterator[C]:
    """Every setting of the knobs that move something for a structure, the config's own first."""
    moving = [(each.name, found) for each, found in _knobs(config) if found.moves(structure)]
    axes = [(getattr(config, name), *found.others) for name, found in moving]
    for setting in product(*axes):
        yield replace(
            config, **{name: value for (name, _), value in zip(moving, setting, strict=True)}
        )


def at_rest(config: C) -> C:
    """The config with every knob at its default."""
    return replace(config, **{each.name: each.default for each, _ in _knobs(config)})


def words(config: Config) -> list[str]:
    """The words of the knobs that are turned, in the order of the fields."""
    return [
        found.word for each, found in _knobs(config) if getattr(config, each.name) != each.default
    ]


def values(config: Config) -> dict[str, Any]:
    """All fields by name, for a template's context."""
    return {each.name: getattr(config, each.name) for each in fields(config)}
