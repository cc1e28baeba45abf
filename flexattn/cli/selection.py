"""The objects of a verb: problems of MODs, rows of files and presets, a device, folders.

A MOD is a name of the catalogue, or a function by its import path.
"""

from __future__ import annotations

import ast
import errno
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from flexattn import catalogue
from flexattn.catalogue import CASES
from flexattn.cli.options import (
    DTYPE_CHOICES,
    EFFORTS,
    GPUS,
    KIND_CHOICES,
    LENGTH,
    OFFLINE,
    RECORDED_CHOICES,
    ROLES,
    AskedProblems,
    CallOptions,
    Chosen,
    choice,
    device_name,
)
from flexattn.cli.terminal import say
from flexattn.device import INTERPRETER, NEURON, Device, detect, named
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.options import Options
from flexattn.mods.path import load_path, role_of
from flexattn.presets import files
from flexattn.problem import DTYPES, ITEMSIZE, MAX_HEADS, MAX_LENGTH, Kind, Problem, Shape
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.records.layers import RecordLayer, layers
from flexattn.records.store import Store
from flexattn.runtime.build import unloaded
from flexattn.runtime.candidates import Choice
from flexattn.runtime.dispatch import chosen
from flexattn.settings import current
from flexattn.tuning.tasks import task_of
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


Mods: TypeAlias = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
CPU = torch.device("cpu")
# A problem depends on the device by its kind alone, which is named here.
NAMED = named("nvidia-h200")
_MOST = {
    "B": MAX_LENGTH, "Hq": MAX_HEADS, "Hkv": MAX_HEADS, "q_len": MAX_LENGTH, "kv_len": MAX_LENGTH,
    "D": MAX_HEAD_DIM, "Dv": MAX_HEAD_DIM, "block": MAX_LENGTH,
}  # fmt: skip


def problem_called(call: CallOptions, kv_len: int) -> Problem:
    """The problem with so many keys, and its mask's blocks; InputError says what exists."""
    kind = kind_of(call.kind)
    q_len = (1 if kind == "decode" else LENGTH) if call.q_len is None else call.q_len
    return task_of(row_called(call, call.mod, kind, (q_len, kv_len)), NAMED, CPU).problem


def asked_rows(asked: AskedProblems, plans: bool = True, backward: bool = True) -> list[Row]:
    """The rows of the MODs, workload files and presets that a command names.

    plans, backward: as for `chosen_rows`. Raises InputError as that and `row_called`.
    """
    keys = asked.q_len if asked.kv_len is None else asked.kv_len
    kind = None if asked.kind is None else kind_of(asked.kind)
    paths, rows = list(asked.workload or ()), []
    for each in asked.problems or ():
        plain = each.isidentifier() and each not in files() and not Path(each).exists()
        if ":" in each or plain:
            rows.append(row_called(asked, each, kind, (asked.q_len, keys)))
        else:
            paths.append(Path(each))
    if (paths or asked.preset) and not rows and asked.sized:
        raise InputError(
            "sizes beside a workload",
            "they are those of a MOD's call",
            "name a mod: flexattn tune causal --q-len 8192",
        )
    return chosen_rows(replace(asked, workload=paths), plans, backward, rows)


def row_called(
    call: CallOptions | AskedProblems, mod: str | None, kind: Kind | None, lengths: tuple[int, int]
) -> Row:
    """The row of a call with dense, aligned tensors of these lengths.

    Raises InputError for sizes that no call has and says what exists; reading its mods raises
    ModError.
    """
    dtype, block = dtype_named(call.dtype), call.block_size
    v_dim = call.head_dim if call.head_dim_v is None else call.head_dim_v
    found = re.fullmatch(r"(\d+)(?::(\d+))?", call.heads)
    if found is None:
        raise InputError(
            f"--heads {call.heads}",
            "it is query heads:key heads, as 32:8",
            "write two numbers with a colon, or one if they are equal",
        )
    heads = int(found[1]), int(found[2] or found[1])
    shape = Shape(call.batch, *heads, *lengths, call.head_dim, v_dim)
    check_sizes(dtype, shape, block)
    made = partial(resolve, mod or "noop", call.arg or (), call.role, shape, dtype)
    sizes = None, None, (block, block), None, ()
    return Row(mod or "no mods", kind, dtype, shape, *sizes, made=made)


