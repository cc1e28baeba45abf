"""A Mod as JSON data and back, exactly: for files and other processes, which get no callable."""

from __future__ import annotations

import math
import struct
from typing import Any

from flexattn.errors import CacheError
from flexattn.mods.expr import MAX_NODES, VARS, Buffer, Expr, Mod, Value, fingerprint, walk
from flexattn.mods.ops import OPS, is_float, is_int

MAX_BUFFERS, MAX_RANK = 64, 16
# A clamp follows each captured number, so a stored mod may have twice the rows.
_ROWS = 2 * MAX_NODES
_FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = frozenset((*_FLOATS, *INTEGERS, "bool"))
_RESULTS = {"score": "float32", "mask": "bool"}


def to_data(mod: Mod) -> dict[str, Any]:
    """A Mod as what JSON can hold: its nodes in order, each [op, dtype, operands, value]."""
    number: dict[Expr, int] = {}
    nodes: list[list[Any]] = []
    for node in walk(mod.expr):
        number[node] = len(nodes)
        nodes.append(
            [node.op, node.dtype, [number[arg] for arg in node.args], number_to_data(node.value)]
        )
    return {
        "kind": mod.kind,
        "nodes": nodes,
        "buffers": [[buffer.dtype, buffer.rank] for buffer in mod.buffers],
        "scalars": list(mod.scalars),
        "fingerprint": mod.fingerprint,
    }


def from_data(data: Any) -> Mod:
    """The Mod of such data.

    Raises CacheError for anything else: an operation that is not known, operands that do not
    come before it, sizes past the limits, or a fingerprint that is not the expression's.
    """
    names = {"kind", "nodes", "buffers", "scalars", "fingerprint"}
    _need(type(data) is dict and data.keys() == names, "a mod", f"it has {sorted(names)}")
    kind = data["kind"]
    _need(type(kind) is str and kind in _RESULTS, "kind", "it is score or mask")
    buffers = tuple(_buffer(each) for each in _list(data["buffers"], MAX_BUFFERS, "buffers"))
    scalars = tuple(_dtype(each) for each in _list(data["scalars"], MAX_BUFFERS, "scalars"))
    nodes: list[Expr] = []
    for each in _list(data["nodes"], _ROWS, "nodes"):
        nodes.append(_node(each, nodes, kind, buffers, scalars))
    _need(bool(nodes) and nodes[-1].dtype == _RESULTS[kind], "the last node", "it is the result")
    expr = nodes[-1]
    digest = fingerprint(kind, expr, buffers, scalars)
    _need(data["fingerprint"] == digest, "fingerprint", "it is that of the expression")
    return Mod(kind, expr, buffers, scalars, digest)


def _node(
    data: Any, known: list[Expr], kind: str, buffers: tuple[Buffer, ...], scalars: tuple[str, ...]
) -> Expr:
    fields = _list(data, 4, "a node")
    _need(len(fields) == 4, "a node", "it is [op, dtype, operands, value]")
    op, dtype, value = fields[0], _dtype(fields[1]), number_from_data(fields[3])
    _need(type(op) is str, "an operation", "it is a name")
    operands = _list(fields[2], MAX_RANK, "operands")
    for index in operands:
        _need(type(index) is int and 0 <= index < len(known), "an operand", "it stands before")
    args = tuple(known[index] for index in operands)
    if op == "var":
        allowed = type(value) is str and VARS.get(value) == dtype and not args
        allowed = allowed and (value != "score" or kind == "score")
    elif op == "const":
        allowed = not args and _is_of(value, dtype)
    elif op == "scalar":
        allowed = not args and _slot(value, scalars) and scalars[int(value)] == dtype  # type: ignore[arg-type]
    elif op == "load":
        allowed = _slot(value, buffers) and len(args) == buffers[int(value)].rank  # type: ignore[arg-type]
    else:
        arity = 1 if op == "cast" else OPS[op].arity if op in OPS else -1
        allowed = len(args) == arity and value is None
    _need(allowed, f"node {op[:20]} {dtype}", "it is an operation that mods are made of")
    return Expr(op, dtype, args, value)


def number_to_data(value: Value) -> Any:
    """A value as JSON can hold it, which has no infinity, and no NaN with its bits."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"bits": struct.pack(">d", value).hex()}
    return value


def number_from_data(data: Any) -> Value:
    """The value of a node, or of a captured number; raises CacheError for what is neither."""
    if type(data) is dict:
        bits = data.get("bits")
        _need(type(bits) is str and len(data) == 1, "a number", "it has bits alone")
        try:
            found: float = struct.unpack(">d", bytes.fromhex(str(bits)))[0]
        except (ValueError, struct.error):
            raise CacheError("a number", "its bits are 16 hexadecimal digits") from None
        return found
    _need(data is None or type(data) in (bool, int, float, str), "a value", "it is a plain one")
    if type(data) is int:
        _need(abs(data) < 2**64, "a number", "it has at most 64 bits")
    if type(data) is str:
        _need(len(data) <= 16, "a name", "it is a variable's")
    found_value: Value = data
    return found_value


def _is_of(value: Value, dtype: str) -> bool:
    if dtype == "bool":
        return type(value) is bool
    if is_int(dtype):
        return type(value) is int
    return is_float(dtype) and type(value) in (int, float)


def _slot(value: Value, slots: tuple[Any, ...]) -> bool:
    return type(value) is int and 0 <= value < len(slots)


def _buffer(data: Any) -> Buffer:
    fields = _list(data, 2, "a buffer")
    _need(len(fields) == 2 and type(fields[1]) is int, "a buffer", "it is [dtype, rank]")
    _need(0 <= fields[1] <= MAX_RANK, "a buffer's rank", f"it is at most {MAX_RANK}")
    return Buffer(_dtype(fields[0]), fields[1])


def _dtype(data: Any) -> str:
    _need(type(data) is str and data in _DTYPES, "a dtype", f"it is one of {sorted(_DTYPES)}")
    return str(data)


def _list(data: Any, most: int, what: str) -> list[Any]:
    _need(type(data) is list and len(data) <= most, what, f"a list of at most {most}")
    found: list[Any] = data
    return found


def _need(holds: bool, got: str, rule: str) -> None:
    if not holds:
        raise CacheError(f"{got}: not as it should be", rule)
