"""`flexattn show`, `merge` and `replay-study`: records that are there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flexattn.cli import options
from flexattn.cli.selection import places, recorded_kind, users
from flexattn.cli.terminal import cell, say, say_json, wide_console
from flexattn.errors import CacheError, InputError
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.registry import short
from flexattn.records.codec import decode_record
from flexattn.records.record import Answer, Decision, Record
from flexattn.records.store import Conflict, merge
from flexattn.tuning.race import replay_study
from flexattn.tuning.replay import ReplayMeasurer, load_study
from flexattn.tuning.tuner import tune_subject

# Columns of a screen that has room for all of a record.
WIDE = 120


def show_records(args: options.Show) -> None:
    """Run `flexattn show`."""
    which = None if args.kind is None else recorded_kind(args.kind)
    try:
        title = re.compile(args.model or "")
    except re.error as error:
        got = f"--model {args.model!r}: {error}"
        raise InputError(got, "it is a regular expression") from error
    found: list[dict[str, Any]] = []
    devices: set[str] = set()
    broken: list[str] = []
    for layer in places(args.folders or ()):
        for path, each in layer.store.answers():
            if isinstance(each, CacheError):
                broken.append(each.line)
                continue
            device, kind = each.environment.device, each.key.kind
            devices.add(device)
            asked_for = which in (None, kind) and (args.device or "") in device
            if asked_for and title.search(each.title):
                found.append(_row(each, layer.name, path))
    if args.as_json:
        say_json({"records": found, "invalid": broken})
    else:
        _print_groups(found, broken)
        if args.device and devices and not any(args.device in each for each in devices):
            say(f"none is of {args.device!r}: there are records of {', '.join(sorted(devices))}")


def _row(answer: Answer, layer: str, path: Path) -> dict[str, Any]:
    """One record: default says that the static default won, p_value is of the speedup over it."""
    decision = answer.decision
    return {
        "title": answer.title,
        "key": asdict(answer.key),
        "digest": answer.key.digest(),
        "winner": asdict(answer.config),
        "short": short(answer.config),
        "default": decision.winner == decision.default,
        "speedup": decision.speedup,
        "p_value": decision.p_value,
        "why": decision.why,
        "provenance": answer.provenance,
        "made": answer.made,
        "environment": asdict(answer.environment),
        "layer": layer,
        "path": str(path),
    }


def _print_groups(found: Sequence[dict[str, Any]], broken: Sequence[str]) -> None:
    console = wide_console()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in found:
        folder = Path(each["path"]).parent.parent.name
        groups.setdefault((each["layer"], folder), []).append(each)
    for (layer, folder), group in groups.items():
        here = group[0]["environment"]
        say(
            f"{layer} {folder}: Triton {here['triton'] or '-'}, torch {here['torch']}, "
            f"driver {here['driver'] or '-'}, {'graphs' if here['graph'] else 'eager'}, "
            f"{'cold' if here['cold_l2'] else 'warm'} L2"
        )
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        # On a narrow screen the texts wrap, and the numbers stay.
        for name in ("speedup", "p"):
            table.add_column(name, justify="right", min_width=7, no_wrap=True)
        for name in ("title", "winner"):
            table.add_column(name, overflow="fold")
        if console.width >= WIDE:
            table.add_column("key", no_wrap=True)
            table.add_column("made by", no_wrap=True)
        for each in sorted(group, key=lambda row: str(row["title"])):
            key = each["key"]
            more = (
                f"B{key['B']} {key['q_len']}x{key['kv_len']}",
                f"{each['provenance']} {each['made']}",
            )
            no_test = each["default"] or each["provenance"] == "model"
            table.add_row(
                "default" if each["default"] else f"{each['speedup']:.3f}",
                "" if no_test else f"{each['p_value']:.1g}",
                cell(each["title"]),
                cell(each["short"]),
                *(map(cell, more) if console.width >= WIDE else ()),
            )
        console.print(table)
    say(f"{len(found)} records")
    for line in broken:
        say(f"not a record: {line}", err=True)


def merge_records(asked: options.Merge) -> None:
    """As `flexattn merge` is asked."""
    roots = [layer.store.root for layer in places(asked.sources)]
    target = asked.out or users()
    done = merge(roots, target)
    if asked.as_json:
        told = {
            "directory": str(target),
            "written": done.written,
            "kept": done.kept,
            "conflicts": [_told(each) for each in done.conflicts],
            "refused": [{"path": str(path), "why": why} for path, why in done.refused],
        }
        say_json(told)
        return
    for conflict in done.conflicts:
        say(f"conflict: {conflict}")
    for path, why in done.refused:
        say(f"refused: {path}: {why}", err=True)
    say(
        f"{done.written} written to {target}, {done.kept} kept as they were, "
        f"{len(done.conflicts)} conflicts"
    )


def _told(conflict: Conflict) -> dict[str, Any]:
    return {
        "title": conflict.kept.title,
        "sizes": str(conflict.kept.key.sizes),
        "kept": describe(conflict.kept.config),
        "kept_from": str(conflict.kept_from),
        "dropped": describe(conflict.dropped.config),
        "dropped_from": str(conflict.dropped_from),
    }


@dataclass(frozen=True)
class Replayed:
    """One decision beside the one that was stored; stored: None for a study, which has none."""

    path: str
    title: str
    same: bool
    stored: Decision | None
    replayed: Decision
    winner: str


def replay_records(asked: options.ReplayStudy) -> None:
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
        say(f"{sum(each.same for each in found)} of {len(found)} decisions are the same")
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
    again, stored = replay_study(record), record.decision
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
