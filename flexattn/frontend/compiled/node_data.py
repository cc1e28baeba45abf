"""NodeData: what Inductor has of a node of flex_attention, as this library reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from flexattn.frontend.compiled.spec import BARE
from flexattn.mods.graph import Captured, GraphMod, read_graph
from flexattn.mods.outside import strays
from flexattn.mods.refusal import Refusal
from flexattn.problem import DTYPES, FP8

_DEVICES = ("cuda", "cpu")
# Of a node's mask: counts and indices of blocks by query, then by key, stand behind two lengths;
# its last three entries are the block's rows, its keys, and the graph of mask_mod.
LISTS, BY_KEY, _BLOCK, _GRAPH = slice(2, 6), slice(6, 10), slice(-3, -1), -1
_POSITIONS = "b", "h", "q_idx", "kv_idx"


class NodeData(NamedTuple):
    """The data of a node of either direction, beside its tensors of rows and keys.

    captures: of the score_mod. mask_captures: of the mask_mod. tensors, integers: what the
    score_mod and the mask_mod capture.
    """

    score: GraphMod
    captures: list[Captured | None]
    mask: GraphMod | None
    mask_captures: list[Captured | None]
    block: tuple[int, int] | None
    lists: tuple[Any, ...]
    by_key: tuple[Any, ...]
    tensors: list[list[Any]]
    integers: list[list[Any]]

    @classmethod
    def read(
        cls,
        kernel_options: dict[str, Any],
        query: Any,
        subgraph: Any,
        block_mask: tuple[Any, ...],
        captures: tuple[Sequence[Any], Sequence[Any]],
        nodes: Any,
    ) -> NodeData:
        """captures: of score_mod and mask_mod, and their nodes. Raises Refusal."""
        where = query.get_device()
        if where.type not in _DEVICES:
            raise Refusal(f"is called on {where}")
        if where.type == "cuda" and query.get_dtype() not in DTYPES | FP8:
            raise Refusal(f"is called on tensors of {query.get_dtype()}")
        score, found = _read(subgraph, "score", captures[0], nodes[0], where)
        mask = block = None
        masked: list[Captured | None] = []
        lists: tuple[Any, ...] = ()
        by_key: tuple[Any, ...] = ()
        if BARE in kernel_options:
            captures = captures[0], ()
        else:
            mask, masked = _read(block_mask[_GRAPH], "mask", captures[1], nodes[1], where)
            rows, keys = map(V.graph.sizevars.guard_int, block_mask[_BLOCK])
            block = rows, keys
            lists = tuple(each for each in block_mask[LISTS] if each is not None)
            by_key = tuple(each for each in block_mask[BY_KEY] if each is not None)
        tensors = [[x for x in each if is_tensor(x)] for each in captures]
        integers = [[x for x in each if not is_tensor(x)] for each in captures]
        return cls(score, found, mask, masked, block, lists, by_key, tensors, integers)

    @property
    def reads_floats(self) -> bool:
        """True if a mod captures a Python float: Inductor's kernel has no argument for one."""
        mods = [mod for mod in (self.score, self.mask) if mod is not None]
        return any(kind == "tensor" for mod in mods for kind, _ in mod.sources)

    def strays(self, sizes: Sequence[int]) -> bool:
        """True if a mod may read outside of a tensor, of which Inductor's kernel makes an error.

        It does also where the mask removes what was read. sizes: of B, Hq, L and S.
        """
        ranges = dict(zip(_POSITIONS, ((0, size - 1) for size in sizes), strict=True))
        pairs = (self.score, self.captures), (self.mask, self.mask_captures)
        return any(
            strays(mod.mod.expr, [each for each in found if each is not None], ranges)
            for mod, found in pairs
            if mod is not None
        )


def _read(
    subgraph: Any, kind: str, captures: Sequence[Any], nodes: Sequence[Any], where: Any
) -> tuple[GraphMod, list[Captured | None]]:
    found = [_captured(each, node, where) for each, node in zip(captures, nodes, strict=True)]
    return read_graph(subgraph.graph_module, kind, found), found


def _captured(given: Any, node: Any, where: torch.device) -> Captured | None:
    """The facts of a captured tensor; None for an integer, which Inductor has as a symbol."""
    if not is_tensor(given):
        # An int, or a symbol of sympy's.
        if not isinstance(given, int) and getattr(given, "is_integer", False) is not True:
            raise Refusal(f"captures {given}, a number that changes from call to call")
        return None
    value = node.meta["val"]
    if value.dim() and value.device != where:
        raise Refusal(f"captures a tensor on {value.device}, and is called on {where}")
    fixed = all(isinstance(size, int) for size in value.shape)
    dtype = str(value.dtype).removeprefix("torch.")
    return Captured(tuple(expected_sizes(value.shape)), dtype, fixed, value.device.type == "cpu")


def is_tensor(given: Any) -> bool:
    return isinstance(given, ir.IRNode)


def expected_sizes(sizes: Sequence[Any]) -> list[int]:
    return [size if isinstance(size, int) else size.node.hint for size in sizes]


def fixed_scale(scale: Any) -> float:
    """The scale as a number: the sizes that it follows from, a head's width, are guarded."""
    if isinstance(scale, (int, float)):
        return float(scale)
    sizes = {each: V.graph.sizevars.guard_int(each) for each in scale.free_symbols}
    return float(scale.subs(sizes))
