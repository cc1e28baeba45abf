"""A mod by its import path, package.module:function or file.py:function, called if a factory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexattn.errors import InputError
from flexattn.util.near import did_you_mean


def load(path: str, arguments: Sequence[object] = ()) -> Callable[..., Any]:
    """What the path names; with arguments, what it returns for them. It runs the module's code.

    Modules of the current folder are found too. Raises InputError that says what is missing.
    """
    module, _, attribute = path.rpartition(":")
    if not module:
        raise InputError(
            f"{path!r} has no ':'",
            "a mod is named package.module:function or ./file.py:function",
            "name its module",
        )
    where = _file(Path(module)) if module.endswith(".py") else _module(module)
    value = _attribute(where, attribute, path)
    if arguments:
        try:
            value = value(*arguments)
        except TypeError as error:
            shown = ", ".join(map(str, arguments))
            raise InputError(
                f"{path}({shown}): {error}", "the arguments are those of the factory"
            ) from error
    if not callable(value):
        raise InputError(f"{path} is a {type(value).__name__}", "a mod can be called")
    found: Callable[..., Any] = value
    return found


def role_of(path: str, value: Callable[..., Any], hint: str = "") -> str:
    """ "score" or "mask", by the number of arguments; raises InputError where that cannot tell."""
    parameters = inspect.signature(value).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    required = sum(p.default is p.empty for p in parameters)
    roles = [role for role, n in (("mask", 4), ("score", 5)) if required <= n <= count]
    if len(roles) != 1:
        raise InputError(
            f"{path} takes {count} arguments",
            "score_mod(score, b, h, q_idx, kv_idx) has five, mask_mod(b, h, q_idx, kv_idx) four",
            hint,
        )
    return roles[0]


def _file(path: Path) -> Any:
    """The module of a file, which may import those beside it."""
    if not path.is_file():
        files = (str(each) for each in path.parent.glob("*.py"))
        raise InputError(
            f"{path}: no such file",
            "the part before ':' is a Python file or a module",
            did_you_mean(str(path), files) or "name it from the folder that you are in",
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # inspect finds a function's source by its module.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


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


def _attribute(module: Any, attribute: str, path: str) -> Any:
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [each for each in dir(value) if not each.startswith("_")]
            raise InputError(
                f"{path}: no {part!r} there",
                "the part after ':' is a name in that module",
                did_you_mean(part, public),
            )
        value = getattr(value, part)
    return value
