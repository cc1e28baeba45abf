"""The rules that a call's arguments must keep, each with an error that says which one broke."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexattn.errors import InputError, InputTypeError, LayoutError, PlaceError, SlicedMaskError
from flexattn.problem import DTYPES, FP8, MAX_HEADS, MAX_LENGTH, NARROWER
from flexattn.problem.descales import Descales

MAX_HEAD_DIM = 576
MAX_FLOAT32 = torch.finfo(torch.float32).max
# What torch puts in place of a sliced BlockMask's mask_mod: it raises when it is called.
_SLICED = getattr(torch_flex, "_sliced_mask_mod_error", object())


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Shapes, dtypes and devices of query, key and value; raises InputError."""
    named = {"query": q, "key": k, "value": v}
    shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in named.items())
    if len({each.device for each in named.values()}) > 1:
        devices = ", ".join(f"{name} on {each.device}" for name, each in named.items())
        raise PlaceError(devices, "query, key and value are on one device", "move them there")
    if k.dtype != v.dtype or not (k.dtype == q.dtype or mixes(q, k)):
        dtypes = ", ".join(f"{name} {each.dtype}" for name, each in named.items())
        narrower = ", ".join(map(str, NARROWER.get(q.dtype, ()))) or "none"
        raise InputError(
            dtypes,
            "key and value have one dtype, query's or a narrower one of which it holds every "
            f"number: here {narrower}",
            "convert them",
        )
    _check_shapes(q, k, v, enable_gqa, shapes)


def mixes(q: Tensor, k: Tensor) -> bool:
    """Whether key and value are narrower than query, as a kernel that converts them takes them."""
    return k.dtype in NARROWER.get(q.dtype, ())


def is_dense(tensor: object) -> bool:
    """Whether an argument is a tensor of the four dimensions that attention has."""
    if not isinstance(tensor, Tensor) or tensor.is_nested:
        return False
    return tensor.layout is torch.strided and tensor.dim() == 4


def refuse_arguments(*tensors: object) -> None:
    """Raise InputError for the first of query, key and value that is no tensor of 4 dimensions."""
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if not is_dense(tensor):
            refuse_tensor(name, tensor)


def refuse_tensor(name: str, tensor: object) -> NoReturn:
    """Say what is wrong with an argument that is no dense tensor of four dimensions."""
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
            "packed = flexattn.pack(query, key, value) packs them; mask with packed.mask_mod, "
            "and packed.unpack(out) is nested again",
        )
    if tensor.layout is not torch.strided:
        raise LayoutError(
            f"{name} has layout {tensor.layout}", "it is a dense tensor", f"pass {name}.to_dense()"
        )
    raise LayoutError(
        f"{name} has shape {tuple(tensor.shape)}",
        "it is [batch, heads, length, head_dim]",
        "give it the dimensions it lacks, as x[None] does",
    )


