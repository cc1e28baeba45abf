"""PackData: a node of packed sequences, as kernels that read cu_seqlens have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.frontend.compiled.joint import Examples
from flexattn.frontend.compiled.node_data import NodeData, expected_sizes, fixed_scale, is_tensor
from flexattn.frontend.compiled.sequences import (
    BEGINS,
    CU_SEQLENS,
    SEQUENCE_NUMBERS,
    in_sequences,
)
from flexattn.frontend.compiled.spec import Spec, parsed, printed
from flexattn.frontend.gradients import repeats_bits
from flexattn.frontend.packed import PACK_MARKS, has_kernel, refuses_packs
from flexattn.kernels.choose.options import parse
from flexattn.mods.expr import const


class PackData(NamedTuple):
    """What Hopper's kernels of packed sequences read of a node.

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
                slots = tuple(
                    s for s, x in enumerate(values.tensors) if any(x is each for each in learned)
                )
            mods.append(made)
            tensors.append([own[i] for i in kept])
            expr = values.mod.expr
            # A score as it is, and a mask that keeps all of a sequence, are none.
            none = expr.op == "var" or (mod is node.mask and expr == const(True, "bool"))
            bound.append(None if none else values)
        q, k, v = (_like(each.meta["val"])[0].transpose(0, 1) for each in inputs[:3])
        sequences = expected_sizes(marks[0].meta["val"].shape)[0] - 1
        of_call = (
            inputs[0].meta["val"].device,
            sequences,
            bound[0],
            bound[1],
            fixed_scale(scale) > 0,
        )
        backward = wanted is not None
        in_order = backward and repeats_bits(parse(options))
        if not has_kernel(q, k, v, *of_call, backward, in_order, slots):
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
