"""Which calls become a node of a compiled graph, and why the others break it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.frontend.call import Call
from flexattn.problem import FP8
from flexattn.problem.checks import mixes

# The block of a mask that torch makes of no mask: it fits every length, whatever it says.
LARGEST_SIZE = 2**30


def breaks(call: Call) -> str:
    """Why a call runs outside of a graph, in words; nothing where it is a node of it.

    Dynamo reads this function: it asks for nothing but types, sizes, dtypes and devices.
    """
    q, k, v = call.q, call.k, call.v
    for each in (q, k, v):
        if not isinstance(each, Tensor) or each.dim() != 4:
            return "query, key and value are no tensors of four dimensions"
    if q.size(2) == 0:
        return "there is no query"
    narrower = k.dtype != q.dtype or v.dtype != q.dtype
    if narrower and (k.dtype != v.dtype or not mixes(q, k)):
        return "query, key and value have dtypes that no kernel takes together"
    if q.dtype in FP8 and torch.is_autocast_enabled(q.device.type):
        return "autocast would convert what torch's node is given for float8"
    descales = (call.q_descale, q), (call.k_descale, k), (call.v_descale, k)
    for factor, like in descales:
        if factor is not None and not _fits(factor, like, q):
            return "a factor is no float32 tensor of [B, H], beside a query of float8"
    if (narrower or q.dtype in FP8) and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "attention of mixed dtypes, and of float8, has no backward"
    if call.dropout_p != 0.0:
        return "torch's node has no place for dropout"
    if call.scale is not None and not isinstance(call.scale, (int, float)):
        return "torch's node takes a scale that is a Python number"
    if call.return_lse and call.return_aux is not None:
        return "return_lse and return_aux are both given"
    mask = call.block_mask
    if mask is not None and (
        not isinstance(mask, BlockMask) or mask.BLOCK_SIZE[0] >= LARGEST_SIZE
    ):
        return "block_mask is no BlockMask, or torch's mask of no mask"
    if q.device.type not in ("cuda", "xpu"):
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return "torch's node has no backward on the CPU"
        if asked_statistics(call).max_scores:
            return "torch's node has no max_scores on the CPU"
    return ""


def _fits(factor: Tensor, like: Tensor, q: Tensor) -> bool:
    """Whether a descale is one that `check_descales` takes."""
    return (
        isinstance(factor, Tensor)
        and q.dtype in FP8
        and factor.dtype == torch.float32
        and tuple(factor.shape) == tuple(like.shape[:2])
        and factor.device == q.device
        and not factor.requires_grad
    )


def asked_statistics(call: Call) -> AuxRequest:
    """The statistics that a call asks for."""
    if call.return_aux is not None:
        return call.return_aux
    return AuxRequest(lse=call.return_lse)
