"""packed_gradients(): where a backward's graph puts the gradients of q, k and v side by side.

A model that makes all three in one product splits its output: torch's backward of a split copies
their gradients into one tensor, zeros and a sum of selections, or a concatenation, of which every
element is read and written once more than the product's own backward needs. Where nothing but
views and copies stands between, a kernel can write them there itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from flexattn.runtime.backward import stride_step

_aten = torch.ops.aten
_ALIKE = {_aten.clone.default, _aten.alias.default}
_VIEWS = {
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
}  # fmt: skip
_ONE_INPUT = {_aten.permute.default, *_ALIKE, *_VIEWS}
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
        except (_NotSideBySide, AttributeError, LookupError, TypeError):
            continue
        between = {x for chain in (first, *others) for x in chain[: chain.index(node)]}
        return SideBySide(node, places, frozenset(between))
    return None


def _below(node: Node) -> Iterator[Node]:
    """What a value goes into, while it goes into one thing alone that moves it unchanged."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target not in _ONE_INPUT | _JOINS:
            return
        yield node


def _packed_in(node: Node, grads: Sequence[Node]) -> list[int]:
    whole: Tensor = node.meta["val"]
    if not _fixed(whole) or not whole.is_contiguous() or _leaves(node):
        raise _NotSideBySide
    found: dict[Node, Tensor] = {}
    memory = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    _place(node, memory, found, frozenset(grads))
    if len(found) != len(grads):
        raise _NotSideBySide
    places: list[int] = []
    for each in (found[x] for x in grads):
        step = stride_step(each.shape[3], each.element_size())
        numbers = list(map(int, (each.storage_offset(), *each.stride()[:3])))
        if each.stride(3) != 1 or any(n % step for n in numbers):
            raise _NotSideBySide
        places += numbers
    return places


def _leaves(node: Node) -> bool:
    """Whether a value is a result of the graph, in whose layout others have a say."""
    return any(use.op == "output" for use in node.users)


def _place(node: Node, memory: Tensor, found: dict[Node, Tensor], grads: frozenset[Node]) -> None:
    """Find which part of memory each gradient is, where all of memory is what a node computes."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _fixed(value) or value.dtype != memory.dtype:
        raise _NotSideBySide
    if value.shape != memory.shape:
        raise _NotSideBySide
    if node in grads:
        if node in found:
            raise _NotSideBySide
        found[node] = memory
        return
    stacked = _stacked(node)
    if node.target in _ONE_INPUT and stacked is None:
        (above,) = node.all_input_nodes
        _place(above, _back(node, memory, above), found, grads)
    else:
        dim, pieces = stacked or _pieces(node)
        dim %= memory.dim()
        end = 0
        for begin, above, part in sorted(pieces, key=lambda piece: piece[0]):
            if begin != end:
                raise _NotSideBySide
            here, end = part(memory, dim)
            _place(above, here, found, grads)
        if end != memory.shape[dim]:
            raise _NotSideBySide


def _back(node: Node, memory: Tensor, above: Node) -> Tensor:
    """What the input of a view or copy is, where its output is memory."""
    if node.target in _ALIKE:
        return memory
    if node.target is _aten.permute.default:
        dims: Any = node.args[1]
        order = [dim % memory.dim() for dim in dims]
        return memory.permute([order.index(i) for i in range(len(order))])
    try:
        return memory.view(above.meta["val"].shape)
    except RuntimeError:
        raise _NotSideBySide from None


# Where a piece begins along a dimension, what it is, and which part of memory it is and its end.
_Piece = tuple[int, Node, Callable[[Tensor, int], tuple[Tensor, int]]]


def _stacked(node: Node) -> tuple[int, list[_Piece]] | None:
    """The pieces of a stack, which is a concatenation with its dimension split; None of others."""
    if node.target not in _VIEWS:
        return None
    above: Any = node.all_input_nodes[0]
    if above.target is not _aten.cat.default:
        return None
    dim, pieces = _pieces(above)
    dim %= above.meta["val"].dim()
    each = list(pieces[0][1].meta["val"].shape)
    if list(node.meta["val"].shape) != [*each[:dim], len(pieces), *each[dim:]]:
        return None
    return dim, [(i, part, _select(i)) for i, (_, part, _) in enumerate(pieces)]


def _pieces(node: Node) -> tuple[int, list[_Piece]]:
    """What a node puts side by side, and along which dimension."""
    if node.target is _aten.cat.default:
        parts: Any = node.args[0]
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        pieces, begin = [], 0
        for part in parts:
            size = part.meta["val"].shape[dim]
            pieces.append((begin, part, _slice(begin, begin + size)))
            begin += size
        return dim, pieces
    terms = [_scattered(term) for term in _terms(node)]
    dims = {dim for dim, _ in terms}
    if len(dims) != 1:
        raise _NotSideBySide
    return dims.pop(), [piece for _, piece in terms]


def _terms(node: Node) -> list[Node]:
    if node.target is not _aten.add.Tensor:
        return [node]
    if node.kwargs:
        raise _NotSideBySide
    given: Any = node.args
    return [term for each in given for term in _terms(each)]


def _scattered(node: Node) -> tuple[int, _Piece]:
    """A value among zeros, and the dimension along which it has a place."""
    if node.target not in (_aten.select_scatter.default, _aten.slice_scatter.default):
        raise _NotSideBySide
    names = [argument.name for argument in node.target._schema.arguments]
    defaults = {"dim": 0, "start": None, "end": None, "step": 1}
    said: dict[str, Any] = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    zeros, src, dim = said[names[0]], said["src"], said["dim"]
    if zeros.target is not _aten.full.default or zeros.args[1] != 0:
        raise _NotSideBySide
    dim %= node.meta["val"].dim()
    size = node.meta["val"].shape[dim]
    if "index" in said:
        index = said["index"] % size
        return dim, (index, src, _select(index))
    begin, end = _inside(said["start"], 0, size), _inside(said["end"], size, size)
    if said["step"] != 1:
        raise _NotSideBySide
    return dim, (begin, src, _slice(begin, end))


def _inside(bound: int | None, default: int, size: int) -> int:
    if bound is None:
        return default
    return max(0, min(size, bound + size if bound < 0 else bound))


def _select(index: int) -> Callable[[Tensor, int], tuple[Tensor, int]]:
    return lambda memory, dim: (memory.select(dim, index), index + 1)


def _slice(begin: int, end: int) -> Callable[[Tensor, int], tuple[Tensor, int]]:
    return lambda memory, dim: (memory.narrow(dim, begin, end - begin), end)


def _fixed(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape)
