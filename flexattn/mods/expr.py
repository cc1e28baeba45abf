"""Expr: a score_mod or mask_mod as an immutable, shared graph of pointwise operations."""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from flexattn.mods.ops import OPS, dtype_of
from flexattn.util.locks import renewed

Value = int | float | bool | str | None
_Work = TypeVar("_Work", bound=Callable[..., Any])

VARS = {"score": "float32", "b": "int64", "h": "int64", "q_idx": "int64", "kv_idx": "int64"}

# The dtype of what a mod of each kind returns.
RESULTS = {"score": "float32", "mask": "bool"}
# Of one mod, numbers among them. torch's tracer takes a millisecond for each, compilers more.
MAX_NODES = 4096
_LONG_LINE = 1000

_nodes: weakref.WeakValueDictionary[Any, Expr] = weakref.WeakValueDictionary()
_lock = renewed(threading.Lock())


class _Interned:
    """The slots of an Expr beside its fields; a slotted dataclass cannot declare these itself."""

    __slots__ = ("__weakref__", "facts", "order", "variables")

    facts: dict[Any, Any]
    order: tuple[int, bytes, bytes]
    variables: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False, init=False, repr=False)
class Expr(_Interned):
    """One operation on other expressions.

    Two equal expressions are the same object, so `is`, `==` and `hash` cost the same however
    much of the graph is shared. `value` is a variable's name ("var"), a number ("const"), or
    a slot ("scalar", "load"); it is None for every other operation.
    `order` sorts the operands of commutative operations: it does not depend on slots unless
    nothing else tells two operands apart. `variables` are those that reach it. `facts` is what
    `once` functions found of it.
    """

    op: str
    dtype: str
    args: tuple[Expr, ...] = ()
    value: Value = None

    def __new__(
        cls, op: str, dtype: str, args: tuple[Expr, ...] = (), value: Value = None
    ) -> Expr:
        bits = _bits(value)
        key = (op, dtype, tuple(map(id, args)), bits)
        with _lock:
            node = _nodes.get(key)
            if node is None:
                node = object.__new__(cls)
                fields = {"op": op, "dtype": dtype, "args": args, "value": value}
                for name, field in fields.items():
                    object.__setattr__(node, name, field)
                object.__setattr__(node, "order", _order(node, bits))
                object.__setattr__(node, "variables", _variables(node))
                object.__setattr__(node, "facts", {})
                _nodes[key] = node
        return node

    def __reduce__(self) -> tuple[Callable[..., Expr], tuple[Any, ...]]:
        # One level, however deep the graph is: pickle recurses into what it is given.
        rows = [(node.op, node.dtype, below, node.value) for node, below in numbered(self)]
        return _of_rows, (rows,)

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: object) -> Expr:
        return self

    def __repr__(self) -> str:
        return pretty(self)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A captured tensor as the kernel's signature sees it: its dtype and rank, not its sizes."""

    dtype: str
    rank: int


@dataclass(frozen=True)
class Mod:
    """A user's callable as data: equal fingerprints mean the same kernel code.

    `buffers` and `scalars` (dtypes) are numbered by first appearance in `expr`.
    """

    kind: str
    expr: Expr
    buffers: tuple[Buffer, ...]
    scalars: tuple[str, ...]
    fingerprint: str

    @property
    def facts(self) -> dict[Any, Any]:
        """Those of its expression."""
        return self.expr.facts


def once(work: _Work) -> _Work:
    """A function of an Expr, or of a Mod's, that keeps what it found with it.

    Its other arguments are given by position, and have a hash.
    """

    @wraps(work)
    def found(of: Expr | Mod, *args: Any) -> Any:
        key = (work, *args)
        if key not in of.facts:
            of.facts[key] = work(of, *args)
        return of.facts[key]

    return cast(_Work, found)


def const(value: int | float | bool, dtype: str) -> Expr:
    """A number of the given dtype; the caller has rounded it to that dtype."""
    return Expr("const", dtype, (), value)


def integer(value: int) -> Expr:
    """An int64 number."""
    return const(value, "int64")


def computed(node: Expr, args: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The value that torch computes of a constant, or of an operation on the operands' values."""
    if node.op == "const":
        return torch.tensor(node.value, dtype=dtype_of(node.dtype), device=device)
    if node.op == "cast":
        return args[0].to(dtype_of(node.dtype))
    op = OPS[node.op]
    return op.function(*args, **op.kwargs)


def walk(*roots: Expr, enter: Callable[[Expr], bool] | None = None) -> Iterator[Expr]:
    """Every node once, operands before the operations that use them, in a reproducible order.

    enter: whether to visit a node's operands, too; None: of every node.
    """
    seen: set[Expr] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if enter is None or enter(node):
                stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)


