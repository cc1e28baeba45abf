"""Mods as data: a Mod as JSON and back, exactly, and files of mods that another process traced.

    <root>/mods/<digest>.json     the Mod of a callable with these numbers, as data

They are read from an explicitly named directory alone. A file is data: it cannot run code, but it
says what a callable means, so a directory deserves the trust that the program itself gets.

A digest is an Identity as a name that is equal in every process where a trace would be equal. Each
object of this process is replaced by what it is made of: code by its instructions, constants and
names, of nested code too; a value by its value; a thing of torch or of Python by its name, with
their versions over all. What has no such form (an object of a user's class, a C function of
another package) gives no digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flexattn.errors import CacheError
from flexattn.mods.expr import (
    MAX_NODES,
    RESULTS,
    VARS,
    Buffer,
    Expr,
    Mod,
    Value,
    fingerprint,
    numbered,
)
from flexattn.mods.identity import Identity
from flexattn.mods.operators import taught
from flexattn.mods.ops import OPS, is_float, is_int, name_of
from flexattn.mods.reads import Reads, is_library
from flexattn.mods.site import Variant, interned
from flexattn.settings import say_once
from flexattn.util.files import publish, read_regular, sealed, unsealed

_SCHEMA = 3
_MAX_BYTES = 2**21
# Code that names one of these may give another expression on another kind of device.
_OF_DEVICES = frozenset("device get_device is_cuda is_cpu is_meta is_xpu is_mps cpu".split())
_PLAIN = (int, float, complex, bool, str, bytes, range, type(None), type(Ellipsis))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.Size)


def read_variant(root: Path, kind: str, identity: Identity) -> tuple[Variant, bool] | None:
    """The trace recorded of such callables with these numbers, and whether sizes are a part of it.

    A file that is no record is a miss.
    """
    path = _path(root, identity)
    try:
        raw = None if path is None else read_regular(path, _MAX_BYTES, trusted=True)
        return None if raw is None else _variant(unsealed(raw), kind, identity)
    except CacheError as error:
        say_once(f"{path}: not used, the mod is traced: {error.line}")
        return None


def write_variant(root: Path, identity: Identity, variant: Variant, sized: bool) -> bool:
    """Record a trace; sized: it holds for these sizes of the captured tensors alone.

    False where the identity means nothing in another process.
    """
    path = _path(root, identity)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, sealed(_told(variant, identity, sized)))
    return path is not None


def _path(root: Path, identity: Identity) -> Path | None:
    name = digest(identity)
    return None if name is None else root / "mods" / f"{name}.json"


def _told(variant: Variant, identity: Identity, sized: bool) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "shapes": [list(each.shape) for each in identity.tensors] if sized else None,
        "mod": to_data(variant.mod),
        "tensors": list(variant.tensors),
    }


def _variant(data: Any, kind: str, identity: Identity) -> tuple[Variant, bool] | None:
    """The trace of such data, if it fits what the callable captures; None for other sizes."""
    with _checked("a record of a callable"):
        sized = data["shapes"] is not None
        if sized and data["shapes"] != [list(each.shape) for each in identity.tensors]:
            return None
        mod, places = from_data(data["mod"]), tuple(data["tensors"])
        _need(min(places, default=0) >= 0, "it reads captured tensors")
        tensors = [identity.tensors[i] for i in places]
        buffers = tuple(Buffer(name_of(t.dtype), t.dim()) for t in tensors)
        _need((mod.kind, mod.buffers, mod.scalars) == (kind, buffers, ()), "slots have its dtypes")
        variant = Variant(interned(kind, mod.expr, mod.buffers, ()), places, ())
        _need_written(data, _told(variant, identity, sized))
    return variant, sized


class _Unknown(Exception):
    """Something that cannot be told to another process."""


def digest(identity: Identity) -> str | None:
    """64 hexadecimal digits; None where nothing can vouch for the same trace elsewhere.

    Covers all but tensors' contents and sizes, and the device that tensors are on, unless the code
    asks for it: a mod recorded on the CPU is known on a GPU.
    """
    if identity.reason:
        return None
    parts = [_here(), *(f"{type(each).__name__} {each!r}" for each in identity.scalars)]
    devices: list[str] = []
    names: set[str] = set()
    items = iter(identity.key)
    try:
        for item in items:
            if item is torch.Tensor:  # how Identity announces a captured tensor
                parts += ("tensor", str(next(items)), str(next(items)))
                devices.append(next(items))
            elif isinstance(item, Reads):
                parts.append(_code(item.code, names))
            elif isinstance(item, types.FunctionType):
                parts += (_library(item), _code(item.__code__, names))
            else:
                parts.append(_text(item))
    except _Unknown:
        return None
    if "cuda" in names:  # torch.cuda: whether there is a GPU, and which
        return None
    if "ops" in names and taught():  # torch.ops: what an operator computes is not in its name
        return None
    if names & _OF_DEVICES:
        parts += devices
    return _hash(parts)


def _hash(parts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(b"%d:" % len(part))
        found.update(part.encode(errors="surrogatepass"))
    return found.hexdigest()


def _code(code: types.CodeType, names: set[str]) -> str:
    """All of a code object but where it stands; adds the names that it mentions."""
    names.update(code.co_names)
    shape = (
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags,
        code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
    )  # fmt: skip
    consts = [
        _code(each, names) if isinstance(each, types.CodeType) else _text(each)
        for each in code.co_consts
    ]
    table = getattr(code, "co_exceptiontable", b"")  # from Python 3.11 on
    return _hash((repr(shape), code.co_code.hex(), table.hex(), *consts))


def _text(item: Any) -> str:
    kind = type(item)
    if kind in _PLAIN or kind in _TORCH:
        return f"{kind.__name__} {item!r}"
    handler = _HANDLERS.get(kind)
    if handler is not None:
        return handler(item)
    if kind is object:  # what stands for a name that is not there
        return "missing"
    if isinstance(item, type):
        return f"type {_library(item)}"
    raise _Unknown


def _library(thing: Any) -> str:
    """The name of something that torch or Python brings."""
    module, name = thing.__module__, thing.__qualname__
    if module is None or not is_library(module):
        raise _Unknown
    return f"{module}.{name} {_version(_root(module))}"


def _module(module: types.ModuleType) -> str:
    return f"module {module.__name__} {_version(_root(module.__name__))}"


def _builtin(fn: Any) -> str:
    owner = fn.__self__
    return f"builtin {_library(owner if isinstance(owner, type) else fn)} {fn.__name__}"


def _root(name: str) -> str:
    return name.partition(".")[0]


def _version(root: str) -> str:
    """The version of a library that is neither Python's nor torch."""
    return str(sys.modules["numpy"].__version__) if root == "numpy" else ""


