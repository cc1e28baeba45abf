"""Reads outside of captured tensors: which loads may do so, where they do, what rests on them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.mods.analysis.intervals import intervals_of
from flexattn.mods.expr import Expr, computed, walk
from flexattn.mods.ops import Range


def unproven(
    expr: Expr, tensors: Sequence[Tensor], ranges: Mapping[str, Range]
) -> tuple[Expr, ...]:
    """The loads whose indices are not proven to stay inside while positions stay in ranges."""
    found = intervals_of(expr, ranges)

    def proven(index: Expr, size: int) -> bool:
        limits = found[index]
        return limits is not None and -size <= limits[0] and limits[1] < size

    loads = [node for node in walk(expr) if node.op == "load"]
    return tuple(
        node for node in loads if not all(map(proven, node.args, buffer_of(node, tensors).shape))
    )


def strays(expr: Expr, tensors: Sequence[Any], ranges: Mapping[str, Range]) -> bool:
    """True if an index that follows from positions alone may leave its tensor.

    tensors: anything with the shapes of what is captured.
    """
    known = {"load", "scalar"}.isdisjoint
    return any(
        known(node.op for node in walk(*load.args)) for load in unproven(expr, tensors, ranges)
    )


def buffer_of(load: Expr, tensors: Sequence[Tensor]) -> Tensor:
    """The captured tensor that a load reads."""
    return tensors[int(load.value or 0)]


class Evaluated(NamedTuple):
    """An expression's value where positions are given, and whether it rests on a read outside.

    Both broadcast against the positions. unsure: what was read outside reads as 0, and another
    number there might give another value.
    """

    value: Tensor
    unsure: Tensor


def evaluated(
    roots: Sequence[Expr], tensors: Sequence[Tensor], env: Mapping[str, Tensor]
) -> dict[Expr, Evaluated]:
    """Every node of these expressions without run-time numbers; env: their variables."""
    device = next(iter(env.values())).device
    sure = torch.zeros((), dtype=torch.bool, device=device)
    found: dict[Expr, Evaluated] = {}
    for node in walk(*roots):
        args = [found[arg] for arg in node.args]
        values = [arg.value for arg in args]
        unsure = reduce(operator.or_, (arg.unsure for arg in args), sure)
        if node.op == "var":
            value = env[str(node.value)]
        elif node.op == "load":
            value, outside = read_places(buffer_of(node, tensors), values)
            unsure = unsure | outside
        else:
            value = computed(node, values, device)
        if node.op in ("and", "or") and node.dtype == "bool":
            unsure = unsure & ~_settled(args, node.op == "or")
        elif node.op == "where":
            condition, one, other = args
            unsure = torch.where(condition.value, one.unsure, other.unsure) | condition.unsure
        found[node] = Evaluated(value, unsure)
    return found


def _settled(args: Sequence[Evaluated], by: bool) -> Tensor:
    """A mask of where one operand decides: a sure False of an `and`, a sure True of an `or`."""
    one, other = ((arg.value == by) & ~arg.unsure for arg in args)
    return one | other


def read_places(buffer: Tensor, places: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The elements, 0 where an index is outside, and where that is; negative indices wrap."""
    outside = torch.zeros((), dtype=torch.bool, device=buffer.device)
    inside = []
    if not places:
        return buffer, outside
    for place, size in zip(places, buffer.shape, strict=True):
        index = place.to(buffer.device)
        outside = outside | (index < -size) | (index >= size)
        inside.append(index.long().clamp(-size, max(size - 1, 0)))
    if buffer.numel() == 0:
        return torch.zeros(outside.shape, dtype=buffer.dtype, device=buffer.device), outside
    # Not buffer[...]: torch reads an index without dimensions on the host, where vmap has none.
    value: Tensor = torch.ops.aten.index.Tensor(buffer, torch.broadcast_tensors(*inside))
    return value.masked_fill(outside, 0), outside
