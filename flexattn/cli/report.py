"""`flexattn report`: tuned records as one page that opens anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from flexattn.cli import options
from flexattn.cli.records import records_of
from flexattn.cli.selection import places, writable
from flexattn.cli.terminal import say
from flexattn.cli.watch import Watch
from flexattn.errors import CacheError
from flexattn.records.record import Record
from flexattn.report.page import Written, in_order, write_page
from flexattn.report.rivals import BenchResults, read_bench


def run(args: options.Report) -> None:
    """Run `flexattn report`."""
    benches = [read_bench(path) for path in args.bench or ()]
    paths = args.records or []
    if not (paths or benches):
        paths = [root for each in places() if (root := each.store.root).is_dir()]
    found: list[Record] = []
    for _, each in records_of(paths):
        if isinstance(each, CacheError):
            say(f"left out: {each.line}", err=True)
        else:
            found.append(each)
    if found or benches:
        writable(args.out)
    with Watch(1) as watch:
        lane = watch.lane()
        lane.stage("report", len(found))
        if not watch.bars:
            watch.say(f"reporting on {_counted(len(found), benches)}")
        written = write_page(in_order(found), args.out, benches, as_png=args.png, say=lane.step)
    _print(written, benches)


def _counted(problems: int, benches: Sequence[BenchResults]) -> str:
    """The page's subject in words; with a bench alone that is its rows, and no problems."""
    words = [f"{problems} problems"] * bool(problems or not benches)
    return ", ".join(words + [f"{len(bench.rows)} rows of {bench.name}" for bench in benches])


def _print(written: Written, benches: Sequence[BenchResults]) -> None:
    for each in written.summaries:
        gain = f"{each.speedup:.3f}" if each.changed and each.speedup else "default"
        say(f"{gain:>7}  {each.title}: {each.winner.config}")
    pictures = f", {len(written.pictures)} pictures beside it" if written.pictures else ""
    size = written.page.stat().st_size / 1e6
    found = _counted(len(written.summaries), benches)
    say(f"{written.page}: {found}, {size:.1f} MB{pictures}")
