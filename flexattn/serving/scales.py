"""Scales of a cache: of what there is one, and that a run's tensors are so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flexattn.errors import InputError, InputTypeError
from flexattn.kernels.cache_append.form import AXES, CacheScales
from flexattn.kernels.paged_decode.config import Scales, ServingForm
from flexattn.serving.request import Maxima

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
    """What a plan was told of scales; raises InputError for what is none of the choices."""
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
    m: Maxima, form: ServingForm, pages: int, keys: int, given: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """The steps between a run's scales, by the names that kernels have for them.

    pages, keys: of the cache, requests and keys of one where it is contiguous. given: k_scale and
    v_scale among others. Raises InputError for scales that are not as the plan takes them.
    """
    named = {name: each for name in ("k_scale", "v_scale") if (each := given[name]) is not None}
    if form.scales:
        found = steps_by_axis(named, form.scales, m.layout, (pages, keys, m.Hkv))
        return {f"stride_s{axis}": step for axis, step in found.items()}
    if not form.scaled:
        return {}
    return {"stride_scale": steps_by_axis(named, "tensor", m.layout, (pages, keys, m.Hkv))["h"]}


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
