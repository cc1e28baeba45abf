"""The key-value cache of a call: one tensor or two, contiguous or paged, and its scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flexattn.errors import InputError, InputTypeError
from flexattn.kernels.base.ragged import gathers
from flexattn.problem.serving import AXES, LAYOUTS, CacheScales, Scales, ServingProblem
from flexattn.runtime.launch import DescriptorBox, box_of

KVCache: TypeAlias = Tensor | tuple[Tensor, Tensor]


class Cache(NamedTuple):
    """K and V with their steps between pages (or requests), keys and heads, in elements."""

    k: Tensor
    v: Tensor
    steps_k: tuple[int, int, int]
    steps_v: tuple[int, int, int]
    pages: int
    keys: int


def split_cache(kv_cache: KVCache, m: ServingProblem) -> tuple[Tensor, Tensor]:
    """K and V of a cache: a pair, one tensor [pages, 2, ...], or MLA's one that is both."""
    if isinstance(kv_cache, tuple):
        return kv_cache
    if not m.structure.shared_kv:
        return halves(kv_cache)
    if kv_cache.dim() != 4:
        raise InputError(f"a cache {list(kv_cache.shape)}", "MLA's has 4 dimensions")
    return kv_cache, kv_cache[..., : m.head_dim_v]


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of one tensor [pages, 2, ...]; raises InputError for another, as [2, pages, ...]."""
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise InputError(
            f"a cache in one tensor {list(kv_cache.shape)}",
            "K and V are at [:, 0] and [:, 1] of its 5 dimensions",
            "pass (K, V) where they lie otherwise, as (cache[0], cache[1])",
        )
    return kv_cache.select(1, 0), kv_cache.select(1, 1)


def describe_cache(k: Tensor, v: Tensor, m: ServingProblem, tile: int) -> Cache:
    """The cache's steps; raises InputError for one that does not fit the plan.

    tile: keys of a tile of the plan's kernel.
    """
    keys_at, heads_at = LAYOUTS[m.cache_layout]
    sizes = [0, 0, 0, 0]
    sizes[heads_at] = m.Hkv
    for name, tensor, dim in (("K", k, m.head_dim_qk), ("V", v, m.head_dim_v)):
        fits = tensor.dim() == 4 and tensor.shape[3] == dim and tensor.shape[heads_at] == m.Hkv
        fits = fits and tensor.dtype == m.kv_dtype
        if not fits or (m.page and tensor.shape[keys_at] != m.page):
            where = "page" if m.page else "keys"
            order = f"{where}, Hkv={m.Hkv}" if keys_at == 1 else f"Hkv={m.Hkv}, {where}"
            pages = f" with pages of {m.page}" * bool(m.page)
            raise InputError(
                f"{name} of the cache {list(tensor.shape)} {tensor.dtype}",
                f"it is [{'pages' if m.page else 'batch'}, {order}, D={dim}] {m.kv_dtype}{pages}",
                "make a DecodePlan for this cache",
            )
        _check_steps(name, tensor, m.structure.aligned, heads_at, m.page or tile)
    empty = k.shape[0] == 0 or k.shape[keys_at] == 0
    if k.shape[:3] != v.shape[:3] or empty or k.device != v.device:
        raise InputError(
            f"K {list(k.shape)} on {k.device}, V {list(v.shape)} on {v.device}",
            "K and V have as many pages and keys, on one device, and at least one",
        )
    # Of one page, or one request, there is no next one: 1M keys of 16 heads may lie in a row.
    steps = [
        (each.stride(0) if each.shape[0] > 1 else 0, each.stride(keys_at), each.stride(heads_at))
        for each in (k, v)
    ]
    return Cache(k, v, steps[0], steps[1], k.shape[0], k.shape[keys_at])


def cache_shape(layout: str, pages: int, keys: int, heads: int) -> list[int]:
    """The shape of a cache without its head dimension."""
    return [pages, heads, keys] if layout == "HND" else [pages, keys, heads]


def cache_box(name: str, tensor: Tensor, m: ServingProblem) -> DescriptorBox:
    """The box of a tensor descriptor of K or V; raises InputError for strides of 0.

    Keys that all requests of a contiguous cache share are one request's, and kernels ask for that.
    """
    if not m.page and tensor.stride(0) == 0:
        tensor = tensor[:1]
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in pairs):
        raise InputError(
            f"{name} of shape {list(tensor.shape)} with strides {tensor.stride()}",
            "the kernel reads through a tensor descriptor, which knows no stride of 0",
            "keep each page, and each head's keys, in memory of its own",
        )
    return box_of(tensor if m.cache_layout == "HND" else tensor.transpose(1, 2))


def cache_boxes(k: Tensor, v: Tensor, m: ServingProblem) -> dict[str, DescriptorBox]:
    """Those of a plan's prefills; none of pages that are read by their address."""
    described = {} if gathers(m.structure) else {"K": k, "V": v}
    return {name: cache_box(name, x, m) for name, x in described.items()}


