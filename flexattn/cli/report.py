"""`flexattn report`: tuned records as one page that opens anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flexattn.cli import options
from flexattn.cli.selection import places, writable
from flexattn.cli.terminal import say, say_json
from flexattn.cli.watch import Watch
from flexattn.errors import InputError
from flexattn.report.page import Written, from_files, from_stores, write_page
from flexattn.report.rivals import BenchResults, read_bench


def run(args: options.Report) -> None:
    """Run `flexattn report`."""
    if args.records and args.cache:
        raise InputError("record files and --cache", "the page shows one or the other")
    benches = [read_bench(path) for path in args.bench or ()]
    faults: tuple[str, ...] = ()
    if args.records:
        found = from_files(args.records)
    elif args.cache or not benches:
        found, faults = from_stores(layer.store for layer in places(args.cache or ()))
    else:
        found = ()
    if found or benches:
        writable(args.out)
    with Watch(1) as watch:
        lane = watch.lane()
        lane.stage("report", len(found))
        if not watch.bars:
            watch.say(f"reporting on {_counted(len(found), benches)}")
        written = write_page(found, args.out, benches, as_png=args.png, say=lane.step)
    if args.as_json:
        say_json(_facts(written, faults))
    else:
        _print(written, faults, benches)


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


def _counted(problems: int, benches: Sequence[BenchResults]) -> str:
    """The page's subject in words; with a bench alone that is its rows, and no problems."""
    words = [f"{problems} problems"] * bool(problems or not benches)
    return ", ".join(words + [f"{len(bench.rows)} rows of {bench.name}" for bench in benches])


def _print(written: Written, faults: tuple[str, ...], benches: Sequence[BenchResults]) -> None:
    for each in written.summaries:
        gain = f"{each.speedup:.3f}" if each.changed and each.speedup else "default"
        say(f"{gain:>7}  {each.title}: {each.winner.config}")
    for fault in faults:
        say(f"left out: {fault}")
    pictures = f", {len(written.pictures)} pictures beside it" if written.pictures else ""
    size = written.page.stat().st_size / 1e6
    found = _counted(len(written.summaries), benches)
    say(f"{written.page}: {found}, {size:.1f} MB{pictures}")
