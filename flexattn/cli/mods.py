"""The MOD of the command line: a name of the catalogue, or package.module:function."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexattn.catalogue import CASES
from flexattn.errors import InputError

# Kernels do not depend on the lengths of captured tensors: a case is built at a small shape.
LENGTH = 64


@dataclass(frozen=True)
class Mods:
    """What a MOD stands for: a score_mod, a mask_mod, or a case of the catalogue with both."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def resolve(name: str, arguments: Sequence[str], role: str | None, heads: tuple[int, int]) -> Mods:
    """Find a MOD; `arguments` call a factory, and `role` says score or mask where arity cannot.

    Raises InputError that says what exists.
    """
    if role not in (None, "score", "mask"):
        raise InputError(f"--as {role}", "it is score or mask")
    if ":" in name:
        return _imported(name, arguments, role)
    if arguments:
        raise InputError(
            f"--arg with the catalogue's {name!r}",
            "arguments are for factories found by an import path",
            "for instance: flexattn.catalogue:softcap --arg 50.0",
        )
    found = next((case for case in CASES if case.name == name), None)
    if found is None:
        names = [case.name for case in CASES]
        close = difflib.get_close_matches(name, names)
        raise InputError(
            f"no mod is called {name!r}" + (f": did you mean {close[0]}?" if close else ""),
            f"the catalogue has {', '.join(names)}",
            "name one of them, or a function of yours as package.module:function",
        )
    built = found.make(1, heads[0], heads[1], LENGTH, LENGTH, "cpu", torch.float32)
    return Mods(built.score_mod, built.mask_mod)


def _imported(name: str, arguments: Sequence[str], role: str | None) -> Mods:
    module_name, _, attribute = name.partition(":")
    value = _attribute(_module(module_name), attribute, name)
    if arguments:
        try:
            value = value(*map(_literal, arguments))
        except TypeError as error:
            raise InputError(
                f"{name}({', '.join(arguments)}): {error}", "--arg gives a factory's arguments"
            ) from error
    if not callable(value):
        raise InputError(f"{name} is a {type(value).__name__}", "a mod can be called")
    role = role or _role(name, value)
    return Mods(score_mod=value) if role == "score" else Mods(mask_mod=value)


def _module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"cannot import {name!r}: {error}",
            "the part before ':' is a module that can be imported from this folder",
            "run it where the module is, or set PYTHONPATH",
        ) from error


def _attribute(module: Any, attribute: str, name: str) -> Any:
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [each for each in dir(value) if not each.startswith("_")]
            close = difflib.get_close_matches(part, public)
            raise InputError(
                f"{name}: no {part!r} there",
                "the part after ':' is a name in that module",
                f"did you mean {close[0]}?" if close else "",
            )
        value = getattr(value, part)
    return value


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _role(name: str, value: Callable[..., Any]) -> str:
    parameters = inspect.signature(value).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    required = sum(p.default is p.empty for p in parameters)
    roles = [role for role, n in (("mask", 4), ("score", 5)) if required <= n <= count]
    if len(roles) != 1:
        raise InputError(
            f"{name} takes {count} arguments",
            "score_mod(score, b, h, q_idx, kv_idx) has five, mask_mod(b, h, q_idx, kv_idx) four",
            "call a factory with --arg, or say --as score or --as mask",
        )
    return roles[0]
