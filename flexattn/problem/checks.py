"""The rules that a call's arguments must keep, each with an error that says which one broke."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexattn.errors import InputError, InputTypeError, LayoutError, PlaceError, SlicedMaskError
from flexattn.problem import DTYPES, FP8, MAX_HEADS, MAX_LENGTH, NARROWER
from flexattn.problem.inputs import Descales

MAX_HEAD_DIM = 576
# Devices whose calls go to torch's own flex_attention.
TORCHS = ("xpu", "mps")
# Devices whose calls go to a plug-in of that name.
PLUGINS = ("neuron",)
MAX_FLOAT32 = torch.finfo(torch.float32).max
# What torch puts in place of a sliced BlockMask's mask_mod: it raises when it is called.
_SLICED = getattr(torch_flex, "_sliced_mask_mod_error", object())


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Shapes, dtypes, sizes and devices of query, key and value; raises InputError."""
    if not q.device == k.device == v.device:
        devices = ", ".join(f"{name} on {x.device}" for name, x in _named(q, k, v))
        raise PlaceError(devices, "query, key and value are on one device", "move them there")
    if k.dtype != v.dtype or not (k.dtype == q.dtype or mixes(q, k)):
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in _named(q, k, v))
        narrower = ", ".join(map(str, NARROWER.get(q.dtype, ()))) or "none"
        raise InputError(
            dtypes,
            "key and value have one dtype, query's or a narrower one of which it holds every "
            f"number: here {narrower}",
            "convert them",
        )
    check_shapes(q, k, v, enable_gqa)
    if q.dtype != torch.float64:
        kernel_dtype(q.dtype)


def _named(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor]]:
    return zip(("query", "key", "value"), (q, k, v), strict=True)


