"""`flexattn replay-study`: the decision of a record or a study, made again from its samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from flexattn.cli import options
from flexattn.cli.places import places
from flexattn.cli.terminal import say, say_json
from flexattn.errors import CacheError, InputError
from flexattn.kernels.choose.registry import short
from flexattn.records.codec import decode_record
from flexattn.records.record import Decision, Record
from flexattn.tune.decide import replay_study as decided
from flexattn.tune.replay import ReplayMeasurer, load_study
from flexattn.tune.tuner import tune_subject


@dataclass(frozen=True)
class Replayed:
    """One decision beside the one that was stored; stored: None for a study, which has none."""

    path: str
    title: str
    same: bool
    stored: Decision | None
    replayed: Decision
    winner: str


def run(asked: options.ReplayStudy) -> None:
    """As `flexattn replay-study` is asked."""
    found = [each for path in asked.paths for each in _replayed(path)]
    if not found:
        listed = ", ".join(map(str, asked.paths))
        raise InputError("no record and no study", f"there is one in {listed}")
    if asked.as_json:
        say_json({"decisions": [asdict(each) for each in found]})
    else:
        for each in found:
            word = "made" if each.stored is None else "same" if each.same else "DIFFERENT"
            say(f"{word}: {each.title}: {each.winner}, {each.replayed.why}")
            if not each.same and each.stored is not None:
                say(f"  stored: {each.stored.why} ({each.path})")
    if not all(each.same for each in found):
        raise typer.Exit(1)


def _replayed(path: Path) -> Iterator[Replayed]:
    if path.is_dir():
        for layer in places([path]):
            for file, entry in layer.store.entries():
                if isinstance(entry, CacheError):
                    raise entry
                if entry.provenance != "model":  # it has no samples
                    yield _record(file, entry)
        return
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "it is a readable file") from error
    try:
        record = decode_record(raw)
    except CacheError as no_record:
        try:
            yield _study(path)
        except CacheError as no_study:
            raise InputError(
                f"{path} is no record and no study",
                f"a record: {no_record.line}; a study: {no_study.line}",
            ) from no_study
        return
    if record.provenance == "model":
        raise InputError(f"{path} was ranked by a model", "a decision is made from samples")
    yield _record(path, record)


def _record(path: Path, record: Record) -> Replayed:
    again, stored = decided(record), record.decision
    same = (again.winner, again.default) == (stored.winner, stored.default)
    same = same and math.isclose(again.speedup, stored.speedup, rel_tol=1e-9)
    same = same and math.isclose(again.p_value, stored.p_value, rel_tol=1e-6, abs_tol=1e-12)
    winner = short(record.trials[again.winner].config)
    return Replayed(str(path), record.title, same, stored, again, winner)


def _study(path: Path) -> Replayed:
    study = load_study(path)
    measurer = ReplayMeasurer(study)
    record = tune_subject(study.subject, measurer, measurer.build)
    return Replayed(str(path), study.title, True, None, record.decision, short(record.config))
