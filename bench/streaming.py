"""A kernel that reads K and V once and computes nothing: the floor of decoding, by one clock."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.peers import Refusal
from bench.serving_inputs import Served

STREAMING = "streaming read"
PER_SM = 4
BLOCK = 2048


@triton.jit
def read(X, OUT, words, BLOCK: tl.constexpr):
    found = tl.zeros([BLOCK], tl.int32)
    share = tl.cdiv(words, tl.num_programs(0) * BLOCK) * BLOCK
    begin = tl.program_id(0).to(tl.int64) * share
    for i in tl.range(0, share, BLOCK, num_stages=4):
        at = begin + i + tl.arange(0, BLOCK)
        found |= tl.load(X + at, mask=at < words, other=0)
    # Always true of random words, and not known to the compiler.
    if tl.sum(found) != 0:
        tl.store(OUT + tl.program_id(0), 1)


def streaming(x: Served) -> Callable[[], Tensor] | Refusal:
    """Read K and V as they lie in memory, where that is what the row's decode reads."""
    one = torch.cat([x.k.flatten(), x.v.flatten()]) if x.v.data_ptr() != x.k.data_ptr() else x.k
    words = one.contiguous().view(-1).view(torch.int32)
    if words.numel() * words.element_size() != x.row.kv_bytes:
        return Refusal("what its cache holds is not what its decode reads once")
    programs = PER_SM * torch.cuda.get_device_properties(x.q.device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=x.q.device)

    def call() -> Tensor:
        read[(programs,)](words, out, words.numel(), BLOCK=BLOCK, num_warps=8)
        return out

    return call
