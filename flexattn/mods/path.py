"""A mod by its import path, package.module:function or file.py:function, called if a factory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexattn.errors import FlexAttnError, InputError
from flexattn.util.text import did_you_mean


def load_path(path: str, arguments: Sequence[object] = ()) -> Callable[..., Any]:
    """The object at the path; with arguments, its result for them. The module's code runs.

    Modules of the current folder are found too. Raises InputError that says what is missing.
    """
    module, _, attribute = path.rpartition(":")
    if not module or not attribute:
        raise InputError(
            f"{path!r} names no module" if attribute else f"{path!r} names no function",
            "a mod is named package.module:function or ./file.py:function",
        )
    where = _file(Path(module)) if module.endswith(".py") else _module(module)
    value = _attribute(where, attribute, path)
    if arguments:
        try:
            value = value(*arguments)
        except FlexAttnError:
            raise
        except Exception as error:
            shown = ", ".join(map(str, arguments))
            raise InputError(
                f"{path}({shown}): {_said(error)}", "the arguments are those of the factory"
            ) from error
    if not callable(value):
        raise InputError(f"{path} is a {type(value).__name__}", "a mod can be called")
    found: Callable[..., Any] = value
    return found


def role_of(path: str, value: Callable[..., Any], hint: str = "") -> str:
    """ "score" or "mask", by the number of arguments; raises InputError where that cannot tell."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError as error:
        rule = "a mod is a function whose arguments can be counted: of some built in they cannot"
        raise InputError(f"{path}: {error}", rule, "call it in a function of yours") from error
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
    mine = sys.modules.setdefault(path.stem, module) is module
    try:
        with _importing(str(path)):
            spec.loader.exec_module(module)
    except InputError:
        if mine:
            del sys.modules[path.stem]
        raise
    return module


@contextmanager
def _importing(module: str) -> Iterator[None]:
    """Turns an error or exit of a module's own code into an InputError with its last line."""
    try:
        yield
    except FlexAttnError:
        raise
    except ModuleNotFoundError as error:
        raise InputError(
            f"cannot import {module!r}: {error}",
            "the part before ':' is a module that can be imported from this folder",
            _near(module) or "run it where the module is, or set PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, SyntaxError) else f" ({last.filename}:{last.lineno})"
        raise InputError(
            f"cannot import {module!r}: {_said(error)}{place}",
            "the part before ':' is a module, whose code runs to its end",
        ) from error


def _near(module: str) -> str:
    """The module of the same package that was meant; "" where none is near."""
    package, _, last = module.rpartition(".")
    found = getattr(sys.modules.get(package), "__path__", ())
    return did_you_mean(last, [each.name for each in pkgutil.iter_modules(found)])


def _said(error: BaseException) -> str:
    """An exception as Python's last line of a traceback says it."""
    return "".join(traceback.format_exception_only(error)).strip()


def _module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.startswith(".") or "/" in name:
        rule = "the part before ':' is a module, or a file that ends with .py"
        raise InputError(f"{name!r} is no module", rule)
    with _importing(name):
        return importlib.import_module(name)


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
