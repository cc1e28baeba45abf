"""Mask mods over structure: images, videos, interleaved media and trees."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.mods.signatures import MaskMod


def natten_2d(height: int, width: int, window: int) -> MaskMod:
    """Neighbourhood attention: a square of `window` pixels, moved inwards at the canvas's edge.

    Pixels run row-major, so a neighbourhood is a stripe of each of `window` rows. Every pixel has
    window x window keys, at the edges too.

        mask_mod = natten_2d(45, 45, 13)

    Source: Hassani et al., Neighborhood Attention Transformer, 2022, arXiv:2204.07143.
    """
    radius = window // 2

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = (q_idx // width).clamp(radius, height - 1 - radius)
        col = (q_idx % width).clamp(radius, width - 1 - radius)
        near_row = (row - kv_idx // width).abs() <= radius
        near_col = (col - kv_idx % width).abs() <= radius
        return near_row & near_col

    mask_mod.__name__ = f"natten_2d_{height}x{width}_{window}"
    return mask_mod


def sliding_tile_3d(
    canvas: tuple[int, int, int], tile: tuple[int, int, int], window: tuple[int, int, int]
) -> MaskMod:
    """Sliding tile attention over a video: a window of whole tiles around the query's tile.

    Canvas and tile in frames, rows and columns; the window in tiles. Tokens run row-major. Whole
    tiles make whole blocks where tokens are put in the order of their tiles.

        mask_mod = sliding_tile_3d((8, 16, 16), (2, 4, 4), (3, 3, 3))

    Source: Zhang et al., Sliding Tile Attention, 2025, arXiv:2502.04507.
    """
    frames, rows, cols = canvas
    tiles = [-(-length // t) for length, t in zip(canvas, tile, strict=True)]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_at = (q_idx // (rows * cols), q_idx // cols % rows, q_idx % cols)
        kv_at = (kv_idx // (rows * cols), kv_idx // cols % rows, kv_idx % cols)
        inside = q_idx >= 0
        for axis in range(3):
            left = window[axis] // 2
            right = window[axis] - 1 - left
            centre = (q_at[axis] // tile[axis]).clamp(left, tiles[axis] - 1 - right)
            key = kv_at[axis] // tile[axis]
            inside = inside & (centre - left <= key) & (key <= centre + right)
        return inside

    mask_mod.__name__ = f"sliding_tile_3d_{frames}x{rows}x{cols}"
    return mask_mod


def flamingo(image_of: Tensor, first: Tensor, last: Tensor) -> MaskMod:
    """Text queries that see an image's keys from text position `first` up to before `last`.

    image_of int [S] is each key's image; first and last int [images]. Text before the first image
    has no key at all: its rows are zeros.

        image_of = torch.arange(2048) // 512
        mask_mod = flamingo(image_of, torch.tensor([100, 600, 1100, 1500]),
                            torch.tensor([600, 1100, 1500, 2048]))

    Source: Alayrac et al., Flamingo, 2022, arXiv:2204.14198.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        image = image_of[kv_idx]
        return (first[image] <= q_idx) & (q_idx < last[image])

    mask_mod.__name__ = "flamingo"
    return mask_mod


def transfusion(image_ids: Tensor) -> MaskMod:
    """Causal text, images that see all of themselves; image_ids int [max(L, S)], -1 for text.

    One model predicts the next token of text and removes noise from whole images between it.

        image_ids = torch.full((2048,), -1)
        image_ids[300:812], image_ids[1200:1712] = 0, 1
        mask_mod = transfusion(image_ids)

    Source: Zhou et al., Transfusion, 2024, arXiv:2408.11039.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        image = image_ids[q_idx]
        same = (image >= 0) & (image == image_ids[kv_idx])
        return (q_idx >= kv_idx) | same

    mask_mod.__name__ = "transfusion"
    return mask_mod


def tree(ancestors: Tensor, context: int) -> MaskMod:
    """Speculative decoding: the first `context` keys, and a draft token's own ancestors.

    ancestors bool [L, L]: whether draft token j is i or an ancestor of i. A model verifies all
    branches of a draft in one call, and each branch sees its own past.

        parent = [0, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 8, 9, 9, 11, 12]
        ancestors = torch.eye(16, dtype=torch.bool)
        for node in range(1, 16):
            ancestors[node] |= ancestors[parent[node]]
        mask_mod = tree(ancestors, 16)

    Source: Miao et al., SpecInfer, 2023, arXiv:2305.09781.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        node = torch.clamp(kv_idx - context, min=0)
        return (kv_idx < context) | ancestors[q_idx, node]

    mask_mod.__name__ = "tree"
    return mask_mod
