"""find(): the tuned config for a problem, looked for in one order, with where it comes from.

Layers: FLEXATTN_CACHE, the user's records, what the package ships for the device. Over all of them
a record of this key in this environment (hit) comes before one of the same device in another
environment (hint), and that before the nearest sizes of the same family (nearest). A hint and a
neighbour count where the static default that they were raced against is still that of their sizes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Config, describe
from flexattn.kernels.choose.defaults import default, reasons
from flexattn.kernels.choose.registry import family_of
from flexattn.problem import Problem
from flexattn.records.codec import encode
from flexattn.records.environment import environment
from flexattn.records.record import Answer, Environment, Key, Record, Sizes, key_of, sizes_of, slug
from flexattn.records.store import Store, generation
from flexattn.settings import current, say_once
from flexattn.util.files import is_closed, listing
from flexattn.util.locks import Lru

_How = Literal["hit", "hint", "nearest"]
_HOWS: tuple[_How, ...] = get_args(_How)

# Steps of two, over batch and lengths together, beyond which a winner says little.
MAX_DISTANCE = 4.0
# Neighbours that are opened before the search gives up on broken ones.
MAX_TRIED = 8
# Beside the folders of devices: whole spaces as they were measured, which are no records.
STUDIES = "studies"
PACKAGE = Path(__file__).resolve().parent.parent


class RecordLayer(NamedTuple):
    """One place where records are looked for, as people call it."""

    name: str
    store: Store


@dataclass(frozen=True, slots=True)
class Stored:
    """A record that may serve a problem.

    folder: of its environment. differing: fields of that which are not ours. distance: from the
    sizes asked for.
    """

    answer: Answer
    how: _How
    layer: RecordLayer
    folder: str
    differing: tuple[str, ...]
    distance: float

    @property
    def path(self) -> Path:
        """Its file."""
        return self.layer.store.path(self.folder, self.answer.key)

    @property
    def record(self) -> Record | None:
        """The whole record, read now; None if the file is gone."""
        return self.layer.store.read(self.folder, self.answer.key)

    @property
    def sizes(self) -> Sizes:
        """As they were measured."""
        return Sizes(*self.answer.sizes)


@dataclass(frozen=True, slots=True)
class Found:
    """The tuned config of a problem: how it fits, where it comes from in words, and its file."""

    config: Config
    how: _How
    origin: str
    stored: Stored

    @property
    def differing(self) -> tuple[str, ...]:
        """Fields of the record's environment that are not this process's."""
        return self.stored.differing


def configs_folder() -> Path | None:
    """The packaged folder where there is one (a wheel), else the repository's `configs/`."""
    folders = (PACKAGE / "_configs", PACKAGE.parent / "configs")
    return next((folder for folder in folders if folder.is_dir()), None)


def layers(device: Device | None = None) -> tuple[RecordLayer, ...]:
    """The places where records for a device, or for all, are looked for, the first one first."""
    settings = current()
    found = [RecordLayer("FLEXATTN_CACHE", Store(root)) for root in settings.cache]
    users = settings.cache_dir / "records"
    if is_closed(users):
        say_once(f"{users} is not looked at: this user may not read it")
    else:
        found.append(RecordLayer("user", Store(users)))
    shipped = configs_folder()
    if shipped is not None:
        if device is not None:
            names = [slug(device.name)]
        else:
            there = (name for name in listing(shipped) if (shipped / name).is_dir())
            names = sorted(name for name in there if name != STUDIES)
        found += [RecordLayer("shipped", Store(shipped / name)) for name in names]
    return tuple(found)


_memory: Lru[object, tuple[Stored | None]] = Lru(4096)


def find(
    problem: Problem, device: Device, first: Callable[[], Config] | None = None
) -> Found | None:
    """The first record that fits and holds here; None leaves the static default.

    first: gives the static default of the problem, for whoever computes it anyway. The files are
    read once per key, structure and process; a record that this process writes is seen at once,
    those of others by the next process.
    """
    key, settings = key_of(problem), current()
    asked = settings.cache, settings.cache_dir, generation()
    memo = (key, problem.structure, device, asked)
    known = _memory.get(memo)
    if known is None:
        places = layers(device)
        each = (_first(way, device, places, first) for way in problem.classes())
        able = (stored for stored in each if stored is not None)
        known = (min(able, key=lambda x: (_HOWS.index(x.how), x.distance), default=None),)
        _memory.put(memo, known)
    stored = known[0]
    if stored is None:
        return None
    config = transferred(stored.answer.config, stored.sizes, problem, device)
    return Found(config, stored.how, origin(stored), stored)


def _first(
    problem: Problem,
    device: Device,
    places: tuple[RecordLayer, ...],
    first: Callable[[], Config] | None,
) -> Stored | None:
    here = environment(problem.structure.kind, device)
    for stored in ranked(key_of(problem), here, places):
        config, measured = stored.answer.config, problem.at(*stored.sizes)
        if not family_of(config).serves(config, measured, problem, device):
            continue
        found = reasons(config, problem.structure, device)
        if found:
            # Of a plan's neighbour that is no wonder: it was measured for another structure.
            if stored.how != "nearest" or measured.structure == problem.structure:
                told = f"its config cannot run on {device.name}: {'; '.join(found)}"
                say_once(f"{stored.path}: {told}")
        elif not former_default(stored, problem, device, first):
            return stored
    return None


