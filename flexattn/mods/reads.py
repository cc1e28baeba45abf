"""Reads: the names a function's bytecode looks up, each with the attributes it goes on to read."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType

Attributes = tuple[tuple[str, ...], ...]

# What these hold is taken to be constant, apart from the arguments they are given.
LIBRARIES = frozenset(
    (
        *("torch", "numpy", "math", "cmath", "builtins", "operator", "functools", "itertools"),
        *("collections", "dataclasses", "enum", "abc", "typing", "types", "copy", "contextlib"),
    )
)

# Functions of torch that tell how the process is set, with no argument.
SWITCHES = frozenset(
    (
        *("is_grad_enabled", "is_inference_mode_enabled", "is_anomaly_enabled"),
        *("get_default_device", "get_float32_matmul_precision", "get_num_threads"),
        "are_deterministic_algorithms_enabled",
    )
)

_OBSCURE = frozenset(["eval", "exec", "globals", "locals", "vars", "__import__", "open", "input"])
# With these, code reads attributes whose names it does not spell, or that need not be there.
_DYNAMIC = frozenset(["getattr", "hasattr", "attrgetter", "__dict__", "__getattribute__"])
_HANDLERS = frozenset(["PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH"])


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Everything a code object can see of the world outside its frame.

    Each root comes with the chains of attributes read from it; the empty chain says that the
    value itself goes on to where bytecode cannot be followed. `arguments` are chains rooted at
    parameters, by name. Not `trusted`: the code looks up names that no scan can know.
    `names`: every name and text in the code, so every attribute that it spells; `dynamic`: it may
    read others. `forgiving`: an attribute may be absent, and the code goes on. `switches`: those
    of SWITCHES that it names.
    """

    code: CodeType
    globals: tuple[tuple[str, Attributes], ...]
    cells: tuple[tuple[int, Attributes], ...]
    arguments: dict[str, Attributes]
    library: bool
    trusted: bool
    names: frozenset[str]
    dynamic: bool
    forgiving: bool
    switches: tuple[str, ...]


_known: dict[int, Reads] = {}


@lru_cache(maxsize=1024)
def is_library(name: str) -> bool:
    """Whether a module of this name is one of LIBRARIES, or inside one."""
    return name.partition(".")[0] in LIBRARIES


def reads_of(function: FunctionType) -> Reads:
    """The reads of a function's code, found once per code object."""
    code = function.__code__
    found = _known.get(id(code))
    if found is None:
        if len(_known) > 4096:
            _known.clear()
        module = str(function.__globals__.get("__name__", ""))
        found = _known[id(code)] = _scan(code, is_library(module))
    return found


def _scan(code: CodeType, library: bool) -> Reads:
    globals_: dict[str, dict[tuple[str, ...], None]] = {}
    locals_: dict[str, dict[tuple[str, ...], None]] = {}
    trusted = _collect(code, globals_, locals_)
    cells = {name: i for i, name in enumerate(code.co_freevars)}
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    codes = list(nested(code))
    names = frozenset(name for each in codes for name in _names(each))
    dynamic = not names.isdisjoint(_DYNAMIC)
    return Reads(
        code=code,
        globals=() if library else tuple((name, tuple(c)) for name, c in globals_.items()),
        cells=tuple((cells[name], tuple(c)) for name, c in locals_.items() if name in cells),
        arguments={name: tuple(c) for name, c in locals_.items() if name in arguments},
        library=library,
        trusted=trusted or library,
        names=names,
        dynamic=dynamic,
        forgiving=dynamic or any(map(_catches, codes)),
        switches=() if library else tuple(sorted(names & SWITCHES)),
    )


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions it defines."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from nested(inner)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from (each for each in code.co_consts if isinstance(each, str))


def _catches(code: CodeType) -> bool:
    return any(step.opname in _HANDLERS for step in dis.get_instructions(code))


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
            trusted &= is_library(str(name))
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
