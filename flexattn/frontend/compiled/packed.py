"""packed_gradients(): where a backward's graph puts the gradients of q, k and v side by side.

A model that makes all three in one product splits its output: torch's backward of a split copies
their gradients into one tensor, zeros and a sum of selections, or a concatenation, of which every
element is read and written once more than the product's own backward needs. Where nothing but
views and copies stands between, a kernel can write them there itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from flexattn.runtime.backward import stride_step
from flexattn.util.ambient import without_modes

_aten = torch.ops.aten
_ONE_INPUT = {
    _aten.permute.default, _aten.clone.default, _aten.alias.default, _aten.view.default,
    _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.squeeze.dims,
}  # fmt: skip
_JOINS = {
    _aten.cat.default, _aten.add.Tensor, _aten.select_scatter.default, _aten.slice_scatter.default
}  # fmt: skip


class SideBySide(NamedTuple):
    """node: the contiguous tensor of all three. places: as `attend_backward_packed` takes them.

    between: what leads from the gradients to that tensor, and nowhere else.
    """

    node: Node
    places: list[int]
    between: frozenset[Node]


class _NotSideBySide(Exception):
    """The graph does something else with the gradients than put them side by side."""


def packed_gradients(backward: Node) -> SideBySide | None:
    """The tensor that the first three results of a node are nothing but copied into, if any.

    Of static shapes, aligned as kernels write. Reads the graph, and changes nothing.
    """
    given = [use for use in backward.users if use.target is getitem and use.args[1] in (0, 1, 2)]
    by_index = {use.args[1]: use for use in given}
    if len(by_index) != len(given) or len(given) != 3:
        return None
    grads = [by_index[i] for i in range(3)]
    first, *others = ([*_below(x)] for x in grads)
    shared = [x for x in first if all(x in chain for chain in others)]
    for node in reversed(shared):
        try:
            places = _packed_in(node, grads)
        # What is not understood is lowered as it stands.
        except (_NotSideBySide, AttributeError, LookupError, RuntimeError, TypeError):
            continue
        between = {x for chain in (first, *others) for x in chain[: chain.index(node)]}
        return SideBySide(node, places, frozenset(between))
    return None


def _below(node: Node) -> Iterator[Node]:
    """The nodes behind a value, while it has one user alone, which moves it unchanged."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target not in _ONE_INPUT | _JOINS:
            return
        yield node


@without_modes()
def _packed_in(node: Node, grads: Sequence[Node]) -> list[int]:
    """The place of each gradient in what a node computes, as SideBySide has the places.

    What leads there moves numbers and changes none: its derivative with respect to each gradient
    is the part of the node's own that the gradient is copied to, a view of the same memory.
    """
    whole: Tensor = node.meta["val"]
    if not _fixed(whole) or not whole.is_contiguous() or _leaves(node):
        raise _NotSideBySide
    memory = _like(whole)
    with torch.enable_grad():
        given = [_like(x.meta["val"]).requires_grad_() for x in grads]
        computed = _computed(node, dict(zip(grads, given, strict=True)))
        found = torch.autograd.grad(computed, given, memory)
    places: list[int] = []
    for each in found:
        step = stride_step(each.shape[3], each.element_size())
        numbers = [int(each.storage_offset()), *map(int, each.stride()[:3])]
        same = each.untyped_storage()._cdata == memory.untyped_storage()._cdata
        if not same or each.stride(3) != 1 or any(n % step for n in numbers):
            raise _NotSideBySide
        places += numbers
    if sum(x.numel() for x in found) != whole.numel() or not _disjoint(found):
        raise _NotSideBySide
    return places


def _leaves(node: Node) -> bool:
    """True if a value is a result of the graph, in whose layout others have a say."""
    return any(use.op == "output" for use in node.users)


def _like(value: Tensor) -> Tensor:
    """A tensor that lies as a value does, without memory."""
    if not _fixed(value):
        raise _NotSideBySide
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _computed(node: Node, known: dict[Node, Tensor]) -> Tensor:
    """The value of a node for known tensors and zeros; its operations move numbers unchanged."""
    if node not in known:
        if node.target is _aten.full.default and node.args[1] == 0:
            known[node] = _like(node.meta["val"])
        elif (stacked := _stacked(node)) is not None:
            parts, dim = stacked
            known[node] = torch.stack([_computed(part, known) for part in parts], dim)
        elif node.target in _ONE_INPUT | _JOINS:
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: _computed(each, known))
            run: Any = node.target
            known[node] = run(*args, **kwargs)
        else:
            raise _NotSideBySide
    return known[node]


def _stacked(node: Node) -> tuple[Sequence[Node], int] | None:
    """The nodes that a node stacks, and where: a concatenation whose dimension a view splits."""
    above = node.args[0] if node.target in _ONE_INPUT else None
    if not isinstance(above, Node) or above.target is not _aten.cat.default:
        return None
    parts: Any = above.args[0]
    each: Any = above.args[1] if len(above.args) > 1 else above.kwargs.get("dim", 0)
    first = list(parts[0].meta["val"].shape)
    dim = each % len(first)
    same = list(node.meta["val"].shape) == [*first[:dim], len(parts), *first[dim:]]
    return (parts, dim) if same else None


def _disjoint(parts: Sequence[Tensor]) -> bool:
    """True if no two of these views have an element in common; False where that is not clear.

    An offset has a digit for each stride of any part, and a part a range of values of each digit.
    """
    strides = {step for x in parts for n, step in zip(x.shape, x.stride(), strict=True) if n > 1}
    digits: list[list[range]] = []
    for x in parts:
        counts = {step: n for n, step in zip(x.shape, x.stride(), strict=True) if n > 1}
        left, above, ranges = int(x.storage_offset()), math.inf, []
        for step in sorted(strides, reverse=True):
            first, left = divmod(left, step)
            ranges.append(range(first, first + counts.get(step, 1)))
            if ranges[-1].stop * step > above:
                return False
            above = step
        digits.append(ranges)
    return all(
        any(x.stop <= y.start or y.stop <= x.start for x, y in zip(one, other, strict=True))
        for one, other in combinations(digits, 2)
    )


def _fixed(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape)
