"""The oracle of a task: its mods as callables, its block lists, and what both make of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.mods.signatures import MaskMod
from flexattn.problem import Sparsity, out_dtype
from flexattn.problem.dense_blocks import dense_blocks
from flexattn.reference import Precision, Reference, attention
from flexattn.runtime.launch import Lists
from flexattn.verify.gate import Triple, Verdict, judge
from flexattn.verify.slices import Slices

Judge: TypeAlias = Callable[[Triple], Verdict]

# Up to so many scores and elements of k and v everything is judged, above it slices.
WHOLE_SCORES = 2**25
WHOLE_KV = 2**27


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    score: Bound | None,
    mask: Bound | None,
    lists: Lists | None,
    sparsity: Sparsity | None,
    sinks: Tensor | None = None,
) -> Judge:
    """What judges attention of q [B, Hq, L, E], k [B, Hkv, S, E], v [B, Hkv, S, Ev], sinks [Hq].

    All of them where the oracle is affordable, else slices. It is computed here, once for all.
    """
    score_mod, mask_mod = score_callable(score), mask_callable(mask)
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if scores > WHOLE_SCORES or k.numel() + v.numel() > WHOLE_KV:
        if lists is not None and sparsity is not None:
            mask_mod = kept_lanes(lists, sparsity, mask_mod, k.shape[2])
        return Slices.of(q, k, v, score_mod, mask_mod, scale, sinks).judge_all
    block_mask = None
    if lists is not None and sparsity is not None:
        block_mask = block_mask_of(lists, sparsity, mask_mod, (q.shape[2], k.shape[2]))

    def run(precision: Precision) -> Reference:
        return attention(
            q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, sinks=sinks,
            precision=precision,
        )  # fmt: skip

    with torch.no_grad():
        exact, rounded = run(Precision.ORACLE), run(Precision.ROUNDED)
    return lambda got: judge(got, exact, rounded, out_dtype(q.dtype))


def kept_lanes(lists: Lists, sparsity: Sparsity, mask_mod: MaskMod | None, kv_len: int) -> MaskMod:
    """Which lanes a kernel attends: full blocks whole, partial ones where mask_mod says so."""
    cols = -(-kv_len // sparsity.kv_block)
    partial = dense_blocks(lists.kv_num, lists.kv_idx, cols)
    full = None
    if lists.full_num is not None and lists.full_idx is not None:
        full = dense_blocks(lists.full_num, lists.full_idx, cols)

    def lane(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = [
            b % partial.shape[0],
            h % partial.shape[1],
            q_idx // sparsity.q_block,
            kv_idx // sparsity.kv_block,
        ]
        listed: Tensor = torch.ops.aten.index.Tensor(partial, place)
        if mask_mod is not None:
            listed = listed & mask_mod(b, h, q_idx, kv_idx)
        return listed if full is None else listed | torch.ops.aten.index.Tensor(full, place)

    return lane


def block_mask_of(
    lists: Lists, sparsity: Sparsity, mask_mod: MaskMod | None, lengths: tuple[int, int]
) -> BlockMask:
    """The BlockMask that lists are of."""
    fixed: dict[str, Any] = {
        "BLOCK_SIZE": (sparsity.q_block, sparsity.kv_block),
        "mask_mod": noop_mask if mask_mod is None else mask_mod,
        "seq_lengths": lengths,
    }
    mask: BlockMask = BlockMask.from_kv_blocks(*lists[:4], **fixed)
    return mask
