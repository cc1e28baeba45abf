"""Which modules of this package a module reaches by imports, and their sources without comments.

Both are read from text by regular expressions, at the first lookup of every process: Python's own
parser takes twenty times as long. tests/unit/records/test_closure.py holds them to what it sees.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_NAME = _PACKAGE.name
# Strings, comments, and line ends with what goes behind them: a docstring, which follows a colon,
# a comment that has the line alone, and nothing. Each alternative begins with a character of its
# own, so that the scan for the next one is quick.
_LONG = r'""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
_BARE = re.compile(
    rf'"(?:{_LONG}|[^"\\\n]*(?:\\.[^"\\\n]*)*")'
    r"|'(?:''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''|[^'\\\n]*(?:\\.[^'\\\n]*)*')"
    r"|#[^\n]*"
    rf'|\n(?:(?<=:\n)[ ]*r?"{_LONG}(?=\n)|[ ]*#[^\n]*|(?=\n))',
    re.DOTALL,
)
_CHECKED_ONLY = re.compile(r"^([ ]*)if TYPE_CHECKING:\n(?:\1[ ]+[^\n]*\n|\n)+", re.MULTILINE)
_FROM = re.compile(rf"from {_NAME}([\w.]*) import (?:\(([^)]*)\)|([^\n]+))")
_WHOLE = re.compile(rf"import {_NAME}([\w.]*)")


def bare(source: str) -> str:
    """Python source without docstrings, comments and empty lines; other strings keep theirs."""
    # Behind a colon of its own, a file begins as a function does.
    return _BARE.sub(_string, f":\n{source}")[1:].replace("  \n", "\n").lstrip("\n")


def _string(found: re.Match[str]) -> str:
    return text if (text := found[0])[0] in "\"'" else ""


def imports_of(source: str) -> set[tuple[str, str]]:
    """What bare source imports of this package, in functions too: (module, name or "").

    What the type checker alone imports is not among it.
    """
    if "TYPE_CHECKING" in source:
        source = _CHECKED_ONLY.sub("", source)
    found = {(_NAME + each[1], "") for each in _WHOLE.finditer(source) if _begins(each)}
    for each in _FROM.finditer(source):
        if _begins(each):
            names = (name.split() for name in (each[2] or each[3]).split(","))
            found |= {(_NAME + each[1], words[0]) for words in names if words}
    return found


def _begins(found: re.Match[str]) -> bool:
    """Whether a match has nothing but its indent before it in its line."""
    start = found.start()
    return not found.string[found.string.rfind("\n", 0, start) + 1 : start].strip()


def module_path(module: str) -> Path | None:
    """The file of a module of this package, by its dotted name; None where there is none."""
    place = _PACKAGE.joinpath(*module.split(".")[1:])
    if (file := place.with_suffix(".py")).is_file():
        return file
    return whole if (whole := place / "__init__.py").is_file() else None


def closure(roots: Iterable[str], stop: Collection[str] = ()) -> dict[str, str]:
    """Every module that `roots` reach by imports, they among them, with its bare source, sorted.

    A name that a package passes on is followed to the module that defines it: importing the
    package for it reaches no other. stop: modules that are left out, with what they alone reach.
    """
    found: dict[str, str] = {}
    todo = list(roots)
    while todo:
        module = todo.pop()
        if module not in found and module not in stop:
            found[module], reached = _read(module)
            todo += reached
    return dict(sorted(found.items()))


@lru_cache(maxsize=512)
def _read(module: str) -> tuple[str, frozenset[str]]:
    """A module's bare source, and the modules that define what it imports."""
    path = module_path(module)
    assert path is not None, f"{module} is no module of this package"
    source = bare(path.read_text(encoding="utf-8"))
    homes = {home(*each) for each in imports_of(source)}
    return source, frozenset(homes - {module})


@lru_cache(maxsize=1024)
def home(module: str, name: str) -> str:
    """The module that defines a name which is imported from `module`."""
    path = module_path(module)
    if not name or path is None or path.name != "__init__.py":
        return module
    if module_path(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    for source, passed in imports_of(bare(path.read_text(encoding="utf-8"))):
        if passed == name:
            return home(source, passed)
    return module
