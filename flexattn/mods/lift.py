"""Lift captured numbers into run-time arguments, and prove that nothing else changed by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flexattn.errors import FlexAttnError
from flexattn.mods.identity import Identity, Path, identify
from flexattn.mods.simplify import plug
from flexattn.mods.substitute import CannotReplace, substitute
from flexattn.mods.trace import Trace, trace


def lift(
    fn: Callable[..., Any],
    kind: str,
    identity: Identity,
    plain: Trace,
    chosen: Iterable[int],
    earlier: Sequence[int | float],
) -> Trace | None:
    """A trace in which the chosen scalars are arguments, or None where they must stay constants.

    The proof is by example, twice: with the present values it must become `plain`, and with the
    earlier ones what a trace of the earlier callable gives. Code that branches on a number,
    loops over it or promotes it otherwise than a tensor fails one of the two. Both would hold of
    a copy that reads the number where it was not replaced: a look at the copy says where it is.
    """
    slots = sorted(chosen)
    dtypes = {i: "int64" if isinstance(identity.scalars[i], int) else "float64" for i in slots}
    before = {i: earlier[i] for i in slots}
    now = {i: identity.scalars[i] for i in slots}

    def replaced(values: Mapping[int, Any]) -> Any:
        return substitute(fn, {identity.paths[i]: value for i, value in values.items()})

    try:
        lifted = trace(fn, kind, identity.tensors, dtypes, replaced, grad=identity.grad)
        if lifted.volatile or plug(lifted.expr, now) is not plain.expr:
            return None
        earlier_fn = replaced(before)
        seen = identify(earlier_fn, kind).scalars
        if seen != [before.get(i, scalar) for i, scalar in enumerate(identity.scalars)]:
            return None
        then = trace(earlier_fn, kind, identity.tensors, grad=identity.grad)
    except (FlexAttnError, CannotReplace):
        return None
    return lifted if plug(lifted.expr, before) is then.expr else None


def replaceable(identity: Identity, scalar: int) -> bool:
    """Whether a scalar is reached by one path alone, so that replacing it there is enough."""
    path: Path = identity.paths[scalar]
    while path:
        if path in identity.shared:
            return False
        path = path[0]
    return () not in identity.shared
