"""`flexattn show`, `merge`, `replay-study`, `export` and `report`: records that are there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flexattn.cli import options
from flexattn.cli.selection import chosen_rows, device_of, places, recorded_kind, users, writable
from flexattn.cli.terminal import cell, say, say_json, wide_console
from flexattn.cli.watch import Watch
from flexattn.deploy import binaries
from flexattn.device import Device
from flexattn.errors import CacheError, FlexAttnError, InputError
from flexattn.kernels.choose.defaults import reasons
from flexattn.kernels.choose.registry import short
from flexattn.measure.task import Task
from flexattn.records.codec import decode_record
from flexattn.records.layers import RecordLayer
from flexattn.records.record import Answer, Key, Record, key_of
from flexattn.records.store import Store, better, merge
from flexattn.report.page import Written, in_order, write_page
from flexattn.report.rivals import BenchResults, read_bench
from flexattn.tuning.race import replay_study
from flexattn.tuning.tasks import distinct, mods_of, tasks
from flexattn.tuning.tuner import Plugin, plugin_of

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


@dataclass(frozen=True)
class Shipped:
    """The outcome of an export: the number of records, and those left out, each with a reason."""

    written: int
    refused: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def export_records(args: options.Export) -> None:
    """Run `flexattn export`."""
    target = device_of(args.device, assumed=False, neuron=True)
    if (plugin := plugin_of(target.backend)) is not None:
        _write_kernels(args, plugin, target)
        return
    chosen: list[Task] | None = None
    mods: list[tuple[Callable[..., Any], str]] = []
    if args.named:
        rows = chosen_rows(args)
        chosen, _ = distinct(tasks(rows, target))
        if args.with_binaries:
            pairs = (zip(mods_of(row), ("score", "mask"), strict=True) for row in rows)
            mods = [(fn, kind) for pair in pairs for fn, kind in pair if fn is not None]
    elif args.with_binaries or args.only:
        raise InputError(
            "--with-binaries or --only without a workload",
            "a record does not hold the mods that a kernel is compiled from",
            "name it: --preset llama3-8b, or --workload FILE",
        )
    done = collect(places(args.source or ()), Store(args.out), target, chosen)
    built = None
    if args.with_binaries and chosen is not None:
        with Watch(len(chosen)) as watch:
            served = [task for task in chosen if task.kind != "backward"]
            into = args.out, Store(args.out)
            built = binaries.export(served, target, *into, mods, progress=watch.lane())
    _print_export(args.out, target, done, built)
    if done.missing:
        raise typer.Exit(1)


def _write_kernels(args: options.Export, plugin: Plugin, device: Device) -> None:
    """A folder for each problem of a workload, named as the problem."""
    if not args.named or args.with_binaries or args.source:
        raise InputError(
            f"an export for {device.name} without a workload, or with --from or --with-binaries",
            "it has kernels that are compiled where they run, and no records",
            "name a workload: --preset sd21, or --workload FILE",
        )
    written = refused = 0
    for task in tasks(chosen_rows(args, plans=False, backward=False), device):
        folder = args.out / re.sub(r"[^\w.]+", "-", task.title)
        try:
            plugin.write_kernel(task, folder)
        except FlexAttnError as error:
            say(f"refused: {task.title}: {error.got}", err=True)
            refused += 1
        else:
            written += 1
    say(f"{written} kernels written to {args.out}")
    if refused:
        raise typer.Exit(1)


def collect(
    layers: Sequence[RecordLayer], into: Store, device: Device, chosen: Sequence[Task] | None
) -> Shipped:
    """Copy a device's records, of some tasks or all; of two for one key the better one."""
    wanted = None if chosen is None else {key_of(task.problem): task for task in chosen}
    written, refused, had = 0, [], set[Key]()
    for layer in layers:
        for path, entry in layer.store.entries():
            if isinstance(entry, CacheError):
                refused.append((str(path), entry.line))
                continue
            if entry.environment.device != device.name or (
                wanted is not None and entry.key not in wanted
            ):
                continue
            task = wanted[entry.key] if wanted is not None else None
            found = _faults(entry, task, device)
            if found:
                refused.append((str(path), found))
                continue
            had.add(entry.key)
            written += into.write(entry, replace=better)
    missing = [task.title for key, task in (wanted or {}).items() if key not in had]
    return Shipped(written, tuple(refused), tuple(missing))


def _faults(record: Record, task: Task | None, device: Device) -> str:
    """Why a record must not be shipped; "" if it may."""
    winner = record.trials[record.decision.winner]
    if winner.failed is not None or (winner.gate is not None and not winner.gate.passed):
        return "its winner did not pass the accuracy gate"
    if task is None:
        return ""
    return "; ".join(reasons(record.config, task.problem.structure, device))


def _print_export(
    out: Path, target: Device, done: Shipped, built: binaries.Exported | None
) -> None:
    for path, why in done.refused:
        say(f"refused: {path}: {why}", err=True)
    for title in done.missing:
        say(f"no record: {title}", err=True)
    if done.written:
        say(f"{done.written} records written to {out}; use it with FLEXATTN_CACHE={out}")
    else:
        say(f"0 records written to {out}: none here is of {target.name}, or better than there")
    if built is not None:
        say(
            f"{built.kernels} kernels, {built.block_masks} for block masks, {built.mods} mods; "
            f"use them with FLEXATTN_BINARIES={out}"
        )
        for name in built.traced:
            say(f"traced at its first call: {name}", err=True)


def report_records(args: options.Report) -> None:
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
    _print_report(written, benches)


def _counted(problems: int, benches: Sequence[BenchResults]) -> str:
    """The page's subject in words; with a bench alone that is its rows, and no problems."""
    words = [f"{problems} problems"] * bool(problems or not benches)
    return ", ".join(words + [f"{len(bench.rows)} rows of {bench.name}" for bench in benches])


def _print_report(written: Written, benches: Sequence[BenchResults]) -> None:
    for each in written.summaries:
        gain = f"{each.speedup:.3f}" if each.changed and each.speedup else "default"
        say(f"{gain:>7}  {each.title}: {each.winner.config}")
    pictures = f", {len(written.pictures)} pictures beside it" if written.pictures else ""
    size = written.page.stat().st_size / 1e6
    found = _counted(len(written.summaries), benches)
    say(f"{written.page}: {found}, {size:.1f} MB{pictures}")
