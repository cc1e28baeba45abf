"""`flexattn report`: tuned records as one page that opens anywhere, and its pictures."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flexattn.cli.arguments import AsJson
from flexattn.cli.places import places
from flexattn.cli.terminal import say, say_json
from flexattn.errors import InputError
from flexattn.report.collect import from_files, from_stores
from flexattn.report.page import Written, write
from flexattn.report.rivals import read


def report(
    records: Annotated[
        list[Path] | None, typer.Argument(help="Record files, or folders of them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the PNGs.")] = Path("report"),
    cache: Annotated[
        list[Path] | None,
        typer.Option(help="A directory of records, all of them shown; repeatable."),
    ] = None,
    bench: Annotated[
        list[Path] | None, typer.Option(help="JSON of a bench: ours beside torch; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about tuned records: spaces, what mattered, limits, why winners won."""
    if records and cache:
        raise InputError("record files and --cache", "the page shows one or the other")
    benches = [read(path) for path in bench or ()]
    faults: tuple[str, ...] = ()
    if records:
        found = from_files(records)
    elif cache or not benches:
        found, faults = from_stores(layer.store for layer in places(cache or ()))
    else:
        found = ()
    written = write(found, out, benches)
    if as_json:
        say_json(_facts(written, faults))
    else:
        _print(written, faults)


def _facts(written: Written, faults: tuple[str, ...]) -> dict[str, Any]:
    return {
        "page": str(written.page),
        "pictures": [str(path) for path in written.pictures],
        "problems": [_plain(asdict(summary)) for summary in written.summaries],
        "faults": list(faults),
    }


def _plain(value: Any) -> Any:
    """The same with null for a number that is none: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(written: Written, faults: tuple[str, ...]) -> None:
    for each in written.summaries:
        gain = f"{each.speedup:.3f}x {each.winner.config}" if each.speedup else each.winner.config
        word = gain if each.changed else f"default {each.default.config}"
        say(f"{each.title}: {word}")
    for fault in faults:
        say(f"left out: {fault}")
    say(f"{written.page} and {len(written.pictures)} pictures")
