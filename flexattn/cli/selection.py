"""What a verb works on: rows of workload files and presets, and the device they are for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from flexattn.device import INTERPRETER, NEURON, Device, detect, named
from flexattn.errors import InputError
from flexattn.kernels.base.family import Effort
from flexattn.presets import files
from flexattn.problem import Kind
from flexattn.records.renderers import RecordKind
from flexattn.settings import current
from flexattn.tune.workload import Row, Workload, read

ALL = "all"
EFFORTS: tuple[Effort, ...] = get_args(Effort)
KINDS: tuple[Kind, ...] = get_args(Kind)


def presets(names: Sequence[str]) -> list[Workload]:
    """Presets by name, "all" for every one; raises InputError that lists those there are."""
    known = files()
    chosen: list[str] = []
    for name in names:
        if name != ALL and name not in known:
            close = difflib.get_close_matches(name, known)
            raise InputError(
                f"no preset is called {name!r}",
                f"there are {', '.join(known)}",
                f"did you mean {close[0]}?" if close else "--preset all takes every one",
            )
        chosen += list(known) if name == ALL else [name]
    return [read(known[name]) for name in dict.fromkeys(chosen)]


def rows_of(
    workloads: Sequence[Path],
    names: Sequence[str],
    only: str | None,
    plans: bool = False,
    backward: bool = True,
) -> list[Row]:
    """Rows of the files and presets whose titles `only` finds; raises InputError for none.

    plans: those of a DecodePlan, too. backward: those of gradients.
    """
    if not workloads and not names:
        raise InputError(
            "no workload",
            "a verb works on workload files or on --preset",
            "list the presets with flexattn tune --list-presets",
        )
    rows = [row for each in [*map(read, workloads), *presets(names)] for row in each.rows]
    rows = [row for row in rows if plans or row.served is None]
    rows = [row for row in rows if backward or row.kind != "backward"]
    if not rows:
        raise InputError("rows of serving plans alone", "this verb works on calls")
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
    for each in EFFORTS:
        if name == each:
            return each
    raise InputError(f"--effort {name}", f"it is one of {', '.join(EFFORTS)}")


def kind_of(name: str) -> Kind:
    """A kind by name; raises InputError for another."""
    for each in KINDS:
        if name == each:
            return each
    raise InputError(f"--kind {name}", f"it is {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def recorded_kind(name: str) -> RecordKind:
    """A kind of records by name; raises InputError for another."""
    return "serving" if name == "serving" else kind_of(name)


def device_here() -> Device | None:
    """The device that this process can time on: a GPU, the interpreter where it is asked for."""
    if current().interpret:
        return INTERPRETER
    return detect(torch.device("cuda")) if torch.cuda.is_available() else None


def gpus_like(device: Device) -> list[int]:
    """The visible GPUs that are this device: a host may have others, which say nothing of it."""
    every = range(torch.cuda.device_count())
    return [gpu for gpu in every if detect(torch.device("cuda", gpu)).name == device.name]


def device_of(name: str | None, fallback: str | None = None, *, neuron: bool = False) -> Device:
    """The device that is named, else the one that is here, else the fallback.

    neuron: those of AWS Neuron are among the names.
    """
    if neuron and name in NEURON:
        return NEURON[name]
    if name == INTERPRETER.name:
        return INTERPRETER
    here = device_here()
    if name is None:
        if here is not None:
            return here
        if fallback is not None:
            return named(fallback)
        raise InputError(
            "no --device, and torch sees no GPU", "a device is here or named", "name one"
        )
    return here if here is not None and here.name == name else named(name)
