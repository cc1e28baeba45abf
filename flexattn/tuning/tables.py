"""Tables of a TOML, YAML or JSON file, read with errors that name file, table and key."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from flexattn.errors import CacheError, InputError, UnsupportedError
from flexattn.util.files import read_regular
from flexattn.util.text import did_you_mean

# Bytes of a file; values in it, each as often as YAML's aliases repeat it; tables in tables.
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 2**20, 200_000, 16


def read_file(path: Path) -> Mapping[str, Any]:
    """The mapping in a .toml, .yaml, .yml or .json file.

    Raises InputError where it cannot be read, UnsupportedError where its reader is not installed.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise InputError(f"{path}: suffix {path.suffix!r}", f"it is one of {', '.join(_READERS)}")
    try:
        raw = read_regular(path, _MOST_BYTES, links=True)
        text = (raw or b"").decode()
    except CacheError as error:
        rule = f"a workload is a readable file of at most {_MOST_BYTES} bytes"
        raise InputError(error.got, rule) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: {error}", "a workload is text in UTF-8") from error
    if raw is None:
        raise InputError(f"{path}: No such file or directory", "a workload is a readable file")
    try:
        _check_brackets(text)
        data = reader(text)
    except ValueError as error:
        raise InputError(f"{path}: {error}", f"the file is valid {path.suffix[1:]}") from error
    except RecursionError:
        raise _too_deep(str(path)) from None
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: a {type(data).__name__}", "the file holds a table")
    return data


def _check_brackets(text: str) -> None:
    """Raise RecursionError as a reader would: that of YAML takes hours of many brackets first."""
    depth = 0
    for found in re.finditer(r"[\[\]{}]", text):
        depth += 1 if found[0] in "[{" else -1
        if depth > _DEEPEST:
            raise RecursionError


def _too_deep(where: str) -> InputError:
    """The error for tables or lists too deep inside others."""
    rule = f"at most {_DEEPEST} tables or lists stand inside each other"
    return InputError(f"{where}: tables or lists that are nested deeper", rule)


def check_values(data: object, where: str) -> None:
    """Raise InputError for data of more values, or nested deeper, than any workload has."""
    left, level = _MOST_VALUES, [data]
    for _ in range(_DEEPEST):
        left -= len(level)
        if left < 0:
            raise InputError(f"{where}: more than {_MOST_VALUES} values", "a workload has fewer")
        level = [inner for each in level for inner in islice(_inside(each), left + 1)]
    if level:
        raise _too_deep(where)


def _inside(value: object) -> Iterable[object]:
    return (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )


def _toml(text: str) -> Any:
    for name in ("tomllib", "tomli"):  # tomllib comes with Python 3.11
        try:
            return importlib.import_module(name).loads(text)
        except ModuleNotFoundError:
            continue
    raise UnsupportedError("a .toml file", "Python 3.10 reads none", "pip install tomli")


def _yaml(text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "a .yaml file", "PyYAML reads it", "pip install 'flexattn[yaml]', or write it as .toml"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": _toml, ".yaml": _yaml, ".yml": _yaml, ".json": json.loads,
}  # fmt: skip


class Table:
    """One table with its place in the file; each getter checks what it gives."""

    def __init__(self, data: object, where: str, keys: Sequence[str]) -> None:
        self.where = where
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: {data!r}", "it is a table")
        self._data = data
        for key in data:
            if key not in keys:
                raise InputError(
                    f"{where}: {key!r}",
                    f"its keys are {', '.join(keys)}",
                    did_you_mean(str(key), keys),
                )

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def wrong(self, key: str, rule: str, do: str = "") -> InputError:
        """The error for a key's value."""
        shown = repr(self._data.get(key))
        shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
        return InputError(f"{self.where}: {key} = {shown}", rule, do)

    def _one(self, key: str, good: Callable[[Any], bool], rule: str) -> Any:
        """A value that is good, or None where the key is missing."""
        value = self._data.get(key)
        if value is not None and not good(value):
            raise self.wrong(key, rule)
        return value

    def _list(self, key: str, good: Callable[[Any], bool], rule: str) -> tuple[Any, ...]:
        """A list, or one value, each of them good; () where the key is missing."""
        found = tuple(_listed(self._data.get(key, ())))
        if not all(map(good, found)) or (key in self and not found):
            raise self.wrong(key, rule)
        return found

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = self._data.get(key, default)
        if not _is_text(value):
            raise self.wrong(key, "it is a string")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, or one of them."""
        rule = "it is a string, or a list of strings"
        return self._list(key, _is_text, rule)

    def numbers(self, key: str, least: int = 1) -> tuple[int, ...]:
        """A list of integers, or one of them; () where the key is missing."""
        rule = f"it is an integer of at least {least}, or a list of them"
        return self._list(key, lambda each: _integer(each, least), rule)

    def number(self, key: str) -> float | None:
        """A number, or None where the key is missing."""
        found = self._one(key, lambda x: type(x) in (int, float), "it is a number")
        return None if found is None else float(found)

    def flag(self, key: str) -> bool | None:
        """True, False, or None where the key is missing."""
        found: bool | None = self._one(key, lambda x: type(x) is bool, "it is true or false")
        return found

    def rows(self, key: str, width: int) -> tuple[tuple[int, ...], ...]:
        """A list of lists of `width` integers."""

        def good(row: Any) -> bool:
            return len(_listed(row)) == width and all(_integer(n, 1) for n in row)

        rule = f"it is a list of lists of {width} integers above 0"
        return tuple(map(tuple, self._list(key, good, rule)))

    def any(self, key: str, default: object = None) -> Any:
        """The value as it stands in the file."""
        return self._data.get(key, default)

    def tables(self, key: str, keys: Sequence[str]) -> list[Table]:
        """The tables of an array of tables."""
        value = self._data.get(key, ())
        if not isinstance(value, list) or not value:
            raise self.wrong(key, f"it is an array of tables, [[{key}]]")
        return [Table(each, f"{self.where}: {key}[{i}]", keys) for i, each in enumerate(value)]


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _integer(value: object, least: int) -> bool:
    return type(value) is int and value >= least
