"""The MOD of the command line: a name of the catalogue, or a function by its import path."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexattn import catalogue
from flexattn.catalogue import CASES
from flexattn.cli.choices import ROLES, choice
from flexattn.errors import InputError
from flexattn.mods.path import load_path, role_of
from flexattn.problem import DTYPES, Shape
from flexattn.util.near import did_you_mean


@dataclass(frozen=True)
class ResolvedMods:
    """What a MOD stands for: a score_mod, a mask_mod, or a case of the catalogue with both."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


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
