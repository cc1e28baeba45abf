"""`flexattn report`: tuned records as one page that opens anywhere, and its pictures."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from flexattn.cli import options
from flexattn.cli.places import places
from flexattn.cli.terminal import say, say_json
from flexattn.errors import InputError
from flexattn.report.collect import from_files, from_stores
from flexattn.report.page import Written, write
from flexattn.report.rivals import read


def report(asked: options.Report) -> None:
    """As `flexattn report` is asked."""
    if asked.records and asked.cache:
        raise InputError("record files and --cache", "the page shows one or the other")
    benches = [read(path) for path in asked.bench or ()]
    faults: tuple[str, ...] = ()
    if asked.records:
        found = from_files(asked.records)
    elif asked.cache or not benches:
        found, faults = from_stores(layer.store for layer in places(asked.cache or ()))
    else:
        found = ()
    written = write(found, asked.out, benches)
    if asked.as_json:
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
