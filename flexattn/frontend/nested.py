"""Nested tensors as packed ones with a document mask, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import InputError, InputTypeError, LayoutError

_RULE = "each is a nested tensor [batch, heads, ragged length, head_dim]"


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of a batch one behind another: query [1, Hq, rows, E], key and value [1, Hkv, …].

    q_offsets, kv_offsets: int [batch + 1], where each sequence begins and the last one ends, as
    cu_seqlens. mask_mod keeps keys of the query's own sequence.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    mask_mod: Callable[..., Tensor]

    def unpack(self, out: Tensor) -> Tensor:
        """A result of flex_attention as a nested tensor of query's lengths (jagged layout).

        out [1, Hq, rows, Ev], or lse [1, Hq, rows]. Raises InputError for other rows.
        """
        rows = self.query.shape[2]
        if out.dim() not in (3, 4) or out.shape[0] != 1 or out.shape[2] != rows:
            raise InputError(
                f"a tensor of shape {tuple(out.shape)} for {rows} packed rows",
                "it is [1, heads, rows, head_dim], or [1, heads, rows]",
                "give it what flex_attention returned for this packed query",
            )
        return torch.nested.nested_tensor_from_jagged(out[0], self.q_offsets, jagged_dim=2)


def pack(query: Tensor, key: Tensor, value: Tensor) -> Packed:
    """Nested tensors as `flex_attention` takes ragged batches: packed, with a document mask.

    Nested tensors of torch.jagged without gaps are not copied. Lengths of query and key may
    differ, and positions in the packed tensors are not those in a sequence: beside
    `packed.mask_mod` a causal mask holds where they are the same. Differentiable.

    Args:
        query: [B, Hq, ragged, E], of any nested layout.
        key: [B, Hkv, ragged, E].
        value: [B, Hkv, ragged, Ev].

    Returns:
        A `Packed`: the packed tensors, their mask_mod, and the way back.

    Raises:
        InputError: for tensors that are not nested, have other dimensions or do not match.

    Example::

        packed = flexattn.pack(query, key, value)
        mask_mod = flexattn.and_masks(packed.mask_mod, causal)
        rows, keys = packed.query.shape[2], packed.key.shape[2]
        mask = flexattn.create_block_mask(mask_mod, None, None, rows, keys, query.device)
        out = flexattn.flex_attention(packed.query, packed.key, packed.value, block_mask=mask)
        nested = packed.unpack(out)
    """
    # The catalogue is not loaded with the package.
    from flexattn.catalogue.masks import document, document_ids

    named = {"query": query, "key": key, "value": value}
    (q, q_offsets), (k, kv_offsets), (v, v_offsets) = (
        _packed(name, tensor) for name, tensor in named.items()
    )
    if len(q_offsets) != len(kv_offsets) or not _same(kv_offsets, v_offsets):
        lengths = [offsets.diff().tolist()[:8] for offsets in (q_offsets, kv_offsets, v_offsets)]
        raise InputError(
            f"query, key and value of lengths {', '.join(map(str, lengths))}",
            "they have as many sequences, and key and value the same lengths",
        )
    q_ids = document_ids(q_offsets, q.shape[2])
    same = _same(q_offsets, kv_offsets)
    mask_mod = document(q_ids, None if same else document_ids(kv_offsets, k.shape[2]))
    return Packed(q, k, v, q_offsets, kv_offsets, mask_mod)


def _same(offsets: Tensor, others: Tensor) -> bool:
    return offsets is others or torch.equal(offsets, others)


def _packed(name: str, tensor: Any) -> tuple[Tensor, Tensor]:
    """A nested tensor as [1, heads, rows, head_dim], and its offsets."""
    if not isinstance(tensor, Tensor):
        raise InputTypeError(f"{name} is a {type(tensor).__name__}", _RULE)
    if not tensor.is_nested or tensor.dim() != 4:
        kind = "nested" if tensor.is_nested else "not nested"
        do = "pass dense tensors to flex_attention as they are"
        raise LayoutError(f"{name} is {kind}, of {tensor.dim()} dimensions", _RULE, do)
    if tensor.layout is torch.jagged:
        ragged = [not isinstance(size, int) for size in tensor.shape]
        if not ragged[2]:
            raise LayoutError(
                f"{name} is ragged in dimension {ragged.index(True)}", _RULE, "x.transpose(1, 2)"
            )
        jagged: Any = tensor
        if jagged.lengths() is None:
            return tensor.values()[None], jagged.offsets()
    rows = tensor.unbind()
    if len({(each.shape[0], each.shape[2]) for each in rows}) != 1:
        shapes = ", ".join(str(tuple(each.shape)) for each in rows[:8])
        raise LayoutError(f"{name} is of sequences {shapes}", _RULE, "x.transpose(1, 2)")
    offsets = [0, *accumulate(each.shape[1] for each in rows)]
    return torch.cat(rows, 1)[None], torch.tensor(offsets, device=tensor.device)