def mixes(q: Tensor, k: Tensor) -> bool:
    """True if key and value are narrower than query, as a kernel that converts them takes them."""
    return k.dtype in NARROWER.get(q.dtype, ())


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises InputError if query, key or value is not a dense tensor of four dimensions."""
    for name, tensor in _named(q, k, v):
        if not isinstance(tensor, Tensor):
            raise InputTypeError(
                f"{name} is a {type(tensor).__name__}",
                "it is a torch.Tensor [batch, heads, length, head_dim]",
                f"pass torch.as_tensor({name})",
            )
        if tensor.is_nested:
            raise LayoutError(
                f"{name} is a nested tensor",
                "ragged batches are packed dense tensors with a document mask",
                "packed = flexattn.pack(query, key, value) packs them; mask with "
                "packed.mask_mod, and packed.unpack(out) is nested again",
            )
        if tensor.layout is not torch.strided:
            got = f"{name} has layout {tensor.layout}"
            raise LayoutError(got, "it is a dense tensor", f"pass {name}.to_dense()")
        if tensor.dim() != 4:
            raise LayoutError(
                f"{name} has shape {tuple(tensor.shape)}",
                "it is [batch, heads, length, head_dim]",
                "give it the dimensions it lacks, as x[None] does",
            )


def kernel_dtype(dtype: torch.dtype) -> str:
    """A dtype as kernels name it; raises InputError for what no query of a kernel has."""
    name = DTYPES.get(dtype) or FP8.get(dtype)
    if name is None:
        known = ", ".join((*DTYPES.values(), *FP8.values()))
        raise InputError(
            f"query is {dtype}",
            f"query, key and value are {known}, and on the CPU also float64, unless "
            "FLEXATTN_INTERPRET=1",
            "convert them: x.to(torch.bfloat16)",
        )
    return name


def check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Raises InputError if the sizes of query, key and value do not fit."""
    B, Hq, q_len, D = q.shape
    Bkv, Hkv, kv_len, Dk = k.shape
    *rows, Dv = v.shape
    rule = do = ""
    if rows != [Bkv, Hkv, kv_len]:
        rule = "key and value agree in batch, heads and length"
    elif D != Dk:
        rule = "query and key have the same head dimension"
    elif Hq == 0 or Hkv == 0:
        rule, do = "query and key have at least one head", "make no call where there is none"
    elif Hq != Hkv and not enable_gqa:
        rule, do = "query and key have the same number of heads", "pass enable_gqa=True for GQA"
    elif Hq % Hkv:
        rule = "the number of query heads is a multiple of the key heads"
    elif Bkv not in (1, B):
        rule = "key's batch is query's, or 1"
    elif max(q_len, kv_len, B) > MAX_LENGTH or Hq > MAX_HEADS:
        rule = f"batch and lengths are at most {MAX_LENGTH}, heads at most {MAX_HEADS}"
    if rule:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in _named(q, k, v))
        raise InputError(shapes, rule, do)
    for name, size in (("query", D), ("value", Dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            got, rule = f"{name} has head dimension {size}", f"it is between 1 and {MAX_HEAD_DIM}"
            raise InputError(got, rule)


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale as a number; raises InputError unless float32 holds it."""
    if scale is None:
        return 1.0 / math.sqrt(max(1, head_dim))
    value = number(scale)
    if value is None:
        got = f"scale is a {type(scale).__name__}: {scale!r:.80}"
        raise InputTypeError(got, "it is one number", "leave it None for 1/sqrt(D)")
    if not abs(value) <= MAX_FLOAT32:
        rule = "it is a finite number of 32 bits"
        raise InputError(f"scale={scale}", rule, "leave it None for 1/sqrt(D)")
    return value


def check_dropout(p: Any) -> float:
    """dropout_p as a float; raises InputError."""
    value = number(p)
    if value is None or not 0.0 <= value <= 1.0:
        raise InputError(
            f"dropout_p is {p!r:.80}",
            "it is a number from 0 to 1, the share of the weights that is dropped",
            "pass 0.0 for no dropout, as outside of training",
        )
    return value


def number(value: Any) -> float | None:
    """A value as Python's float; None for one that is no number, text among them."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except OverflowError:  # an int of more than 308 digits
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of many elements
        return None


def _check_is_block_mask(mask: object) -> None:
    """Raises InputError if a block_mask is not torch's BlockMask with a mask_mod."""
    if not isinstance(mask, BlockMask):
        raise InputTypeError(
            f"block_mask is a {type(mask).__name__}",
            "it is a BlockMask",
            "make one with create_block_mask(mask_mod, B, H, q_len, kv_len)",
        )
    if mask.mask_mod is _SLICED:
        raise SlicedMaskError(
            f"block_mask is sliced: it has no mask_mod, and lengths {tuple(mask.seq_lengths)}",
            "indexing a BlockMask drops its mask_mod, and its lengths are not those of the slice",
            "set both on the slice: mask_mod, the whole mask's with q_idx moved by the slice's "
            "first row, and seq_lengths = (q_len, kv_len)",
        )


def check_block_mask(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    """Raises InputError if a BlockMask was not made for these tensors."""
    _check_is_block_mask(mask)
    batch, heads, *lengths = *q.shape[:3], k.shape[2]
    if list(mask.seq_lengths) != lengths:
        made_for = tuple(int(length) for length in mask.seq_lengths)
        raise InputError(
            f"block_mask was made for lengths {made_for}, query and key have {tuple(lengths)}",
            "a BlockMask has exactly the lengths of query and key",
            "create it anew: create_block_mask(block_mask.mask_mod, B, H, q_len, kv_len, "
            "query.device); of a slice, set seq_lengths",
        )
    if mask.kv_num_blocks.dim() != 3 or mask.kv_indices.dim() != 4:
        raise InputError(
            f"block_mask's kv_indices has shape {tuple(mask.kv_indices.shape)}",
            "it is [B, H, q_blocks, kv_blocks]",
        )
    q_block, kv_block = mask.BLOCK_SIZE
    if q_block < 1 or kv_block < 1:
        raise InputError(f"block_mask has BLOCK_SIZE {mask.BLOCK_SIZE}", "block sizes are above 0")
    B, H, rows, _ = mask.kv_indices.shape
    if B not in (1, batch) or H not in (1, heads):
        raise InputError(
            f"block_mask is for batch {B} and {H} heads, query has {(batch, heads)}",
            "its batch and heads are query's, or 1 to serve them all",
        )
    _check_lists(mask)
    if rows < -(-lengths[0] // q_block):
        raise InputError(
            f"block_mask lists {rows} blocks of {q_block} query rows for {lengths[0]} rows",
            "its lists reach over all of query",
        )
    if q.device.type not in PLUGINS or not mask.kv_indices.is_cpu:  # they read it on the host
        _check_place("block_mask", mask.kv_indices, q)


def _check_lists(mask: BlockMask) -> None:
    """Raises InputError if lists differ in rows, or have more entries than kernels count."""
    rows = mask.kv_num_blocks.shape
    for name, counts, indices in (
        ("kv", mask.kv_num_blocks, mask.kv_indices),
        ("full_kv", mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        if counts is None or indices is None:
            continue
        if counts.shape != rows or indices.shape[:-1] != rows:
            raise InputError(
                f"block_mask's {name}_num_blocks has shape {tuple(counts.shape)}, its "
                f"{name}_indices {tuple(indices.shape)}, its kv_num_blocks {tuple(rows)}",
                "all of its lists have the same batches, heads and query blocks",
            )
        if indices.numel() >= 2**31:
            raise InputError(
                f"block_mask lists {indices.numel()} blocks",
                "a kernel counts the entries of the lists in 32 bits",
                "use larger blocks, or one list for all heads or batches",
            )


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raises InputError if sinks are not one logit for each query head, on query's device."""
    rule = "sinks are one logit for each query head, [Hq]"
    if not isinstance(sinks, Tensor):
        raise InputTypeError(f"sinks is a {type(sinks).__name__}", f"{rule}, in a torch.Tensor")
    if sinks.shape != q.shape[1:2]:
        got = f"sinks has shape {tuple(sinks.shape)}, query has {q.shape[1]} heads"
        raise InputError(got, rule)
    if sinks.dtype not in DTYPES and sinks.dtype != q.dtype:
        allowed = ", ".join(map(str, DTYPES))
        raise InputError(f"sinks is {sinks.dtype}", f"it is {allowed} or query's", "convert it")
    _check_place("sinks", sinks, q)


def check_descales(descales: Descales, q: Tensor, k: Tensor) -> None:
    """Raises InputError if a descale is not a fp32 factor of each head of fp8 inputs."""
    for letter, x, like in zip("qkv", descales, (q, k, k), strict=True):
        if x is None:
            continue
        name, heads = f"{letter}_descale", tuple(like.shape[:2])
        if not isinstance(x, Tensor):
            raise InputTypeError(f"{name} is a {type(x).__name__}", "it is a torch.Tensor")
        if q.dtype not in FP8:
            raise InputError(
                f"{name} beside a query of {q.dtype}",
                "descales belong to inputs of float8_e4m3fn, query among them",
                "leave it out: score_mod multiplies the scores of any inputs by what it captures, "
                "and what comes out can be multiplied by a factor of the values",
            )
        if tuple(x.shape) != heads:
            raise InputError(
                f"{name} has shape {tuple(x.shape)}",
                f"it is one factor for each head, [B, H]: {heads} here",
                f"expand it: {name}.expand{heads} copies nothing",
            )
        if x.dtype != torch.float32:
            raise InputError(f"{name} is {x.dtype}", "it is torch.float32", "convert it")
        _check_place(name, x, q)


def _check_place(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise PlaceError(
            f"{name} is on {tensor.device}, query on {q.device}",
            "they are on one device",
            f"call {name}.to({str(q.device)!r})",
        )


def check_devices(q: Tensor) -> None:
    """Raises InputError if nothing can compute tensors on their device."""
    if q.device.type not in ("cpu", "cuda", *TORCHS, *PLUGINS):
        raise InputError(
            f"query is on {q.device}",
            "flexattn runs on cuda (NVIDIA and AMD), cpu and neuron tensors, and leaves xpu and "
            "mps to torch's flex_attention",
            "move them with x.to('cuda') or x.cpu()",
        )
