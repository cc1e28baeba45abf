"""Reads: the names a function's bytecode looks up, each with the attributes it goes on to read."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

Attributes = tuple[tuple[str, ...], ...]

# What these hold is taken to be constant, apart from the arguments they are given.
LIBRARIES = frozenset(
    (
        "torch numpy math cmath builtins operator functools itertools collections "
        "dataclasses enum abc typing types copy contextlib"
    ).split()
)

# Functions of torch that tell how the process is set, with no argument.
SWITCHES = frozenset(
    (
        "is_grad_enabled is_inference_mode_enabled is_anomaly_enabled get_default_device "
        "get_float32_matmul_precision get_num_threads are_deterministic_algorithms_enabled"
    ).split()
)

_OBSCURE = frozenset(["eval", "exec", "globals", "locals", "vars", "__import__", "open", "input"])
# With these, code reads attributes whose names it does not spell, or that need not be there.
_DYNAMIC = frozenset(["getattr", "hasattr", "attrgetter", "__dict__", "__getattribute__"])
_NO_STEPS = ("EXTENDED_ARG", "CACHE")
_HANDLERS = frozenset(["PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH"])
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LOCAL = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT", "STORE_FAST_LOAD")


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Everything that a function's code, and code inside of it, can see of the world outside.

    Each name comes with the chains of attributes read from it; the empty chain says that the
    value itself goes on to where bytecode cannot be followed. `cells` have their index and name,
    `owner` are the chains of the first parameter. `positional`: the parameters that may have
    defaults. `reason`: why a scan cannot know what the code looks up; empty where it can.
    `names`: every name and text in the code, so every attribute that it spells; `dynamic`: it may
    read others. `forgiving`: an attribute may be absent, and the code goes on. `switches`: those
    of SWITCHES that it names.
    """

    code: CodeType
    globals: tuple[tuple[str, Attributes], ...]
    cells: tuple[tuple[int, str, Attributes], ...]
    owner: Attributes
    positional: tuple[str, ...]
    library: bool
    reason: str
    names: frozenset[str]
    dynamic: bool
    forgiving: bool
    switches: tuple[str, ...]


_known: dict[int, Reads] = {}


def is_library(name: str) -> bool:
    """True if a module of this name is one of LIBRARIES, or inside one."""
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
    names: set[str] = set()
    forgiving, reason = False, ""
    for each in _nested(code):
        names.update(each.co_names)
        names.update(text for text in each.co_consts if isinstance(text, str))
        steps = [i for i in dis.get_instructions(each) if i.opname not in _NO_STEPS]
        for place, step in enumerate(steps):
            name, op = step.argval, step.opname
            forgiving |= op in _HANDLERS
            if op in _GLOBAL:
                globals_.setdefault(name, {})[_attributes(steps, place)] = None
                if name in _OBSCURE:
                    reason = f"its code calls {name}()"
                if name == "super" and each.co_varnames:  # which reads the first argument unseen
                    locals_.setdefault(each.co_varnames[0], {})[()] = None
            elif op.startswith(_LOCAL):
                *escaped, last = name if isinstance(name, tuple) else (name,)
                locals_.setdefault(last, {})[_attributes(steps, place)] = None
                for other in escaped:
                    locals_.setdefault(other, {})[()] = None
            elif op == "IMPORT_NAME" and not is_library(str(name)):
                reason = f"its code imports {name}"
    cells = enumerate(code.co_freevars)
    return Reads(
        code=code,
        globals=() if library else tuple((name, tuple(c)) for name, c in globals_.items()),
        cells=tuple((i, name, tuple(locals_[name])) for i, name in cells if name in locals_),
        owner=tuple(locals_.get("".join(code.co_varnames[:1]), ())),
        positional=code.co_varnames[: code.co_argcount],
        library=library,
        reason="" if library else reason,
        names=frozenset(names),
        dynamic=not names.isdisjoint(_DYNAMIC),
        forgiving=forgiving or not names.isdisjoint(_DYNAMIC),
        switches=() if library else tuple(sorted(names & SWITCHES)),
    )


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions it defines."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _nested(inner)


def _attributes(steps: list[dis.Instruction], place: int) -> tuple[str, ...]:
    names: list[str] = []
    for step in steps[place + 1 :]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        names.append(step.argval)
    return tuple(names)
