"""New keys and values for a cache, and caches to store them in."""

import math

import torch

from flexattn.reference.cache_append import appended


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


def expected(k, v, cache, scales, slots, **about):
    """Caches and scales as they are after the run, written token by token in plain torch."""
    return appended(k, v, cache, scales, slots.tolist(), **about)


def new_tokens(tokens, Hkv, D, Dv, dtype, device="cpu", seed=0):
    """k and v with numbers from tiny to too large for eight bits."""
    draw = torch.Generator().manual_seed(seed + tokens)
    made = []
    for dim in (D, Dv):
        x = torch.randn(tokens, Hkv, dim, generator=draw)
        x *= 10.0 ** torch.randint(-5, 4, (tokens, Hkv, 1), generator=draw)
        made.append(x.to(device, dtype))
    return made
