"""Operators of torch.library in mods: what they compute, in torch's own operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from flexattn.errors import InputError

_TORCHS = ("aten", "prim", "prims")
# By the operator's name as torch prints it. The first is attention-gym's, for soft-capping.
_KNOWN: dict[str, Callable[..., Any]] = {"approx.tanh": torch.tanh}
_meanings = dict(_KNOWN)


def register_op(name: str, meaning: Callable[..., Any]) -> None:
    """Say what a registered operator computes, so that mods may call it.

    name: "namespace::name", as torch.library has it, for all of its overloads. meaning: takes
    what the operator takes and computes it from torch's own operations, by which mods are read on
    every path, the CPU's too; the operator itself is not called. `approx::tanh` is known: it is
    torch.tanh, which kernels may take from the hardware. The latest meaning counts for mods that
    are read after it; those read before keep theirs. Raises InputError for a name that is
    torch's own or no operator's, and for a meaning that cannot be called.
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
    """What a registered operator, or one of its overloads, is known to compute."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    return _meanings.get(str(packet)) if isinstance(packet, OpOverloadPacket) else None


def taught() -> bool:
    """Whether this process was told what other operators compute, or what known ones do."""
    return _meanings != _KNOWN
