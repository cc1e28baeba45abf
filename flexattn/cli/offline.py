"""A Problem from a MOD and numbers instead of tensors, its configs, and kernels compiled offline.

A MOD is a name of the catalogue, or a function by its import path.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from flexattn import catalogue
from flexattn.catalogue import CASES
from flexattn.cli.options import LENGTH, ROLES, AskedProblems, CallOptions, choice
from flexattn.cli.selection import chosen_rows, dtype_named, kind_of
from flexattn.device import Device, named
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.choose.options import Options
from flexattn.mods.path import load_path, role_of
from flexattn.presets import files
from flexattn.problem import DTYPES, ITEMSIZE, MAX_HEADS, MAX_LENGTH, Kind, Problem, Shape
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.runtime.build import unloaded
from flexattn.runtime.candidates import Choice
from flexattn.runtime.dispatch import chosen
from flexattn.settings import current
from flexattn.tuning.tasks import task_of
from flexattn.tuning.workload import Row
from flexattn.util.text import did_you_mean

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
