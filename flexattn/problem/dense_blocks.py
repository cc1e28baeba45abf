"""A BlockMask's lists as maps of blocks, and such a map seen from positions."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_blocks(num_blocks: Tensor, indices: Tensor, cols: int) -> Tensor:
    """Block lists as a bool map; entries past the count or past `cols` columns are dropped."""
    while indices.dim() < 4:
        num_blocks, indices = num_blocks[None], indices[None]
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    places = torch.where(listed & (indices >= 0), indices, cols).clamp(max=cols).long()
    dense = torch.zeros((*indices.shape[:-1], cols + 1), dtype=torch.bool, device=indices.device)
    return dense.scatter(-1, places, True)[..., :cols]


def spread(blocks: Tensor, block_size: tuple[int, int], lanes: tuple[Tensor, ...]) -> Tensor:
    """The map [B or 1, H or 1, q blocks, kv blocks] at batches, heads, rows, keys: [b, h, m, n].

    lanes: the numbers of each, in one dimension.
    """
    b, h, m, n = lanes
    rows, cols = m // block_size[0], n // block_size[1]
    return blocks[(b % blocks.shape[0])[:, None], h % blocks.shape[1]][:, :, rows][..., cols]
