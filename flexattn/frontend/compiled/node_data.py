"""NodeData: what Inductor has of a node of flex_attention, as this library reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.virtualized import V

from flexattn.frontend.compiled.joint import Examples
from flexattn.frontend.compiled.sequences import (
    BEGINS,
    CU_SEQLENS,
    SEQUENCE_NUMBERS,
    in_sequences,
)
from flexattn.frontend.compiled.spec import BARE, Spec, parsed, printed
from flexattn.frontend.gradients import repeats_bits
from flexattn.frontend.packed import PACK_MARKS, has_kernel, refuses_packs
from flexattn.kernels.choose.options import parse
from flexattn.mods.expr import const
from flexattn.mods.graph import Captured, GraphMod, read_graph
from flexattn.mods.outside import strays
from flexattn.mods.refusal import Refusal
from flexattn.problem import DTYPES, FP8
from flexattn.runtime.backward import slots_among

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


class PackData(NamedTuple):
    """The data of a node that Hopper's kernels of packed sequences read.

    cu_seqlens: of rows and of keys. text: the mods in positions of a sequence, as `printed`
    gives them. tensors, integers: what these capture.
    """

    cu_seqlens: tuple[Any, Any]
    text: str
    tensors: list[list[Any]]
    integers: list[list[Any]]

    def given(self) -> list[Any]:
        """The arguments of the ops between q, k, v and the scale."""
        return [*self.cu_seqlens, *self.tensors, *self.integers, self.text]

    @classmethod
    def read(
        cls,
        kernel_options: dict[str, Any],
        node: NodeData,
        captures: tuple[Sequence[Any], Sequence[Any]],
        nodes: Any,
        inputs: Any,
        scale: Any,
        options: dict[str, Any],
        wanted: Sequence[int] | None = None,
    ) -> PackData | None:
        """None for a node without a pack, and if no kernel of packs can compute it.

        captures, nodes: of score_mod and mask_mod. inputs: query, key and value first.
        options: a pack's call has DETERMINISTIC or none. wanted: of a backward, which of the
        tensors that score_mod captures get a gradient. Raises Refusal for a mod that cannot be
        read in positions of a sequence.
        """
        count = kernel_options.get(PACK_MARKS)
        if count is None or node.mask is None or refuses_packs():
            return None
        traced = [
            [its for x, its in zip(*pair, strict=True) if is_tensor(x)]
            for pair in zip(captures, nodes, strict=True)
        ]
        marks = traced[1][:count]
        mods, tensors, bound, places = [], [], [], []
        slots: tuple[int, ...] = ()
        kinds = [[marks[i] for i in places if i < count] for places in (SEQUENCE_NUMBERS, BEGINS)]
        pairs = (node.score, node.captures), (node.mask, node.mask_captures)
        for (mod, found), own, its in zip(pairs, node.tensors, traced, strict=True):
            numbers, begins = (
                [i for i, each in enumerate(its) if any(each is x for x in kind)] for kind in kinds
            )
            made, kept = in_sequences(mod, numbers, begins)
            examples = Examples(found)
            values = made.bound([examples.tensors[i] for i in kept], examples.integers)
            if wanted and mod is node.score:
                places = [kept.index(i) for i in wanted]
                learned = [examples.tensors[i] for i in wanted]
                slots = slots_among(values.tensors, learned)
            mods.append(made)
            tensors.append([own[i] for i in kept])
            expr = values.mod.expr
            # A score as it is, and a mask that keeps all of a sequence, are none.
            none = expr.op == "var" or (mod is node.mask and expr == const(True, "bool"))
            bound.append(None if none else values)
        q, k, v = (_like(each.meta["val"])[0].transpose(0, 1) for each in inputs[:3])
        sequences = expected_sizes(marks[0].meta["val"].shape)[0] - 1
        device, backward = inputs[0].meta["val"].device, wanted is not None
        of_call = device, sequences, bound[0], bound[1], fixed_scale(scale) > 0, backward
        if not has_kernel(q, k, v, *of_call, backward and repeats_bits(parse(options)), slots):
            return None
        text = printed(Spec(
            mods[0], None if bound[1] is None else mods[1], None, True, False, options, False,
            backward, tuple(places),
        ))  # fmt: skip
        parsed(text)
        cu = [node.tensors[1][i if i < count else 0] for i in CU_SEQLENS]
        return cls((cu[0], cu[1]), text, tensors, node.integers)


def _like(value: Tensor) -> Tensor:
    """A tensor without values of expected sizes."""
    sizes, steps = expected_sizes(value.shape), expected_sizes(value.stride())
    return torch.empty_strided(sizes, steps, dtype=value.dtype, device="meta")
