"""Which calls become a node of a compiled graph, and why the others break it."""

from __future__ import annotations

from inspect import signature

from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.errors import SettingsError
from flexattn.frontend.call import Call
from flexattn.problem import FP8
from flexattn.problem.checks import mixes
from flexattn.settings import current


def _asked_for(part: str) -> bool:
    """Whether a part is asked for; a bad environment is for the first call to say."""
    try:
        return part in current().experimental
    except SettingsError:
        return False


# Dynamo reads them as constants: whether calls are nodes, and their gradients ours.
NODES, GRADIENTS = _asked_for("compile"), _asked_for("backward")
# The block of a mask that torch makes of no mask: it fits every length, whatever it says.
LARGEST = 2**30
# Whether torch's node takes keys narrower than queries, as from 2.13 on.
_TAKES_NARROWER = "allow_lowp_kv" in signature(
    getattr(torch_flex, "_validate_sdpa_input", lambda: None)
).parameters  # fmt: skip


def breaks(call: Call) -> str:
    """Why a call runs outside of a graph, in words; nothing where it is a node of it.

    Dynamo reads this function: it asks for nothing but types, sizes, dtypes and devices.
    """
    if not NODES:
        return "nodes of compiled graphs have not run on a GPU yet (FLEXATTN_EXPERIMENTAL=compile)"
    q, k, v = call.q, call.k, call.v
    for each in (q, k, v):
        if not isinstance(each, Tensor) or each.dim() != 4:
            return "query, key and value are no tensors of four dimensions"
    if q.size(2) == 0:
        return "there is no query"
    descales = call.q_descale, call.k_descale, call.v_descale
    if q.dtype in FP8 or any(each is not None for each in descales):
        return "torch's node has no place for float8 queries and their factors"
    narrower = k.dtype != q.dtype or v.dtype != q.dtype
    if narrower and not (_TAKES_NARROWER and k.dtype == v.dtype and mixes(q, k)):
        return "torch's node has no place for keys and values of these dtypes"
    if narrower and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "keys narrower than queries have no backward"
    if call.scale is not None and not isinstance(call.scale, (int, float)):
        return "torch's node takes a scale that is a Python number"
    if call.return_lse and call.return_aux is not None:
        return "return_lse and return_aux are both given"
    mask = call.block_mask
    if mask is not None and (not isinstance(mask, BlockMask) or mask.BLOCK_SIZE[0] >= LARGEST):
        return "block_mask is no BlockMask, or torch's mask of no mask"
    if q.device.type != "cuda":
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return "torch's node has no backward on the CPU"
        if asked(call).max_scores:
            return "torch's node has no max_scores on the CPU"
    return ""


def asked(call: Call) -> AuxRequest:
    """The statistics that a call asks for."""
    if call.return_aux is not None:
        return call.return_aux
    return AuxRequest(lse=call.return_lse)
