"""`flexattn show`: the tuned records there are, with filters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flexattn.cli import options
from flexattn.cli.places import places
from flexattn.cli.selection import recorded_kind
from flexattn.cli.terminal import cell, say, say_json, wide_console
from flexattn.errors import CacheError, InputError
from flexattn.kernels.choose.registry import short
from flexattn.records.record import Answer

# Columns of a screen that has room for all of a record.
WIDE = 120


def run(args: options.Show) -> None:
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
        _print(found, broken)
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


def _print(found: Sequence[dict[str, Any]], broken: Sequence[str]) -> None:
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