def _here() -> str:
    """The versions that a trace depends on: of this folder, torch, and Python's minor release."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    mods = _hash(path.read_text(encoding="utf-8") for path in sources)
    python = f"{platform.python_implementation()} {sys.version_info[:2]}"
    # 2.11.0+cpu records what 2.11.0+cu130 will serve.
    return f"{mods} {python} torch {torch.__version__.partition('+')[0]}"


_HANDLERS: dict[type, Callable[[Any], str]] = {
    tuple: lambda item: f"tuple {[_text(each) for each in item]}",
    frozenset: lambda item: f"frozenset {sorted(_text(each) for each in item)}",
    types.ModuleType: _module,
    types.BuiltinFunctionType: _builtin,
}


MAX_BUFFERS, MAX_RANK = 64, 16
# A clamp follows each captured number, so a stored mod may have twice the rows.
_ROWS = 2 * MAX_NODES
_DTYPES = frozenset(
    (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64"
    ).split()
)


def to_data(mod: Mod) -> dict[str, Any]:
    """A Mod as what JSON can hold: its nodes in order, each [op, dtype, operands, value]."""
    return {
        "kind": mod.kind,
        "nodes": [
            [node.op, node.dtype, operands, number_to_data(node.value)]
            for node, operands in numbered(mod.expr)
        ],
        "buffers": [[buffer.dtype, buffer.rank] for buffer in mod.buffers],
        "scalars": list(mod.scalars),
        "fingerprint": mod.fingerprint,
    }


def from_data(data: Any) -> Mod:
    """The Mod of such data.

    Raises CacheError for anything else: an operation that is not known, operands that do not
    come before it, sizes past the limits, or a fingerprint that is not the expression's.
    """
    with _checked("a record of a mod"):
        kind, scalars = data["kind"], tuple(data["scalars"])
        buffers = tuple(Buffer(dtype, rank) for dtype, rank in data["buffers"])
        for what, most in (("nodes", _ROWS), ("buffers", MAX_BUFFERS), ("scalars", MAX_BUFFERS)):
            _need(len(data[what]) <= most, f"it has at most {most}", what)
        slots = {*scalars, *(each.dtype for each in buffers)}
        _need(slots <= _DTYPES, f"they are among {sorted(_DTYPES)}", "dtypes")
        ranks = [each.rank for each in buffers]
        _need(max(ranks, default=0) <= MAX_RANK, f"it is at most {MAX_RANK}", "a rank")
        nodes: list[Expr] = []
        for op, dtype, operands, value in data["nodes"]:
            args = tuple([nodes[i] for i in operands if i >= 0])
            node = Expr(op, dtype, args, number_from_data(value))
            _need(
                dtype in _DTYPES and _is_node(node, kind, buffers, scalars),
                "it is an operation that mods are made of", f"node {op!s:.20} {dtype!s:.20}",
            )  # fmt: skip
            nodes.append(node)
        _need(nodes[-1].dtype == RESULTS[kind], "it is the result", "the last node")
        digest = fingerprint(kind, nodes[-1], buffers, scalars)
        mod = Mod(kind, nodes[-1], buffers, scalars, digest)
        _need_written(data, to_data(mod))
    return mod


def _is_node(node: Expr, kind: str, buffers: tuple[Buffer, ...], scalars: tuple[str, ...]) -> bool:
    """Mods of these captures are made of such nodes."""
    op, value, count = node.op, node.value, len(node.args)
    if op == "var":
        known = type(value) is str and VARS.get(value) == node.dtype and not count
        return known and (value != "score" or kind == "score")
    if op == "const":
        return not count and _is_of(value, node.dtype)
    if op in ("scalar", "load"):
        if type(value) is not int or value < 0:
            return False
        return count == buffers[value].rank if op == "load" else scalars[value] == node.dtype
    return value is None and count == (1 if op == "cast" else OPS[op].arity)


def number_to_data(value: Value) -> Any:
    """A value as JSON can hold it, which has no infinity, and no NaN with its bits."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"bits": struct.pack(">d", value).hex()}
    return value