def numbered(expr: Expr) -> Iterator[tuple[Expr, list[int]]]:
    """Every node in `walk`'s order, with the places of its operands in that order."""
    place: dict[Expr, int] = {}
    for node in walk(expr):
        place[node] = len(place)
        yield node, [place[arg] for arg in node.args]


def depending(nodes: Iterable[Expr], names: tuple[str, ...]) -> set[Expr]:
    """Of some nodes, those that these variables reach."""
    return {node for node in nodes if reads(node, *names)}


def reads(expr: Expr, *names: str) -> bool:
    """True if one of these variables reaches an Expr."""
    return not expr.variables.isdisjoint(names)


def terms_of(expr: Expr, op: str) -> list[Expr]:
    """The terms of a chain of "and" or "or", each once; an Expr of another op is its only term."""
    found: list[Expr] = []
    seen: set[Expr] = set()
    pending = [expr]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == op and node.dtype == "bool":
            pending += reversed(node.args)
        else:
            found.append(node)
    return found


def fingerprint(
    kind: str, expr: Expr, buffers: tuple[Buffer, ...], scalars: tuple[str, ...]
) -> str:
    """SHA-256 over everything a kernel's code depends on, bit exact in the constants."""
    lines = [kind, repr([(b.dtype, b.rank) for b in buffers]), repr(scalars)]
    for node, operands in numbered(expr):
        lines.append(f"{node.op} {node.dtype} {operands} {_bits(node.value)!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def pretty(expr: Expr) -> str:
    """The expression as a person would write it; what is used twice, or is long, gets a line."""
    nodes = list(walk(expr))
    uses = Counter(arg for node in nodes for arg in node.args)
    text: dict[Expr, str] = {}
    lines: list[str] = []
    for node in nodes:
        text[node] = _text(node, [text[arg] for arg in node.args])
        if node.args and (uses[node] > 1 or len(text[node]) > _LONG_LINE):
            name = f"t{len(lines)}"
            lines.append(f"{name} = {text[node]}")
            text[node] = name
    return "\n".join([*lines, text[expr]])


def in_a_line(expr: Expr) -> str:
    """As `pretty`, on one line."""
    return pretty(expr).replace("\n", "; ")


def _text(node: Expr, args: list[str]) -> str:
    if node.op in ("var", "const"):
        return str(node.value)
    if node.op == "scalar":
        return f"scalar{node.value}"
    if node.op == "load":
        return f"buf{node.value}[{', '.join(args)}]"
    if node.op in OPS and (symbol := OPS[node.op].symbol):
        return f"({args[0]} {symbol} {args[1]})"
    name = node.dtype if node.op == "cast" else node.op
    return f"{name}({', '.join(args)})"


def _bits(value: Value) -> tuple[str, Value | bytes]:
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    return type(value).__name__, value


# Variables first and constants last, as one writes `score + bias[h] * 2`.
_RANK = {"var": 0, "scalar": 5, "load": 6, "const": 8}


def _order(node: Expr, bits: tuple[str, Value | bytes]) -> tuple[int, bytes, bytes]:
    rank = _RANK.get(node.op, 7)
    if node.op == "var":
        rank += list(VARS).index(str(node.value)) if node.value in VARS else len(VARS)
    exact = repr((node.op, node.dtype, bits)).encode()
    slotted = node.op in ("load", "scalar")
    blind = repr((node.op, node.dtype, len(node.args))).encode() if slotted else exact
    return (
        rank,
        _digest(blind, [arg.order[1] for arg in node.args]),
        _digest(exact, [arg.order[2] for arg in node.args]),
    )


def _variables(node: Expr) -> frozenset[str]:
    if node.op == "var":
        return frozenset((str(node.value),))
    found: frozenset[str] = frozenset()
    for arg in node.args:
        if not arg.variables <= found:
            found = arg.variables | found
    return found


def _of_rows(rows: list[tuple[str, str, list[int], Value]]) -> Expr:
    nodes: list[Expr] = []
    for op, dtype, args, value in rows:
        nodes.append(Expr(op, dtype, tuple([nodes[arg] for arg in args]), value))
    return nodes[-1]


def _digest(head: bytes, parts: list[bytes]) -> bytes:
    return hashlib.blake2b(b"|".join([head, *parts]), digest_size=16).digest()


# score, b, h, q_idx, kv_idx -> score
ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# b, h, q_idx, kv_idx -> whether the query sees the key
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