def check_input(q: Tensor, v: Tensor, *, float64: bool = False) -> None:
    """The dtypes and sizes that kernels take, and plain torch with float64; raises InputError."""
    if q.dtype not in DTYPES and q.dtype not in FP8 and not (float64 and q.dtype == torch.float64):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in (*DTYPES, *FP8))
        raise InputError(
            f"query is {q.dtype}",
            f"query, key and value are {known}, and on the CPU also float64",
            "convert them: x.to(torch.bfloat16)",
        )
    for name, size in (("query", q.shape[-1]), ("value", v.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise InputError(
                f"{name} has head dimension {size}", f"it is between 1 and {MAX_HEAD_DIM}"
            )
    if max(q.shape[2], v.shape[2], q.shape[0]) > MAX_LENGTH or q.shape[1] > MAX_HEADS:
        raise InputError(
            f"query {tuple(q.shape)}, value {tuple(v.shape)}",
            f"batch and lengths are at most {MAX_LENGTH}, heads at most {MAX_HEADS}",
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, shapes: str) -> None:
    if k.shape[:3] != v.shape[:3]:
        raise InputError(shapes, "key and value agree in batch, heads and length")
    if q.shape[-1] != k.shape[-1]:
        raise InputError(shapes, "query and key have the same head dimension")
    Hq, Hkv = q.shape[1], k.shape[1]
    if Hq == 0 or Hkv == 0:
        raise InputError(
            shapes, "query and key have at least one head", "make no call where there is none"
        )
    if Hq != Hkv and not enable_gqa:
        raise InputError(
            shapes, "query and key have the same number of heads", "pass enable_gqa=True for GQA"
        )
    if Hq % Hkv:
        raise InputError(shapes, "the number of query heads is a multiple of the key heads")
    if k.shape[0] not in (1, q.shape[0]):
        raise InputError(shapes, "key's batch is query's, or 1")


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


def number(value: Any) -> float | None:
    """A value as Python's float; None for one that is no number, text among them."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of many elements
        return None


def check_is_block_mask(mask: object) -> None:
    """That a block_mask is torch's BlockMask with a mask_mod; raises InputError."""
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
    """That a BlockMask was made for these tensors; raises InputError."""
    check_is_block_mask(mask)
    lengths = tuple(int(length) for length in mask.seq_lengths)
    if lengths != (q.shape[2], k.shape[2]):
        raise InputError(
            f"block_mask was made for lengths {lengths}, query and key have "
            f"{(q.shape[2], k.shape[2])}",
            "a BlockMask has exactly the lengths of query and key",
            "create it anew for these lengths, or crop it with block_mask._adjust(q_len, kv_len); "
            "of a slice, set seq_lengths",
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
    if B not in (1, q.shape[0]) or H not in (1, q.shape[1]):
        raise InputError(
            f"block_mask is for batch {B} and {H} heads, query has {tuple(q.shape[:2])}",
            "its batch and heads are query's, or 1 to serve them all",
        )
    _check_lists(mask)
    if rows < -(-q.shape[2] // q_block):
        raise InputError(
            f"block_mask lists {rows} blocks of {q_block} query rows for {q.shape[2]} rows",
            "its lists reach over all of query",
        )
    if mask.kv_indices.device != q.device:
        raise PlaceError(
            f"block_mask is on {mask.kv_indices.device}, query on {q.device}",
            "they are on one device",
            f"call block_mask.to({str(q.device)!r})",
        )


def _check_lists(mask: BlockMask) -> None:
    """That counts and indices stand in the same rows, and kernels can count them."""
    rows = mask.kv_num_blocks.shape
    for name in ("kv", "full_kv"):
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
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


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """That sinks are one logit for each query head, where query is; raises InputError."""
    if sinks is None:
        return
    rule = "sinks are one logit for each query head, [Hq]"
    if not isinstance(sinks, Tensor):
        raise InputTypeError(f"sinks is a {type(sinks).__name__}", f"{rule}, in a torch.Tensor")
    if sinks.shape != q.shape[1:2]:
        got = f"sinks has shape {tuple(sinks.shape)}, query has {q.shape[1]} heads"
        raise InputError(got, rule)
    if sinks.dtype not in DTYPES and sinks.dtype != q.dtype:
        allowed = ", ".join(map(str, DTYPES))
        raise InputError(f"sinks is {sinks.dtype}", f"it is {allowed} or query's", "convert it")
    if sinks.device != q.device:
        raise PlaceError(
            f"sinks is on {sinks.device}, query on {q.device}",
            "they are on one device",
            f"call sinks.to({str(q.device)!r})",
        )


def check_descales(descales: Descales, q: Tensor, k: Tensor) -> None:
    """That descales are fp32 factors of each head of fp8 inputs, where they are."""
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
        if x.device != q.device:
            raise PlaceError(
                f"{name} is on {x.device}, query on {q.device}",
                "they are on one device",
                f"call {name}.to({str(q.device)!r})",
            )


def check_devices(q: Tensor) -> None:
    """That the tensors are where something can compute them; raises InputError."""
    if q.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"query is on {q.device}",
            "flexattn runs on cuda (NVIDIA and AMD) and cpu tensors",
            "move them with x.to('cuda') or x.cpu(); torch's own flex_attention knows xpu and mps",
        )


def aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether addresses and all strides but the last are multiples of 16 bytes, none repeated.

    The keys' batch may be: kernels that read through tensor descriptors, which know no stride of
    0, ask for that one alone.
    """
    batches = q.shape[0] == 1 or q.stride(0) > 0
    return batches and _aligned(q) and _aligned(k) and _aligned(v)


def _aligned(tensor: Tensor) -> bool:
    divisor = 16 // tensor.element_size()
    if tensor.data_ptr() % 16:
        return False
    pairs = list(zip(tensor.shape, tensor.stride(), strict=True))[:3]
    if any(size > 1 and stride % divisor for size, stride in pairs):
        return False
    return all(size == 1 or stride > 0 for size, stride in pairs[1:])


def tf32_allowed(q: Tensor, asked: bool | None = None) -> bool:
    """Whether float32 products use tf32: as asked, else torch's own setting for this device."""
    if q.dtype != torch.float32 or not q.is_cuda or torch.version.hip is not None:
        return False
    return bool(torch.backends.cuda.matmul.allow_tf32) if asked is None else asked
