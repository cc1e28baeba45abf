"""The MOD of the command line and the problem of its call.

A MOD is a name of the catalogue, or a function by its import path.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexattn import catalogue
from flexattn.catalogue import CASES
from flexattn.cli.arguments import LENGTH, ROLES, CallOptions, choice
from flexattn.cli.offline import check_sizes, problem_of
from flexattn.cli.selection import dtype_named, kind_of
from flexattn.errors import InputError
from flexattn.mods.path import load_path, role_of
from flexattn.problem import DTYPES, Problem, Shape
from flexattn.util.near import did_you_mean


@dataclass(frozen=True)
class ResolvedMods:
    """What a MOD stands for: a score_mod, a mask_mod, or a case of the catalogue with both."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def problem_called(call: CallOptions, kv_len: int) -> Problem:
    """The problem with so many keys, and its mask's blocks; InputError says what exists."""
    kind, dtype = kind_of(call.kind), dtype_named(call.dtype)
    q_len = (1 if kind == "decode" else LENGTH) if call.q_len is None else call.q_len
    v_dim = call.head_dim if call.head_dim_v is None else call.head_dim_v
    shape = Shape(call.batch, call.hq, call.hkv, q_len, kv_len, call.head_dim, v_dim)
    check_sizes(dtype, shape, call.block_size)
    mods = resolve(call.mod, call.arg or (), call.role, shape, dtype)
    return problem_of(kind, dtype, shape, mods.score_mod, mods.mask_mod, call.block_size)


def resolve(
    name: str, arguments: Sequence[str], role: str | None, shape: Shape, dtype: str
) -> ResolvedMods:
    """Find a MOD; `arguments` call a factory, and `role` says score or mask where arity cannot.

    shape, dtype: of the call, whose lengths and dtype a case's captured tensors have. Raises
    InputError that says what exists.
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
    built = found.make(s.B, s.Hq, s.Hkv, s.q_len, s.kv_len, "cpu", known)
    return ResolvedMods(built.score_mod, built.mask_mod)


def _called(function: Callable[..., Any]) -> bool:
    """Whether it makes a mod, and is none itself."""
    return next(iter(inspect.signature(function).parameters), "") not in ("score", "b", "batch")


def _imported(name: str, arguments: Sequence[str], role: str | None) -> ResolvedMods:
    value = load_path(name, [_literal(text) for text in arguments])
    role = role or role_of(
        name, value, "call a factory with --arg, or say --as score or --as mask"
    )
    return ResolvedMods(score_mod=value) if role == "score" else ResolvedMods(mask_mod=value)


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
