"""create_block_mask(): torch's BlockMask, made block by block in memory of the blocks' number."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from flexattn.build import builder
from flexattn.device import detect
from flexattn.errors import InputError, UnsupportedError
from flexattn.mods import Bound, bind
from flexattn.problem import Captures
from flexattn.render.arguments import captured_values
from flexattn.render.source import render_block_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "noop_mask",
    "or_masks",
]

MaskMod = Callable[..., Tensor]
EMPTY, PARTIAL, FULL = 0, 1, 2
# Elements that the CPU path evaluates at a time.
_CHUNK = 2**22


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The BlockMask of a mask_mod: torch's class with torch's contents, without the L x S square.

    mask_mod(b, h, q_idx, kv_idx) -> bool. B, H: None where the mask does not depend on them.
    BLOCK_SIZE: one number, or (query rows, keys); it need not divide the lengths. device: the
    accelerator where None, else the CPU. _compile changes nothing: no path here needs it.
    compute_dq_write_order asks for metadata of a backward and needs torch 2.13.

    Raises InputError for sizes below 1 and ModError for a mask_mod that cannot be read.
    """
    where = _device(device)
    batch, heads = 1 if B is None else B, 1 if H is None else H
    q_block, kv_block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    for name, size in (("B", batch), ("H", heads), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if size < 0 or (name in "BH" and size < 1):
            raise InputError(f"{name}={size}", f"{name} is at least {int(name in 'BH')}")
    if q_block < 1 or kv_block < 1:
        raise InputError(f"BLOCK_SIZE={BLOCK_SIZE}", "block sizes are at least 1")
    bound = bind(mask_mod, "mask", where)
    assert bound is not None
    sizes = (batch, heads, Q_LEN, KV_LEN)
    kinds = block_kinds(bound, sizes, (q_block, kv_block), where)
    lists: tuple[Tensor, ...]
    if separate_full_blocks:
        lists = (*_ordered(kinds == PARTIAL), *_ordered(kinds == FULL))
    else:
        lists = _ordered(kinds != EMPTY)
    fixed: dict[str, Any] = {
        "BLOCK_SIZE": (q_block, kv_block),
        "mask_mod": mask_mod,
        "seq_lengths": (Q_LEN, KV_LEN),
    }
    mask: BlockMask = BlockMask.from_kv_blocks(*lists, **fixed)
    if compute_dq_write_order:
        _add_write_order(mask, dq_kv_order)
    return mask


def block_kinds(
    bound: Bound, sizes: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> Tensor:
    """Whether each block is EMPTY, PARTIAL or FULL: int8 [B, H, q_blocks, kv_blocks].

    A block that reaches past a length is never FULL, as in torch. On a GPU one kernel decides
    each block in registers; on the CPU rows of blocks are evaluated a few at a time.
    """
    B, H, q_len, kv_len = sizes
    shape = (B, H, -(-q_len // block[0]), -(-kv_len // block[1]))
    kinds = torch.empty(shape, dtype=torch.int8, device=device)
    if kinds.numel() == 0:
        return kinds
    if device.type == "cuda":
        _kinds_on_gpu(kinds, bound, sizes, block)
    else:
        _kinds_on_cpu(kinds, bound, sizes, block)
    return kinds


def _kinds_on_gpu(
    kinds: Tensor, bound: Bound, sizes: tuple[int, int, int, int], block: tuple[int, int]
) -> None:
    device = kinds.device
    captures = Captures(bound.mod, tuple(t.stride()[-1:] == (1,) for t in bound.tensors))
    target = detect(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    kernel = builder().kernel(render_block_mask(captures, *block, target), target, index)
    captured = captured_values(captures, bound)
    fixed = [None, *sizes[1:], *kinds.shape[2:], *[None] * len(captured)]
    launcher = kernel.prepare(kinds.numel(), fixed, ())
    with torch.cuda.device(index):
        launcher.launch(torch.cuda.current_stream(index).cuda_stream, [kinds, *captured])


def _kinds_on_cpu(
    kinds: Tensor, bound: Bound, sizes: tuple[int, int, int, int], block: tuple[int, int]
) -> None:
    from flexattn.render.torch_printer import evaluate

    B, H, q_len, kv_len = sizes
    q_blocks, kv_blocks = kinds.shape[2:]
    width = kv_blocks * block[1]
    step = max(1, _CHUNK // (block[0] * width))
    kv_idx = torch.arange(width)
    for b in range(B):
        for h in range(H):
            for first in range(0, q_blocks, step):
                last = min(first + step, q_blocks)
                q_idx = torch.arange(first * block[0], last * block[0])[:, None]
                env = {
                    "b": torch.tensor(b),
                    "h": torch.tensor(h),
                    "q_idx": q_idx,
                    "kv_idx": kv_idx[None, :],
                }
                keep = evaluate(bound.mod, env, bound.tensors, bound.scalars)
                inside = (q_idx < q_len) & (kv_idx < kv_len)[None, :]
                tiles = (keep & inside).view(last - first, block[0], kv_blocks, block[1])
                some = tiles.any(dim=3).any(dim=1)
                every = tiles.all(dim=3).all(dim=1)
                kinds[b, h, first:last] = some.to(torch.int8) + every.to(torch.int8)


def _ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
    """A dense block mask as torch keeps it: counts, and indices with the listed ones first."""
    counts = dense.sum(dim=-1, dtype=torch.int32)
    indices = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True)
    return counts.contiguous(), indices.to(torch.int32).contiguous()


def _device(device: torch.device | str | None) -> torch.device:
    found = torch.device("cpu") if device is None else torch.device(device)
    if device is None and torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator() or found
    if found == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _add_write_order(mask: BlockMask, dq_kv_order: bool) -> None:
    """Metadata for FlashAttention's deterministic backward, computed by torch where it can."""
    if "dq_write_order" not in inspect.signature(BlockMask.from_kv_blocks).parameters:
        raise UnsupportedError(
            f"compute_dq_write_order with torch {torch.__version__}", "torch has it from 2.13 on"
        )
    from torch.nn.attention import flex_attention as torch_flex

    partial, full = torch_flex._compute_dq_write_order_from_block_mask(
        mask, dq_kv_order=dq_kv_order
    )
    mask.dq_write_order, mask.dq_write_order_full = partial, full
    mask.dq_kv_order, mask.dq_kv_order_spt = None, dq_kv_order
