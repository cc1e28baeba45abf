"""`flexattn show`: the tuned records there are, with filters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
from flexattn.records.layers import RecordLayer
from flexattn.records.record import Answer

# Columns of a screen that has room for all of a record.
WIDE = 120


@dataclass(frozen=True)
class Shown:
    """One record as `show` tells it.

    default: the static default is the winner. p_value: of the speedup over it.
    """

    title: str
    key: dict[str, Any]
    digest: str
    winner: dict[str, Any]
    short: str
    default: bool
    speedup: float
    p_value: float
    why: str
    provenance: str
    made: str
    environment: dict[str, Any]
    layer: str
    path: str


def run(asked: options.Show) -> None:
    """As `flexattn show` is asked."""
    which = None if asked.kind is None else recorded_kind(asked.kind)
    try:
        title = re.compile(asked.model or "")
    except re.error as error:
        got = f"--model {asked.model!r}: {error}"
        raise InputError(got, "it is a regular expression") from error
    found: list[Shown] = []
    devices: set[str] = set()
    broken: list[str] = []
    for layer, path, each in entries(places(asked.folders or ())):
        if isinstance(each, CacheError):
            broken.append(each.line)
            continue
        devices.add(each.environment.device)
        if (
            which in (None, each.key.kind)
            and (asked.device or "") in each.environment.device
            and title.search(each.title)
        ):
            found.append(shown(each, layer.name, path))
    if asked.as_json:
        answer = {"records": [asdict(each) for each in found], "invalid": broken}
        say_json(answer)
    else:
        _print(found, broken)
        if asked.device and devices and not any(asked.device in each for each in devices):
            say(f"none is of {asked.device!r}: there are records of {', '.join(sorted(devices))}")


def entries(
    layers: Sequence[RecordLayer],
) -> Iterator[tuple[RecordLayer, Path, Answer | CacheError]]:
    """Every record of some layers, or what is wrong with its file."""
    for layer in layers:
        for path, answer in layer.store.answers():
            yield layer, path, answer


def shown(answer: Answer, layer: str, path: Path) -> Shown:
    """What `show` says of a record."""
    decision = answer.decision
    return Shown(
        answer.title,
        asdict(answer.key),
        answer.key.digest(),
        asdict(answer.config),
        short(answer.config),
        decision.winner == decision.default,
        decision.speedup,
        decision.p_value,
        decision.why,
        answer.provenance,
        answer.made,
        asdict(answer.environment),
        layer,
        str(path),
    )


def _print(found: Sequence[Shown], broken: Sequence[str]) -> None:
    console = wide_console()
    groups: dict[tuple[str, str], list[Shown]] = {}
    for each in found:
        groups.setdefault((each.layer, Path(each.path).parent.parent.name), []).append(each)
    for (layer, folder), group in groups.items():
        here = group[0].environment
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
        for each in sorted(group, key=lambda shown: shown.title):
            key = each.key
            more = (
                f"B{key['B']} {key['q_len']}x{key['kv_len']}",
                f"{each.provenance} {each.made}",
            )
            table.add_row(
                "default" if each.default else f"{each.speedup:.3f}",
                "" if each.default or each.provenance == "model" else f"{each.p_value:.1g}",
                cell(each.title),
                cell(each.short),
                *(map(cell, more) if console.width >= WIDE else ()),
            )
        console.print(table)
    say(f"{len(found)} records")
    for line in broken:
        say(f"not a record: {line}", err=True)