def former_default(
    stored: Stored, problem: Problem, device: Device, first: Callable[[], Config] | None = None
) -> str:
    """Why a hint or a neighbour says nothing of what runs without it; "" where it does, or a hit.

    Its claim is about its own sizes, so the static default of those is what it is compared with:
    at others the default may be another config though nothing about the record has changed.
    first: as of `find`.
    """
    if stored.how == "hit":
        return ""
    here = sizes_of(problem) == stored.sizes
    measured = problem if here else problem.at(*stored.sizes)
    try:
        today = first() if here and first is not None else default(measured, device)
    except ConfigError:
        return ""  # nothing runs without it
    found = outdated(stored.record, today)
    if found:
        say_once(f"{stored.path}: not taken: {found}", logging.INFO)
    return found


def ranked(key: Key, here: Environment, places: tuple[RecordLayer, ...]) -> Iterator[Stored]:
    """Records that may serve a key, the best first: hits, hints, then neighbours by distance."""
    for layer in places:
        yield from _stored(layer, here, key, key, here)
    for layer in places:
        hints = [
            each
            for folder in layer.store.folders(here.device)
            if folder != here.folder
            for each in _stored(layer, folder, key, key, here)
        ]
        yield from sorted(hints, key=_closeness, reverse=True)
    yield from _neighbours(key, here, places)


def _neighbours(key: Key, here: Environment, places: tuple[RecordLayer, ...]) -> Iterator[Stored]:
    family = key.family()
    found = [
        (away, folder != here.folder, position, sizes, folder)
        for position, layer in enumerate(places)
        for folder in layer.store.folders(here.device)
        for sizes in layer.store.sizes(folder, family)
        if 0 < (away := distance(sizes, key.sizes)) <= MAX_DISTANCE
    ]
    # Of the same sizes several environments may have records: as hints are ranked, so are these.
    for (_, _, position, sizes), same in groupby(sorted(found)[:MAX_TRIED], lambda each: each[:4]):
        there = replace(key, **sizes._asdict())
        stored = [
            each
            for *_, folder in same
            for each in _stored(places[position], folder, there, key, here)
        ]
        yield from sorted(stored, key=_closeness, reverse=True)


def _stored(
    layer: RecordLayer, where: Environment | str, there: Key, key: Key, here: Environment
) -> Iterator[Stored]:
    answer = layer.store.answer(where, there)
    if answer is None:
        return
    environment = answer.environment
    differing = () if environment is here else environment.differing(here)
    how: _How = "nearest" if there != key else "hint" if differing else "hit"
    away = 0.0 if there is key else distance(there.sizes, key.sizes)
    yield Stored(answer, how, layer, environment.folder, differing, away)


def _closeness(stored: Stored) -> tuple[bool, int, str]:
    """The same kernel's code counts most, then how little differs, then the date."""
    differing = stored.differing
    return "template" not in differing, -len(differing), stored.answer.made


def distance(one: Sizes, other: Sizes) -> float:
    """The distance of two problems of a family: steps of two, over all sizes."""
    return sum(
        abs(math.log2(max(1, a)) - math.log2(max(1, b))) for a, b in zip(one, other, strict=True)
    )


def transferred(config: Config, sizes: Sizes, problem: Problem, device: Device) -> Config:
    """A config measured at some sizes as it serves a problem of other sizes."""
    if sizes == sizes_of(problem):
        return config
    measured = problem.at(*sizes)
    found: Config = family_of(config).at_sizes(config, measured, problem, device)
    return found


def origin(stored: Stored, named: str = "") -> str:
    """The origin of a record, and what it promises, in words.

    named: what the record is called; its file without one.
    """
    answer = stored.answer
    gain = f"{answer.decision.speedup:.2f}x the static default"
    file = f"{answer.key.family()}/{answer.key.sizes}.json"
    kept = f"{stored.layer.name} record {named or file}"
    if answer.made:
        kept += f" of {answer.made[:10]}"
    elsewhere = f"other {', '.join(stored.differing)}" if stored.differing else ""
    if stored.how == "hit":
        return f"tuned: {gain}; {kept}"
    if stored.how == "hint":
        return f"hint, tuned with {elsewhere}: {gain} there; {kept}"
    text = f"nearest, tuned for {stored.sizes}"
    return f"{text}{' with ' * bool(elsewhere)}{elsewhere}: {gain} there; {kept}"


# Fields that say how a config is compiled, as a config is that is told nothing: which assembler a
# default takes depends on what is installed.
TOOLCHAIN_FIELDS = {"ptxas": "", "merge_consumers": True}


def same_tiles(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two configs, as `encode` gives them, differ at most in how they are compiled."""
    return all(
        one.get(name) == other.get(name) for name in (one.keys() | other) - TOOLCHAIN_FIELDS.keys()
    )


def recorded_default(record: Record) -> Config:
    """The static default of a record's time."""
    return record.trials[record.decision.default].config


def outdated(record: Record | None, today: Config) -> str:
    """Why a record's winner may be slower than today's static default; "" where it was faster.

    A record says that its winner beat the static default of its time, or that nothing did. Of
    another config that has become the default since, it says nothing.

    record: None where its trials cannot be read. today: the default of the record's own sizes.
    """
    if record is None:
        return "its trials cannot be read, and so not which static default it was raced against"
    was = encode(recorded_default(record))
    now = encode(today)
    if same_tiles(was, now):
        return ""
    words = was["type"], describe(recorded_default(record)), now["type"], describe(today)
    told = "its default was {} {}, which is no longer the static default: that is {} {}"
    return told.format(*words)
