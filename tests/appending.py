"""New keys and values for a cache, and what plain torch stores of them."""

import math

import torch

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LEAST = 2.0**-100


def rotate(k, positions, rope, cos=None, sin=None):
    """k [tokens, Hkv, D] rotated in float32, as transformers does."""
    if cos is None:
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


def quantized(x, scale, dtype):
    """x [..., D] over scale [...], rounded to the dtype: to 8 bits what is too large saturates."""
    most = MOST.get(dtype)
    if most is None:
        return x.to(dtype)
    x = x.float()
    if scale is not None:
        x = x * (1.0 / scale)[..., None]
    return x.clamp(-most, most).to(dtype)


def computed_scales(x, dtype, by_head):
    """The scale of each token, or of each of its heads: [tokens] or [tokens, Hkv]."""
    size = x.float().abs()
    size = torch.where(size.isfinite(), size, 0.0).amax(-1)
    size = size if by_head else size.amax(-1)
    # On a GPU torch divides by a Python number as it multiplies by its reciprocal.
    return (size / torch.full_like(size, MOST[dtype])).clamp(min=LEAST)


def empty_cache(pages, page, Hkv, dims, dtype, layout, device="cpu"):
    """(K, V) full of a byte that no test stores."""
    shape = [pages, page, Hkv] if layout == "NHD" else [pages, Hkv, page]
    return tuple(
        torch.full((*shape, dim * dtype.itemsize), 0x5B, dtype=torch.uint8, device=device).view(
            dtype
        )
        for dim in dims
    )


def empty_scales(scaled, pages, page, Hkv, layout, device="cpu"):
    """k_scale and v_scale for a plan to write, or random ones that it reads."""
    shape = {
        "tensor": [1], "head": [Hkv], "page": [pages], "page_head": [pages, Hkv],
        "token": [pages, page],
        "token_head": [pages, page, Hkv] if layout == "NHD" else [pages, Hkv, page],
    }[scaled]  # fmt: skip
    if "token" in scaled:
        made = [torch.full(shape, math.nan) for _ in "kv"]
    else:
        draw = torch.Generator().manual_seed(5)
        made = [0.01 + torch.rand(shape, generator=draw) for _ in "kv"]
    return [x.to(device) for x in made]


def expected(
    k, v, cache, scales, slots, *, page, layout, scaled, rope=None, positions=None, tables=()
):
    """Caches and scales as they are after the run, written token by token in plain torch."""
    found = [x.clone() for x in cache]
    steps = [None if x is None else x.clone() for x in scales]
    dtype = cache[0].dtype
    total = len(cache[0]) * page
    for x, out, step, turn in zip((k, v), found, steps, (rope, None), strict=True):
        x = x if turn is None else rotate(x, positions, turn, *tables)
        bytes_of = out.view(torch.uint8) if dtype in MOST else out
        for t, slot in enumerate(slots.tolist()):
            if not 0 <= slot < total:
                continue
            p, n = divmod(slot, page)
            scale = None
            if scaled in ("tensor", "head"):
                scale = step.expand(x.shape[1])
            elif scaled in ("page", "page_head"):
                scale = step[p].expand(x.shape[1])
            elif scaled:
                scale = computed_scales(x[t : t + 1], dtype, scaled == "token_head")[0]
                if scaled == "token" or layout == "NHD":
                    step[p, n] = scale
                else:
                    step[p, :, n] = scale
                scale = scale.expand(x.shape[1])
            row = quantized(x[t], scale, dtype)
            row = row.view(torch.uint8) if dtype in MOST else row
            if layout == "NHD":
                bytes_of[p, n] = row
            else:
                bytes_of[p, :, n] = row
    return found, steps


def new_tokens(tokens, Hkv, D, Dv, dtype, device="cpu", seed=0):
    """k and v with numbers from tiny to too large for eight bits."""
    draw = torch.Generator().manual_seed(seed + tokens)
    made = []
    for dim in (D, Dv):
        x = torch.randn(tokens, Hkv, dim, generator=draw)
        x *= 10.0 ** torch.randint(-5, 4, (tokens, Hkv, 1), generator=draw)
        made.append(x.to(device, dtype))
    return made
