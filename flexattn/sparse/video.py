"""Sparse attention of video models: VSA."""

from __future__ import annotations

import math

from torch import Tensor

from flexattn.errors import InputError
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.selection import Selection
from flexattn.sparse.shared import of_query_heads, wide


def vsa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coarse_gate: Tensor,
    fine_gate: Tensor,
    *,
    canvas: tuple[int, int, int],
    k: int,
    cube: tuple[int, int, int] = (4, 4, 4),
    scale: float | None = None,
) -> Tensor:
    """Video sparse attention: attention of cubes' means, and of tokens in the k best cubes.

    query [B, Hq, L, E], key [B, Hkv, L, E], value [B, Hkv, L, Ev], gates [B, Hq, L, 1 or Ev];
    tokens in the order of frames, rows, columns of `canvas`, which is whole cubes. The means of a
    cube's queries, keys and values attend to each other without a mask. Each token gets the
    result of its cube, times coarse_gate. Each cube of queries also chooses k cubes of keys by the
    same scores. Its tokens attend to theirs, times fine_gate. Both parts have gradients.

    Source: Zhang et al., VSA, 2025, arXiv:2505.13389.
    """
    if len(canvas) != 3 or len(cube) != 3 or min(*canvas, *cube) < 1:
        raise InputError(
            f"a canvas of {canvas} in cubes of {cube}",
            "both are frames, rows and columns, at least 1 of each",
            "pass three numbers each; an image is one frame",
        )
    ragged = any(a % b for a, b in zip(canvas, cube, strict=True))
    if ragged or math.prod(canvas) != query.shape[2]:
        raise InputError(
            f"a canvas of {canvas} in cubes of {cube} for {query.shape[2]} tokens",
            "the canvas has as many tokens, and is whole cubes",
            "pad the frames, rows and columns",
        )
    if key.shape[2] != query.shape[2]:
        raise InputError(
            f"{query.shape[2]} queries and {key.shape[2]} keys",
            "each token has a query and a key: there are as many keys as queries",
            "pass those of the whole canvas",
        )
    size = math.prod(cube)
    q, key_cubes, value_cubes = (_in_cubes(x, canvas, cube) for x in (query, key, value))
    of_q, of_k, of_v = (
        of_query_heads(wide(x).mean(3), query) for x in (q, key_cubes, value_cubes)
    )
    scores = of_q @ of_k.mT * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    coarse = (scores.softmax(-1) @ of_v).to(query.dtype)
    chosen = Selection.from_topk(scores, k, unit=size, rows=size)
    q, key_cubes, value_cubes = (x.flatten(2, 3) for x in (q, key_cubes, value_cubes))
    fine = flex_attention(q, key_cubes, value_cubes, None, chosen, scale, True)
    parts = coarse[:, :, :, None].expand(-1, -1, -1, size, -1), fine.unflatten(2, (-1, size))
    of_cubes, of_tokens = (_in_frames(x, canvas, cube) for x in parts)
    return coarse_gate * of_cubes + fine_gate * of_tokens


def _in_cubes(x: Tensor, canvas: tuple[int, ...], cube: tuple[int, ...]) -> Tensor:
    """[B, H, tokens, E] in the order of frames as [B, H, cubes, tokens of a cube, E]."""
    sizes = [n for a, b in zip(canvas, cube, strict=True) for n in (a // b, b)]
    x = x.unflatten(2, sizes).permute(0, 1, 2, 4, 6, 3, 5, 7, 8)
    return x.flatten(5, 7).flatten(2, 4)


def _in_frames(x: Tensor, canvas: tuple[int, ...], cube: tuple[int, ...]) -> Tensor:
    """The reverse of _in_cubes."""
    x = x.unflatten(3, cube).unflatten(2, [a // b for a, b in zip(canvas, cube, strict=True)])
    return x.permute(0, 1, 2, 5, 3, 6, 4, 7, 8).flatten(2, 7)
