"""New keys and values as a paged cache stores them, in plain torch, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The largest finite numbers.
MAX_FINITE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_LEAST = 2.0**-100


def appended(
    k: Tensor,
    v: Tensor | None,
    cache: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
    slots: Sequence[int],
    *,
    page: int,
    layout: str,
    scaled: Any = False,
    rope: Any = None,
    positions: Tensor | None = None,
    tables: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Copies of a cache (K, V) and of its scales as they are after new tokens were stored.

    k, v [tokens, Hkv, D]. slots: of each token, page x page size + place; those beyond the cache
    are left out. scaled, layout: as AppendPlan's. rope: a Rope, with positions [tokens], and
    tables (cos, sin) where it has no base.
    """
    found = [None if x is None else x.clone() for x in cache]
    steps = [None if x is None else x.clone() for x in scales]
    for x, out, step, turn in zip((k, v), found, steps, (rope, None), strict=True):
        if x is None or out is None:
            continue
        x = x if turn is None else rotate(x, positions, turn, *tables)
        # Eight bits are copied as bytes, for not every operation of torch knows their dtypes.
        bytes_of = out.view(torch.uint8) if out.dtype in MAX_FINITE else out
        for t, slot in enumerate(slots):
            if not 0 <= slot < len(out) * page:
                continue
            p, n = divmod(slot, page)
            scale = None if step is None else _scale(x[t], step, p, n, layout, scaled, out.dtype)
            row = quantized(x[t], scale, out.dtype)
            row = row.view(torch.uint8) if out.dtype in MAX_FINITE else row
            if layout == "NHD":
                bytes_of[p, n] = row
            else:
                bytes_of[p, :, n] = row
    return found, steps


def _scale(
    x: Tensor, step: Tensor, p: int, n: int, layout: str, scaled: Any, dtype: torch.dtype
) -> Tensor:
    """The scale of each head of a token, computed and stored in `step` where tokens have one."""
    if scaled in (True, "tensor", "head"):
        return step.expand(x.shape[0])
    if scaled in ("page", "page_head"):
        return step[p].expand(x.shape[0])
    scale = computed_scales(x[None], dtype, scaled == "token_head")[0]
    if scaled == "token" or layout == "NHD":
        step[p, n] = scale
    else:
        step[p, :, n] = scale
    return scale.expand(x.shape[0])


def rotate(
    k: Tensor,
    positions: Tensor | None,
    rope: Any,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """k [tokens, Hkv, D] rotated in float32, as transformers does."""
    assert positions is not None
    if cos is None or sin is None:
        angles = positions.float()[:, None] * rope.inv_freq().to(k.device)
        cos, sin = angles.cos(), angles.sin()
    else:
        at = positions.long().clamp(0, len(cos) - 1)
        cos, sin = cos[at].float(), sin[at].float()
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = k[..., : rope.dim].float(), k[..., rope.dim :].float()
    if rope.interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, rest), -1)


def quantized(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [..., D] over scale [...], rounded to the dtype: to 8 bits what is too large saturates."""
    most = MAX_FINITE.get(dtype)
    if most is None:
        return x.to(dtype)
    x = x.float()
    if scale is not None:
        x = x * (1.0 / scale)[..., None]
    return x.clamp(-most, most).to(dtype)


def computed_scales(x: Tensor, dtype: torch.dtype, by_head: bool) -> Tensor:
    """The scale of each token, or of each of its heads: [tokens] or [tokens, Hkv]."""
    size = x.float().abs()
    size = torch.where(size.isfinite(), size, 0.0).amax(-1)
    size = size if by_head else size.amax(-1)
    # On a GPU torch divides by a Python number as it multiplies by its reciprocal.
    return (size / torch.full_like(size, MAX_FINITE[dtype])).clamp(min=_LEAST)
