"""create_block_mask(): torch's BlockMask, made block by block in memory of the blocks' number."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.classify import kinds_by_rows
from flexattn.block_mask.lists import lazy_mask, lists_of
from flexattn.device import usable
from flexattn.errors import InputError, InputTypeError, NoKernelError, UnsupportedError
from flexattn.mods import bind
from flexattn.mods.expr import MaskMod
from flexattn.problem import MAX_HEADS, MAX_LENGTH
from flexattn.problem.read_checks import check_mask_reads
from flexattn.settings import current, say_once
from flexattn.util.ambient import without_modes

_SIGNATURE = "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128)"


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
    """The BlockMask of a mask_mod: torch's contents, without the L x S square.

    It returns torch's class. Its lists by key (q_num_blocks, q_indices and those of full blocks)
    differ: they are made when they are first read. A block is decided by the bounds of the
    mask over it (flexattn.mods.algebra), and by its elements where the bounds leave it open.

    Inside a graph of torch.compile, and under a FakeTensorMode, torch's own create_block_mask
    makes the lists, from the L x S square. It also makes them for a mask that plain torch computes
    and no kernel does. No other mode that a program is in has a part in them.

    Lists may be replaced, or written in place by operations of torch, and the next call reads them
    as they are; the backward of an earlier one raises, as of any tensor that autograd saved. What
    is written past torch's count of writes is not seen where the blocks of each row join up, nor
    by a backward: through `.data`, `.detach().numpy()`, a kernel of one's own or a replayed CUDA
    graph. `mask.kv_num_blocks.add_(0)` afterwards says so.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) returns whether the query sees the key.
        B: the batch; None if the mask does not depend on it.
        H: the query heads; None if the mask does not depend on them.
        Q_LEN: the number of queries.
        KV_LEN: the number of keys.
        device: the accelerator by default, else the CPU.
        BLOCK_SIZE: one number, or (query rows, keys); it need not divide the lengths.
        _compile: changes nothing: no path here needs it.
        separate_full_blocks: as torch's.
        compute_dq_write_order: False: it asks for metadata that torch's kernels alone read.
        dq_kv_order: changes nothing.

    Returns:
        torch's BlockMask.

    Raises:
        InputError: for sizes that are no integers or too small.
        ModError: for a mask_mod that cannot be read.
        CaptureError: with FLEXATTN_CHECK=1, if it reads outside of a tensor that it captures.

    Example::

        mask = create_block_mask(causal, None, None, 2000, 2000, device="cuda")
    """
    if torch.compiler.is_dynamo_compiling() or active_fake_mode() is not None:
        return _in_a_graph(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)
    batch, heads = _size("B", 1 if B is None else B), _size("H", 1 if H is None else H)
    Q_LEN, KV_LEN = _size("Q_LEN", Q_LEN), _size("KV_LEN", KV_LEN)
    q_block, kv_block = _block(BLOCK_SIZE)
    where = _device(device)
    sizes = (batch, heads, Q_LEN, KV_LEN)
    for name, size in zip(("B", "H", "Q_LEN", "KV_LEN"), sizes, strict=True):
        least, most = int(name == "H"), MAX_HEADS if name == "H" else MAX_LENGTH
        if not least <= size <= most:
            raise InputError(f"{name}={size}", f"{name} is from {least} to {most}")
    if q_block < 1 or kv_block < 1:
        raise InputError(f"BLOCK_SIZE={BLOCK_SIZE}", "block sizes are at least 1")
    if mask_mod is None:
        raise InputTypeError(
            "mask_mod is None",
            "it is a function mask_mod(b, h, q_idx, kv_idx) -> bool",
            "pass block_mask=None to flex_attention where nothing is masked, or noop_mask",
        )
    if compute_dq_write_order:
        raise UnsupportedError(
            "compute_dq_write_order=True",
            "that metadata is for torch's own kernels",
            "torch's create_block_mask makes it; its masks work in flexattn, too",
        )
    block, lengths = (q_block, kv_block), (Q_LEN, KV_LEN)
    shape = (batch, heads, -(-Q_LEN // q_block), -(-KV_LEN // kv_block))
    with without_modes():
        try:
            bound = bind(mask_mod, "mask", where)
        except NoKernelError as why:
            mask = _by_torch(
                mask_mod, why, B, H, Q_LEN, KV_LEN, where, block, separate_full_blocks
            )
        else:
            assert bound is not None
            if current().check:
                check_mask_reads(mask_mod, bound, sizes, where)
            parts = kinds_by_rows(bound, sizes, block, where)
            lists = lists_of(parts, shape, where, bool(separate_full_blocks))
            mask = lazy_mask(lists, block, mask_mod, lengths, decided=True)
    return mask


def _in_a_graph(mask_mod: MaskMod, *given: Any) -> BlockMask:
    """The same mask by torch's own way, which Dynamo can trace, in memory of L x S."""
    *sizes, separate_full_blocks = given
    rest = {} if separate_full_blocks else {"separate_full_blocks": False}
    return torch_flex.create_block_mask(mask_mod, *sizes, **rest)


def _by_torch(mask_mod: MaskMod, why: NoKernelError, *given: Any) -> BlockMask:
    """The same of a mask that plain torch alone computes; raises `why` if it does not either."""
    say_once(f"{why.got}: torch's create_block_mask makes its lists, in memory of L x S")
    try:
        return _in_a_graph(mask_mod, *given)
    except RuntimeError:
        raise why from None


def _size(name: str, size: Any) -> int:
    """A size as an integer; raises InputTypeError for what is none, as a device or a mask_mod."""
    if isinstance(size, (int, torch.SymInt)):
        return size  # type: ignore[return-value]
    try:
        return operator.index(size)
    except TypeError:
        raise InputTypeError(
            f"{name} is {size!r:.80}", f"it is an integer in {_SIGNATURE}", "order them so"
        ) from None


def _block(size: Any) -> tuple[int, int]:
    """The query rows and keys of a block; raises InputTypeError for what is no such pair."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise InputTypeError(
            f"BLOCK_SIZE is {size!r:.80}",
            "it is one integer, or (query rows, keys)",
            "pass 128, or (128, 128)",
        )
    return _size("BLOCK_SIZE", pair[0]), _size("BLOCK_SIZE", pair[1])


def from_kinds(
    kinds: Tensor,
    mask_mod: MaskMod,
    block: tuple[int, int],
    lengths: tuple[int, int],
    separate_full_blocks: bool = True,
) -> BlockMask:
    """The BlockMask that lists what block_kinds found, on the device of its answer."""
    B, H, rows, columns = kinds.shape
    flat = kinds.reshape(B * H * rows, columns)
    parts = [(0, flat)] if flat.numel() else []
    lists = lists_of(parts, (B, H, rows, columns), kinds.device, separate_full_blocks)
    return lazy_mask(lists, block, mask_mod, lengths, decided=True)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    return usable("cpu" if device is None else device)
