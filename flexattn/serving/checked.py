"""Checked mode (FLEXATTN_CHECK=1): a batch's lengths and pages, read back and held to the plan."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import InputError
from flexattn.serving.request import Maxima


def inspect(
    maxima: Maxima,
    keys: int,
    pages: int,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    placed: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Raise InputError for what the kernels would clamp: they never read outside the cache.

    keys: of one request that the table, or the contiguous cache, has room for. placed: mods read
    the positions of rows, of which the last stands at the last key. It waits for the
    device, so a stream that is being captured is not inspected. Returns copies of seq_lens,
    block_table, cu_seqlens and kv_start as they were looked at, in their strides.
    """
    if seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        return seq_lens, block_table, cu_seqlens, kv_start
    seq_lens = _copied(seq_lens)
    block_table, cu_seqlens, kv_start = (
        None if each is None else _copied(each) for each in (block_table, cu_seqlens, kv_start)
    )
    lengths = seq_lens.cpu()
    starts = torch.zeros_like(lengths) if kv_start is None else kv_start.cpu()[: len(lengths)]
    own = lengths - starts
    _within("seq_lens", lengths, 0, 2**31 - 1, "lengths are not negative")
    _within("kv_start", starts, 0, 2**31 - 1, "a prefix is not negative")
    _within(
        "seq_lens", own, 0, maxima.kv_len, f"a request has at most the plan's {maxima.kv_len} keys"
    )
    if block_table is None:
        _within("seq_lens", own, 0, keys, f"the cache has {keys} keys for a request")
    else:
        width = block_table.shape[1]
        _within("seq_lens", own, 0, keys, f"block_table lists {width} pages of {maxima.page} keys")
        used = torch.arange(width, device="cpu") < -(-own[:, None] // maxima.page)
        table = block_table.cpu()[: len(own)]
        wrong = ((table < 0) | (table >= pages)) & used
        if bool(wrong.any()):
            b, place = (int(each) for each in wrong.nonzero()[0])
            raise InputError(
                f"block_table[{b}, {place}] is {int(table[b, place])}",
                f"the cache has pages 0 to {pages - 1}",
            )
    if cu_seqlens is not None:
        ends = cu_seqlens.cpu()
        _within("cu_seqlens_q", ends, 0, maxima.total_q, f"the plan has {maxima.total_q} rows")
        if bool((ends[1:] < ends[:-1]).any()) or int(ends[0]) != 0:
            raise InputError(f"cu_seqlens_q {ends.tolist()[:9]}", "it starts at 0 and never falls")
    if placed:
        ends = (
            torch.arange(len(lengths) + 1) * maxima.q_len
            if cu_seqlens is None
            else cu_seqlens.cpu()
        )
        rows = ends.diff()[: len(lengths)]
        early = (lengths > 0) & (lengths < rows)
        if bool(early.any()):
            b = int(early.nonzero()[0])
            raise InputError(
                f"request {b} has {int(rows[b])} rows and {int(lengths[b])} keys",
                "the last row stands at the last key, and mods are given no position below 0",
                "give a request no more rows than keys: cu_seqlens_q cuts them",
            )
    return seq_lens, block_table, cu_seqlens, kv_start


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also where these leave gaps."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    copy = tensor.as_strided((span,), (1,)).clone()
    return copy.as_strided(tensor.shape, tensor.stride())


def _within(name: str, values: Tensor, low: int, high: int, rule: str) -> None:
    wrong = (values < low) | (values > high)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise InputError(f"{name}[{b}] leads to {int(values[b])}", rule, "make a larger plan")