def resolve(
    name: str, arguments: Sequence[str], role: str | None, shape: Shape, dtype: str
) -> Mods:
    """The score_mod and the mask_mod that a MOD stands for; a case of the catalogue may have both.

    arguments: of a factory. role: score or mask, where arity cannot tell. shape, dtype: of the
    call, whose lengths and dtype a case's captured tensors have. Raises InputError that says what
    exists.
    """
    if role is not None:
        role = choice("--as", role, ROLES)
    if ":" in name:
        return _imported(name, arguments, role)
    value = getattr(catalogue, name) if name in catalogue.__all__ else None
    factory = inspect.isfunction(value) and _called(value)
    if arguments:
        said = " ".join(f"--arg {each}" for each in arguments) if factory else "--arg 50.0"
        raise InputError(
            f"--arg with the catalogue's {name!r}",
            "arguments are for factories found by an import path",
            f"for instance: flexattn.catalogue:{name if factory else 'softcap'} {said}",
        )
    found = next((case for case in CASES if case.name == name), None)
    if found is None:
        names = [case.name for case in CASES]
        near = did_you_mean(name, names)
        raise InputError(
            f"no mod is called {name!r}" + (f": {near}" if near else ""),
            f"the catalogue has {', '.join(names)}",
            f"its function takes arguments: flexattn.catalogue:{name} --arg …"
            if factory
            else "name one of them, or a function of yours as package.module:function or "
            "./file.py:function",
        )
    s = shape
    known = next((each for each, name in DTYPES.items() if name == dtype), torch.bfloat16)
    built = found.make(s.B, s.Hq, s.Hkv, s.q_len, s.kv_len, torch.get_default_device(), known)
    return built.score_mod, built.mask_mod


def _called(function: Callable[..., Any]) -> bool:
    """True if a function returns a mod and is no mod itself."""
    return next(iter(inspect.signature(function).parameters), "") not in ("score", "b", "batch")


def _imported(name: str, arguments: Sequence[str], role: str | None) -> Mods:
    value = load_path(name, [word_value(text) for text in arguments])
    role = role or role_of(
        name, value, "call a factory with --arg, or say --as score or --as mask"
    )
    return (value, None) if role == "score" else (None, value)


def word_value(text: str) -> object:
    """A Python literal that a word of a command stands for; else the word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_sizes(dtype: str, shape: Shape, block: int) -> None:
    """Raise InputError for a dtype or sizes that no call has."""
    if dtype not in ITEMSIZE:
        raise InputError(f"dtype {dtype!r}", f"it is one of {', '.join(ITEMSIZE)}")
    if shape.Hkv < 1 or shape.Hq < 1 or shape.Hq % shape.Hkv:
        got = f"{shape.Hq} query heads and {shape.Hkv} key heads"
        raise InputError(got, "the query heads are a multiple of the key heads")
    sizes = asdict(shape) | {"block": block}
    if min(sizes.values()) < 1:
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(got, "sizes are at least 1")
    for name, size in sizes.items():
        if size > (most := _MOST[name]):
            raise InputError(f"{name}={size}", f"it is at most {most}, as in a call")


def compiled(problem: Problem, device: Device, options: Options) -> tuple[Choice, Any]:
    """The choice that dispatch makes, with the kernel compiled for a device that need not be here.

    Raises ConfigError where nothing fits, BuildError where nothing compiles, and UnsupportedError
    in a process that interprets.
    """
    if current().interpret:
        raise UnsupportedError(
            "FLEXATTN_INTERPRET=1, and a kernel to compile",
            "one process interprets or compiles, never both",
            "unset FLEXATTN_INTERPRET",
        )
    choice = chosen(problem, device, options, partial(unloaded, device=device))
    return choice, choice.kernels[0].compiled
