"""`flexattn export`: a directory to ship: checked records and binaries, or a plug-in's kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from flexattn.cli import options
from flexattn.cli.selection import chosen_rows, device_of, places
from flexattn.cli.terminal import say
from flexattn.cli.watch import Watch
from flexattn.deploy import binaries
from flexattn.device import Device
from flexattn.errors import CacheError, FlexAttnError, InputError
from flexattn.kernels.choose.defaults import reasons
from flexattn.measure.task import Task
from flexattn.records.layers import RecordLayer
from flexattn.records.record import Key, Record, key_of
from flexattn.records.store import Store, better
from flexattn.tuning.tasks import distinct, mods_of, tasks
from flexattn.tuning.tuner import Plugin, plugin_of


@dataclass(frozen=True)
class Shipped:
    """The outcome of an export: the number of records, and those left out, each with a reason."""

    written: int
    refused: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def run(args: options.Export) -> None:
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
    _print(args.out, target, done, built)
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


def _print(out: Path, target: Device, done: Shipped, built: binaries.Exported | None) -> None:
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
