"""Reads: the names a function's bytecode looks up, each with the attributes it goes on to read."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import CodeType, FunctionType

__all__ = ["LIBRARIES", "Attributes", "Reads", "reads_of"]

Attributes = tuple[tuple[str, ...], ...]

# What these hold is taken to be constant, apart from the arguments they are given.
LIBRARIES = frozenset(
    (
        *("torch", "numpy", "math", "cmath", "builtins", "operator", "functools", "itertools"),
        *("collections", "dataclasses", "enum", "abc", "typing", "types", "copy", "contextlib"),
    )
)

_OBSCURE = frozenset(["eval", "exec", "globals", "locals", "vars", "__import__", "open", "input"])


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Everything a code object can see of the world outside its frame.

    Each root comes with the chains of attributes read from it; the empty chain says that the
    value itself goes on to where bytecode cannot be followed. `arguments` are chains rooted at
    parameters, by name. Not `trusted`: the code looks up names that no scan can know.
    """

    code: CodeType
    globals: tuple[tuple[str, Attributes], ...]
    cells: tuple[tuple[int, Attributes], ...]
    arguments: dict[str, Attributes]
    library: bool
    trusted: bool


_known: dict[int, Reads] = {}


def reads_of(function: FunctionType) -> Reads:
    """The reads of a function's code, found once per code object."""
    code = function.__code__
    found = _known.get(id(code))
    if found is None:
        if len(_known) > 4096:
            _known.clear()
        module = str(function.__globals__.get("__name__", ""))
        found = _known[id(code)] = _scan(code, module.partition(".")[0] in LIBRARIES)
    return found


def _scan(code: CodeType, library: bool) -> Reads:
    globals_: dict[str, dict[tuple[str, ...], None]] = {}
    locals_: dict[str, dict[tuple[str, ...], None]] = {}
    trusted = _collect(code, globals_, locals_)
    cells = {name: i for i, name in enumerate(code.co_freevars)}
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return Reads(
        code=code,
        globals=() if library else tuple((name, tuple(c)) for name, c in globals_.items()),
        cells=tuple((cells[name], tuple(c)) for name, c in locals_.items() if name in cells),
        arguments={name: tuple(c) for name, c in locals_.items() if name in arguments},
        library=library,
        trusted=trusted or library,
    )


def _collect(
    code: CodeType,
    globals_: dict[str, dict[tuple[str, ...], None]],
    locals_: dict[str, dict[tuple[str, ...], None]],
) -> bool:
    """Add the chains of a code object and of the functions it defines; whether all was clear."""
    trusted = True
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("EXTENDED_ARG", "CACHE")]
    for place, step in enumerate(steps):
        name, op = step.argval, step.opname
        if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            globals_.setdefault(name, {})[_attributes(steps, place)] = None
            trusted &= name not in _OBSCURE
            if name == "super" and code.co_varnames:  # which reads the first argument unseen
                locals_.setdefault(code.co_varnames[0], {})[()] = None
        elif op.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT")):
            *escaped, last = name if isinstance(name, tuple) else (name,)
            locals_.setdefault(last, {})[_attributes(steps, place)] = None
            for other in escaped:
                locals_.setdefault(other, {})[()] = None
        elif op.startswith("STORE_FAST") and "LOAD" in op:
            locals_.setdefault(name[-1], {})[()] = None
        elif op == "IMPORT_NAME":
            trusted &= str(name).partition(".")[0] in LIBRARIES
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            nested: dict[str, dict[tuple[str, ...], None]] = {}
            trusted &= _collect(inner, globals_, nested)
            for name in inner.co_freevars:
                locals_.setdefault(name, {}).update(nested.get(name, {}))
    return trusted


def _attributes(steps: list[dis.Instruction], place: int) -> tuple[str, ...]:
    names: list[str] = []
    for step in steps[place + 1 :]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        names.append(step.argval)
    return tuple(names)