def _check_steps(name: str, tensor: Tensor, aligned: bool, heads_at: int, tile: int) -> None:
    step, sizes, strides = 16 // tensor.element_size(), tensor.shape, tensor.stride()
    # Kernels multiply by strides of pages in 64 bits, by those of heads and of keys in 32.
    heads, keys = sizes[heads_at], min(tile, sizes[3 - heads_at])
    steps = (heads - 1) * strides[heads_at], (keys - 1) * strides[3 - heads_at]
    rule, do = "", ""
    if strides[3] != 1 and sizes[3] > 1:
        rule = "the head dimension has stride 1"
    elif any(stride >= 2**31 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
        rule, do = "a stride is below 2**31 elements", "keep the cache in pages"
    elif max(steps) >= 2**32:
        rule = f"all {heads} heads of a key, and {keys} keys of a head, lie within 2**32 elements"
        do = "put pages, or requests, first in memory: [pages, ...].contiguous()"
    if rule:
        raise InputError(f"{name} of shape {list(sizes)} with strides {strides}", rule, do)
    if aligned and (tensor.data_ptr() % 16 or any(each % step for each in strides[:3])):
        raise InputError(
            f"{name} at {tensor.data_ptr():#x} with strides {tensor.stride()}",
            "its address and strides are multiples of 16 bytes",
            "allocate the cache as one tensor",
        )


# What a caller may say: whether, or for each of what, a cache has a scale.
Scaled: TypeAlias = bool | Literal["tensor", "head", "page", "page_head", "token", "token_head"]
_COARSE = ("tensor", "head")
_FINE: dict[str, Scales] = {
    "page": "page",
    "page_head": "page_head",
    "token": "token",
    "token_head": "token_head",
}


class AskedScales(NamedTuple):
    """scaled: one scale of the cache or one for each head; scales: what else has its own."""

    scaled: bool
    scales: Scales


def asked_scales(scaled: object, page: int) -> AskedScales:
    """The scales that a plan was asked for; raises InputError for what is none of the choices."""
    if isinstance(scaled, str):
        if scaled not in _COARSE and scaled not in _FINE:
            raise InputError(
                f"scaled={scaled!r}",
                f"it is True, False or one of {', '.join((*_COARSE, *_FINE))}",
            )
        if scaled in ("page", "page_head") and not page:
            raise InputError(
                f"scaled={scaled!r} of a contiguous cache",
                "a cache without pages has no scale for each",
                'pass scaled="token" or "token_head", or a page_size',
            )
        return AskedScales(scaled in _COARSE, _FINE.get(scaled, ""))
    if not isinstance(scaled, (bool, int)):
        raise InputTypeError(
            f"scaled is a {type(scaled).__name__}",
            f"it says of what the cache has a scale: True, or one of {', '.join(_FINE)}",
            "give the tensors to run()" if isinstance(scaled, Tensor) else "",
        )
    return AskedScales(bool(scaled), "")


def steps(
    m: ServingProblem, pages: int, keys: int, given: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """The steps between a run's scales, by the names that kernels have for them.

    pages, keys: of the cache, requests and keys of one where it is contiguous. given: k_scale and
    v_scale among others. Raises InputError for scales that are not as the plan takes them.
    """
    named = {name: each for name in ("k_scale", "v_scale") if (each := given[name]) is not None}
    form = m.structure
    if form.scales:
        found = steps_by_axis(named, form.scales, m.cache_layout, (pages, keys, m.Hkv))
        return {f"stride_s{axis}": step for axis, step in found.items()}
    if not form.scaled:
        return {}
    step = steps_by_axis(named, "tensor", m.cache_layout, (pages, keys, m.Hkv))["h"]
    return {"stride_scale": step}


def axes_of(scales: CacheScales, layout: str) -> str:
    """The dimensions of scales in a layout: p(ages), n (keys of one), h(eads)."""
    return AXES[scales] if layout == "NHD" else AXES[scales].replace("nh", "hn")


def scales_shape(scales: CacheScales, layout: str, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """The shape of scales. sizes: pages, keys of one, heads."""
    return tuple(dict(zip("pnh", sizes, strict=True))[axis] for axis in axes_of(scales, layout))


def spread_scale(scale: Tensor, scales: CacheScales, layout: str) -> Tensor:
    """Scales of pages, tokens and heads as they multiply a cache of four dimensions."""
    for at, axis in enumerate("pnh" if layout == "NHD" else "phn"):
        if axis not in AXES[scales]:
            scale = scale.unsqueeze(at)
    return scale[..., None]


def steps_by_axis(
    named: Mapping[str, Tensor], scales: CacheScales, layout: str, sizes: tuple[int, int, int]
) -> dict[str, int]:
    """Steps from one page, token and head ("p", "n", "h") to the next, where these have scales.

    named: k_scale and, if there are values, v_scale. sizes: pages, keys of one, heads. Raises
    InputError for scales of another shape or dtype, and where the two lie in memory differently.
    """
    heads = sizes[2]
    axes = axes_of(scales, layout)
    shape = scales_shape(scales, layout, sizes)
    for name, each in named.items():
        right = tuple(each.shape) == shape
        if scales == "tensor":
            right = each.is_contiguous() and each.numel() in (1, heads)
        if each.dtype != torch.float32 or not right:
            rule = f'float32 {list(shape)}, where scaled="{scales}"'
            if scales == "tensor":
                rule = f"contiguous float32 of 1 or {heads} elements"
            raise InputError(f"{name} is {each.dtype} {list(each.shape)}", f"it is {rule}")
        if any(not 0 <= step < 2**31 for step in each.stride()):
            raise InputError(
                f"{name} with strides {each.stride()}", "a stride is below 2**31 elements"
            )
    first, *others = named.values()
    last = others[-1] if others else first
    if scales == "tensor":
        if first.numel() != last.numel():
            raise InputError("k_scale and v_scale differ in shape", "both are [1], or both [Hkv]")
        return {"h": min(1, first.numel() - 1)}
    pairs = zip(shape, first.stride(), last.stride(), strict=True)
    if any(size > 1 and a != b for size, a, b in pairs):
        raise InputError(
            f"k_scale has strides {first.stride()}, v_scale {last.stride()}",
            "both lie in memory in the same way",
            "allocate them as one tensor",
        )
    return dict(zip(axes, first.stride(), strict=True))
