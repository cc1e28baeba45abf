"""The objects of a verb: rows of workload files and presets, a device, folders of records."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from flexattn.cli.options import (
    DTYPE_CHOICES,
    EFFORTS,
    GPUS,
    KIND_CHOICES,
    OFFLINE,
    RECORDED_CHOICES,
    Chosen,
    choice,
    device_name,
)
from flexattn.cli.terminal import say
from flexattn.device import INTERPRETER, NEURON, Device, detect, named
from flexattn.errors import InputError
from flexattn.kernels.base.family import Effort
from flexattn.presets import files
from flexattn.problem import Kind
from flexattn.records.layers import RecordLayer, layers
from flexattn.records.store import Store
from flexattn.settings import current
from flexattn.tuning.workload import Row, Workload, read
from flexattn.util.text import DTYPE_NAMES, did_you_mean


def writable(folder: Path) -> Path:
    """The folder, made where it is missing; raises OSError where no file can be made in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return folder


def users() -> Path:
    """The user's own directory of records, which `tune` writes to unless told otherwise."""
    return current().cache_dir / "records"


def places(folders: Sequence[Path] = ()) -> list[RecordLayer]:
    """The given directories, else every layer there is, those shipped for all devices included.

    Raises InputError for a directory that does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such directory", "records are kept in directories")
    if folders:
        return [RecordLayer(str(folder), Store(folder)) for folder in folders]
    return list(layers())


_ALL = "all"


def workload(path: Path, allow: Sequence[str]) -> Workload:
    """A workload's file; raises InputError, with advice where the path is a preset's name.

    allow: modules whose functions it may name.
    """
    if str(path) in (*files(), _ALL) and not path.exists():
        raise InputError(f"{path}: no such file", "it is a preset", f"name it: --preset {path}")
    return read(path, allow)


def presets(names: Sequence[str]) -> list[Workload]:
    """Presets by name, "all" for every one; raises InputError that lists those there are."""
    known = files()
    chosen: list[str] = []
    for name in names:
        if name != _ALL and name not in known:
            raise InputError(
                f"no preset is called {name!r}",
                f"there are {', '.join(known)}",
                did_you_mean(name, known) or "--preset all takes every one",
            )
        chosen += list(known) if name == _ALL else [name]
    return [read(known[name]) for name in dict.fromkeys(chosen)]


def chosen_rows(
    chosen: Chosen, plans: bool = False, backward: bool = True, more: Sequence[Row] = ()
) -> list[Row]:
    """Rows of the files and presets whose titles `only` finds; raises InputError for none.

    plans: those of a DecodePlan, too. backward: those of gradients. more: rows in front of them.
    """
    if not (chosen.named or more):
        raise InputError(
            "no workload",
            "a verb works on a MOD, on workload files or on --preset",
            "list the presets with flexattn tune --list-presets",
        )
    given = [workload(path, chosen.allow_module or ()) for path in chosen.workload or ()]
    workloads = [*given, *presets(chosen.preset or ())]
    rows = [*more, *(row for each in workloads for row in each.rows)]
    rows = [row for row in rows if plans or row.served is None]
    rows = [row for row in rows if backward or row.kind != "backward"]
    if not rows or any(row not in rows for row in more):
        raise InputError(
            "only plans, or only gradients",
            "this verb works on calls of flex_attention, without gradients",
            "python -m bench.backward times gradients",
        )
    only = chosen.only
    if only is None:
        return rows
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise InputError(f"--only {only!r}: {error}", "it is a regular expression") from error
    found = [row for row in rows if pattern.search(row.title)]
    if not found:
        raise InputError(
            f"--only {only!r} finds none of {len(rows)} rows",
            "it is looked for in titles",
            f"the first one is called {rows[0].title!r}",
        )
    return found


def effort_of(name: str) -> Effort:
    """An effort by name; raises InputError that lists them."""
    return cast(Effort, choice("--effort", name, EFFORTS))


def kind_of(name: str) -> Kind:
    """A kind by name; raises InputError for another."""
    return cast(Kind, choice("--kind", name, KIND_CHOICES))


def recorded_kind(name: str) -> Kind:
    """A kind of records by name; raises InputError for another."""
    return cast(Kind, choice("--kind", name, RECORDED_CHOICES))


def dtype_named(name: str) -> str:
    """A dtype by its name or a short form of it; raises InputError for another."""
    return choice("--dtype", name, DTYPE_CHOICES, DTYPE_NAMES)


def device_here() -> Device | None:
    """The device that this process can time on: a GPU, the interpreter where it is asked for."""
    if current().interpret:
        return INTERPRETER
    return detect(torch.device("cuda")) if torch.cuda.is_available() else None


def gpus_like(device: Device) -> list[int]:
    """The visible GPUs that are this device: a host may have others, which say nothing of it."""
    every = range(torch.cuda.device_count())
    return [gpu for gpu in every if detect(torch.device("cuda", gpu)).name == device.name]


def device_of(
    name: str | None, *, assumed: bool = True, neuron: bool = False, compiled: bool = False
) -> Device:
    """The device that is named, else this machine's, else an H200 (see `say_assumed`).

    assumed: without it, no device is an error. neuron: those of AWS Neuron are among the names.
    compiled: kernels are compiled for it, so the interpreter is none.
    """
    here = device_here()
    if compiled and here == INTERPRETER:
        here = None
    if name is None:
        if here is not None:
            return here
        if not assumed:
            raise InputError(
                "no --device, and torch sees no GPU",
                "name a device, or run on a machine with a GPU",
                f"name one: {', '.join(GPUS)}",
            )
        return named(OFFLINE)
    if here is not None and here.name == name:
        return here
    known = device_name(name)
    if neuron and known in NEURON:
        return NEURON[known]
    if known == INTERPRETER.name and not compiled:
        return INTERPRETER
    return here if here is not None and here.name == known else named(known)


def say_assumed(name: str | None, target: Device) -> None:
    """Say on stderr that a device is neither named nor here."""
    here = device_here()
    if name is None and (here is None or here.name != target.name):
        say(f"device: {target.name}, assumed: no GPU was found; --device names another", err=True)