def number_from_data(data: Any) -> Value:
    """The value of a node, or of a captured number; raises CacheError for what is neither."""
    if type(data) is dict:
        with _checked("a number"):
            found: float = struct.unpack(">d", bytes.fromhex(data["bits"]))[0]
            _need(len(data) == 1, "it has bits alone", "a number")
        return found
    _need(data is None or type(data) in (bool, int, float, str), "it is a plain one", "a value")
    if type(data) is int:
        _need(abs(data) < 2**64, "it has at most 64 bits", "a number")
    plain: Value = data
    return plain


def _is_of(value: Value, dtype: str) -> bool:
    if dtype == "bool":
        return type(value) is bool
    if is_int(dtype):
        return type(value) is int
    return is_float(dtype) and type(value) in (int, float)


@contextmanager
def _checked(what: str) -> Iterator[None]:
    """Raises CacheError where data is not of the form that it is read in."""
    try:
        yield
    except (TypeError, ValueError, LookupError, struct.error) as error:
        _need(False, f"it is as this version writes it ({type(error).__name__}: {error})", what)


def _need_written(data: Any, written: Any) -> None:
    """Raises CacheError where data has another field, or a value of another type."""
    one, other = (json.dumps(each, sort_keys=True) for each in (data, written))
    _need(one == other, "it is as this version writes it")


def _need(holds: bool, rule: str, got: str = "a record of a mod") -> None:
    if not holds:
        raise CacheError(f"{got}: not as it should be", rule)
