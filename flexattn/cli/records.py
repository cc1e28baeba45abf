"""`flexattn show`, `merge` and `replay-study`: records that are there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flexattn.cli import options
from flexattn.cli.selection import places, recorded_kind, users
from flexattn.cli.terminal import cell, say, say_json, wide_console
from flexattn.errors import CacheError, InputError
from flexattn.kernels.choose.registry import short
from flexattn.records.codec import decode_record
from flexattn.records.record import Answer, Record
from flexattn.records.store import Store, merge
from flexattn.tuning.race import replay_study

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
            table.add_row(
                "default" if each["default"] else f"{each['speedup']:.3f}",
                "" if each["default"] else f"{each['p_value']:.1g}",
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
    for conflict in done.conflicts:
        say(f"conflict: {conflict}")
    for path, why in done.refused:
        say(f"refused: {path}: {why}", err=True)
    say(
        f"{done.written} written to {target}, {done.kept} kept as they were, "
        f"{len(done.conflicts)} conflicts"
    )


def records_of(paths: Sequence[Path]) -> Iterator[tuple[Path, Record | CacheError]]:
    """The records of files and directories; of a file in a directory also what is wrong with it.

    Raises InputError for a named file that is no record, and for a path that is not there.
    """
    for path in paths:
        if path.is_dir():
            yield from Store(path).entries()
            continue
        try:
            yield path, decode_record(path.read_bytes())
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}", "a record is a file") from error
        except CacheError as error:
            raise InputError(
                f"{path} is no record: {error.got}", error.rule, "name a file that the tuner wrote"
            ) from error


def replay_records(asked: options.ReplayStudy) -> None:
    """As `flexattn replay-study` is asked."""
    count = same = 0
    for path, record in records_of(asked.paths):
        if isinstance(record, CacheError):
            raise record
        again, stored = replay_study(record), record.decision
        agrees = (
            (again.winner, again.default) == (stored.winner, stored.default)
            and math.isclose(again.speedup, stored.speedup, rel_tol=1e-9)
            and math.isclose(again.p_value, stored.p_value, rel_tol=1e-6, abs_tol=1e-12)
        )
        count, same = count + 1, same + agrees
        winner = short(record.trials[again.winner].config)
        say(f"{'same' if agrees else 'DIFFERENT'}: {record.title}: {winner}, {again.why}")
        if not agrees:
            say(f"  stored: {stored.why} ({path})")
    if not count:
        listed = ", ".join(map(str, asked.paths))
        raise InputError(f"no measured record in {listed}", "a decision is made from samples")
    say(f"{same} of {count} decisions are the same")
    if same < count:
        raise typer.Exit(1)
