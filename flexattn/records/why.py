"""why(): what a problem's config rests on, and how the closest records differ, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from flexattn.device import Device
from flexattn.errors import CacheError
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.defaults import default, reasons
from flexattn.problem import Problem
from flexattn.records.environment import environment
from flexattn.records.layers import (
    MAX_DISTANCE,
    Found,
    Stored,
    distance,
    find,
    former_default,
    layers,
    ranked,
)
from flexattn.records.record import SIZES, Answer, Environment, Key, key_of
from flexattn.settings import current

# Records of other families that are compared; a fleet's cache may hold tens of thousands.
MAX_COMPARED = 20000
# Of the closest, all of a kind on a device.
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a record is not what was asked for."""

    field: str
    asked: Any
    stored: Any


@dataclass(frozen=True, slots=True)
class Closest:
    """A stored record with all its differences; none in the key and the environment is a hit.

    untaken: why it does not serve; "" for the one that does.
    """

    path: Path
    layer: str
    answer: Answer
    key: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    untaken: str = ""


@dataclass(frozen=True, slots=True)
class ConfigExplanation:
    """The config that dispatch takes for a problem, and why nothing better.

    how: "hit", "hint", "nearest", "default", or "off" where FLEXATTN_MODE says so. expected: the
    file of an exact hit, for each layer. found: None where the static default serves. passed:
    records that would have served, and why not: the config cannot run, or the default is another.
    broken: files in the layers that are no records, with what is wrong.
    """

    problem: str
    key: Key
    environment: Environment
    how: Literal["hit", "hint", "nearest", "default", "off"]
    config: Config
    found: Found | None
    expected: tuple[tuple[str, Path], ...]
    passed: tuple[tuple[Path, str], ...]
    closest: tuple[Closest, ...]
    broken: tuple[tuple[Path, str], ...]


def why(problem: Problem, device: Device) -> ConfigExplanation:
    """Explain a problem's config; reads every record of the device, so it takes its time."""
    key, here = key_of(problem), environment(problem.structure.kind, device)
    places = layers(device)
    off = current().mode == "off"
    found = None if off else find(problem, device)
    refused: dict[Path, str] = {}
    for stored in ranked(key, here, places):
        why_not = reasons(stored.answer.config, problem.structure, device)
        refusal = f"its config cannot run here: {'; '.join(why_not)}" if why_not else ""
        refusal = refusal or former_default(stored, problem, device)
        if not refusal:
            break
        refused[stored.path] = refusal
    closest, broken = [], []
    for layer, path, entry in islice(_entries(places), MAX_COMPARED):
        if isinstance(entry, CacheError):
            broken.append((path, entry.line))
        elif (entry.key.kind, entry.environment.device) == (key.kind, here.device):
            others = _differences(here, entry.environment)
            closest.append(Closest(path, layer, entry, _differences(key, entry.key), others))
    served = None if found is None else found.stored
    taken = None if served is None else served.path
    closest.sort(key=lambda each: (each.path != taken, *_weight(each, key), str(each.path)))
    told = [
        replace(each, untaken=_untaken(each, key, served, refused.get(each.path, ""), off))
        for each in closest[:_SHOWN]
    ]
    return ConfigExplanation(
        problem=problem.describe(),
        key=key,
        environment=here,
        how="off" if off else found.how if found else "default",
        config=found.config if found else default(problem, device),
        found=found,
        expected=tuple((layer.name, layer.store.path(here, key)) for layer in places),
        passed=tuple(refused.items()),
        closest=tuple(told),
        broken=tuple(broken),
    )


def _entries(places: Any) -> Iterator[tuple[str, Path, Answer | CacheError]]:
    for layer in places:
        for path, entry in layer.store.answers():
            yield layer.name, path, entry


def _differences(asked: Any, stored: Any) -> tuple[Difference, ...]:
    pairs = (
        (field.name, getattr(asked, field.name), getattr(stored, field.name))
        for field in fields(asked)
    )
    return tuple(Difference(*each) for each in pairs if each[1] != each[2])


def _weight(closest: Closest, key: Key) -> tuple[int, float, int]:
    """Other fields of the key are furthest away, then its sizes, then the environment."""
    family = sum(each.field not in SIZES for each in closest.key)
    away = distance(closest.answer.key.sizes, key.sizes)
    return family, away, len(closest.environment)


def _untaken(each: Closest, key: Key, served: Stored | None, refusal: str, off: bool) -> str:
    """Why a record does not serve a key, in the order in which dispatch asks."""
    if served is not None and each.path == served.path:
        return ""
    if off:
        return "FLEXATTN_MODE=off takes none"
    other = [field.field for field in each.key if field.field not in SIZES]
    if other:
        return f"another problem: {', '.join(other)}; a winner is carried to other sizes alone"
    away = distance(each.answer.key.sizes, key.sizes)
    if away > MAX_DISTANCE:
        return f"its sizes are {away:g} doublings away, and {MAX_DISTANCE:g} is the most"
    if refusal:
        return refusal
    if served is None:
        return "too many that are nearer could not be read"
    nearer = "in its sizes" if served.distance < away else "in where it was made, or in its date"
    return f"the one that serves is nearer {nearer}"
