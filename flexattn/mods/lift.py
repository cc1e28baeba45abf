"""Lift captured numbers into run-time arguments, and prove that nothing else changed by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from flexattn.errors import FlexAttnError
from flexattn.mods.host_numbers import HostNumber, Recording, program, scalars_of
from flexattn.mods.identity import Identity, Path, identify
from flexattn.mods.simplify import plug
from flexattn.mods.substitute import CannotReplace, substitute
from flexattn.mods.trace import Trace, trace


def lift(
    fn: Callable[..., Any], kind: str, identity: Identity, plain: Trace, chosen: Iterable[int]
) -> Trace | None:
    """A trace in which what Python computes of the chosen scalars is arguments, or None.

    It is a trace of a copy, and must become `plain` with the present values. That would hold of
    a copy that reads a number where it was not replaced, too: a look at one says where it is.
    """
    slots = sorted(chosen)
    recording = Recording()

    def replaced(values: Iterable[Any]) -> Any:
        paths = [identity.paths[i] for i in slots]
        return substitute(fn, dict(zip(paths, values, strict=True)))

    others = {i: _other(identity.scalars[i]) for i in slots}
    numbers = [HostNumber(recording, f"s[{i}]", identity.scalars[i]) for i in slots]
    try:
        seen = identify(replaced(others.values()), kind).scalars
        if seen != [others.get(i, scalar) for i, scalar in enumerate(identity.scalars)]:
            return None
        lifted = trace(replaced(numbers), kind, identity.tensors, recording, grad=identity.grad)
    except (FlexAttnError, CannotReplace):
        return None
    texts = tuple(recording.arguments)
    now = dict(enumerate(program(texts)(identity.scalars)))
    if recording.failed or lifted.volatile or plug(lifted.expr, now) is not plain.expr:
        return None
    constant = {slot: now[slot] for slot, text in enumerate(texts) if not scalars_of(text)}
    guards = tuple(sorted(recording.guards))
    return replace(lifted, expr=plug(lifted.expr, constant), texts=texts, guards=guards)


def _other(number: int | float) -> int | float:
    return number + 1 if isinstance(number, int) else float(number == 0)


def replaceable(identity: Identity, scalar: int) -> bool:
    """Whether a scalar is reached by one path alone, so that replacing it there is enough."""
    path: Path = identity.paths[scalar]
    while path:
        if path in identity.shared:
            return False
        path = path[0]
    return () not in identity.shared
