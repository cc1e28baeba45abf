"""Scales of a cache: of what there is one, and that a run's tensors are so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flexattn.errors import InputError, InputTypeError
from flexattn.kernels.paged_decode.config import Scales, ServingForm
from flexattn.kernels.paged_decode.scales import by_head, by_token
from flexattn.serving.request import LAYOUTS, Maxima

# What a caller may say: whether, or for each of what, a cache has a scale.
Scaled: TypeAlias = bool | Literal["tensor", "head", "page", "page_head", "token", "token_head"]
_COARSE = ("tensor", "head")
_FINE: dict[str, Scales] = {
    "page": "page",
    "page_head": "page_head",
    "token": "token",
    "token_head": "token_head",
}


class Asked(NamedTuple):
    """scaled: one scale of the cache or one for each head; scales: what else has its own."""

    scaled: bool
    scales: Scales


def asked(scaled: object, page: int) -> Asked:
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
        return Asked(scaled in _COARSE, _FINE.get(scaled, ""))
    if not isinstance(scaled, (bool, int)):
        raise InputTypeError(
            f"scaled is a {type(scaled).__name__}",
            f"it says of what the cache has a scale: True, or one of {', '.join(_FINE)}",
            "give the tensors to run()" if isinstance(scaled, Tensor) else "",
        )
    return Asked(bool(scaled), "")


def steps(
    m: Maxima, form: ServingForm, pages: int, keys: int, given: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """The steps between scales, by the names that kernels have for them.

    pages, keys: of the cache, requests and keys of one where it is contiguous. given: k_scale and
    v_scale among others. Raises InputError for scales that are not as the plan takes them.
    """
    scales = {name: each for name in ("k_scale", "v_scale") if (each := given[name]) is not None}
    if form.scales:
        shape = shape_of(form.scales, m.layout, pages, keys, m.Hkv)
        for name, each in scales.items():
            _check_fine(name, each, shape, form.scales)
        k_steps, v_steps = (each.stride() for each in scales.values())
        if any(size > 1 and a != b for size, a, b in zip(shape, k_steps, v_steps, strict=True)):
            raise InputError(
                f"k_scale has strides {k_steps}, v_scale {v_steps}",
                "both lie in memory in the same way",
                "allocate them as one tensor",
            )
        names = ["stride_sp"]
        inner = ["stride_sn"] * by_token(form) + ["stride_sh"] * by_head(form)
        names += inner if m.layout == "NHD" else inner[::-1]
        return dict(zip(names, k_steps, strict=True))
    if not form.scaled:
        return {}
    for name, each in scales.items():
        check_coarse(name, each, m.Hkv)
    counts = {each.numel() for each in scales.values()}
    if len(counts) > 1:
        raise InputError("k_scale and v_scale differ in shape", "both are [1], or both [Hkv]")
    return {"stride_scale": 0 if counts == {1} else 1}


def shape_of(scales: Scales, layout: str, pages: int, keys: int, heads: int) -> tuple[int, ...]:
    """The shape of finer scales: the cache's own without its last dimension, or a part of it."""
    sizes = [pages, 0, 0]
    keys_at, heads_at = LAYOUTS[layout]
    sizes[keys_at] = keys if scales in ("token", "token_head") else 0
    sizes[heads_at] = heads if scales in ("page_head", "token_head") else 0
    return tuple(size for size in sizes if size)


def check_coarse(name: str, scale: Tensor, heads: int) -> None:
    """That a scale is one of a tensor, or one for each head; raises InputError."""
    if scale.dtype != torch.float32 or not scale.is_contiguous() or scale.numel() not in (1, heads):
        raise InputError(
            f"{name} is {scale.dtype} {list(scale.shape)}",
            f"it is contiguous float32 of 1 or {heads} elements",
        )


def _check_fine(name: str, scale: Tensor, shape: tuple[int, ...], scales: Scales) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        raise InputError(
            f"{name} is {scale.dtype} {list(scale.shape)}",
            f'it is float32 {list(shape)}, where scaled="{scales}"',
        )
    if any(not 0 <= each < 2**31 for each in scale.stride()):
        raise InputError(
            f"{name} with strides {scale.stride()}", "a stride is below 2**31 elements"
        )
