"""torch's operators: their names, what they write to, and what registered ones compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flexattn.errors import InputError

_TORCHS = ("aten", "prim", "prims")
# By the operator's name as torch prints it. The first is attention-gym's, for soft-capping; the
# second marks graphs of torch.compile.
_KNOWN: dict[str, Callable[..., Any]] = {
    "approx.tanh": torch.tanh, "flexattn.traced": lambda score, whole: score
}  # fmt: skip
_meanings = dict(_KNOWN)


def register_op(name: str, meaning: Callable[..., Any]) -> None:
    """Say what a registered operator computes, so that mods may call it.

    The latest meaning counts for mods that are read after it; those read before keep theirs.
    `approx::tanh` is known: it is torch.tanh, which kernels may take from the hardware.

    Args:
        name: "namespace::name", as torch.library has it, for all of its overloads.
        meaning: takes what the operator takes and computes it from torch's own operations, by
            which mods are read on every path, the CPU's too. The operator itself is not called.

    Raises:
        InputError: for a name that is torch's own or no operator's, and for a meaning that cannot
            be called.

    Example::

        flexattn.register_op("my::square", lambda x: x * x)
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w+::\w+", name):
        raise InputError(f"register_op of {name!r}", 'a name is "namespace::name"')
    if name.startswith(tuple(f"{each}::" for each in _TORCHS)):
        raise InputError(f"register_op of {name!r}", "torch's own operators mean what torch says")
    if not callable(meaning):
        raise InputError(
            f"register_op of {name!r} with a {type(meaning).__name__}",
            "what an operator computes is a function of its arguments",
        )
    _meanings[name.replace("::", ".")] = meaning


def meaning_of(op: object) -> Callable[..., Any] | None:
    """The function that a registered operator, or one of its overloads, is known to compute."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    return _meanings.get(str(packet)) if isinstance(packet, OpOverloadPacket) else None


def taught() -> bool:
    """True if this process was told what other operators compute, or what known ones do."""
    return _meanings != _KNOWN


def writes(op: Any) -> bool:
    """True if an operator changes elements; squeeze_ changes only the shape."""
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.is_mutable and op.overloadpacket.__name__ != "squeeze_"


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call of an operator writes to."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(each, Tensor):
                    yield each


def is_lift(user: Node) -> bool:
    """True if a node copies a tensor that the mod itself made of numbers."""
    packet = getattr(user.target, "overloadpacket", None)
    return packet is not None and packet.__name__.startswith("lift_fresh")


def nodes_of() -> Any:
    """The nodes of the graph that make_fx builds at this moment."""
    proxies = get_proxy_mode()
    return proxies.tracer.graph.nodes if proxies else ()


def mark(before: int, marks: Mapping[str, Any]) -> None:
    """Leave marks on what a graph got since it had `before` nodes.

    user_line: of the mod. stop: what keeps a value from autograd.
    """
    nodes = nodes_of()
    for node, _ in zip(reversed(nodes), range(len(nodes) - before), strict=False):
        node.meta |= marks


def op_name(op: Any) -> str:
    """The key of an operator in the tables: aten's and prims' short name, else the full one."""
    if op.namespace in ("aten", "prims"):
        return str(op.overloadpacket.__name__)
    return str(op)


def views(func: Any) -> bool:
    """True if an operator's result may lie in the memory of its arguments."""
    return not op_name(func).startswith("lift_fresh") and any(
        each.alias_info is not None for each in func._schema.returns
    )


def of_prim(func: Any) -> bool:
    """True if a function is torch's own question about metadata, such as x.device."""
    return getattr(func, "namespace", "") == "prim"
