"""Other libraries that `flexattn bench` times where they can be imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SDPA, FLASHINFER = "SDPA", "FlashInfer"
_FUNCTIONS = {
    "FlashAttention 2": ("flash_attn", "flash_attn_func"),
    "FlashAttention 3": ("flash_attn_interface", "flash_attn_func"),
    "FlashAttention 4": ("flash_attn.cute.interface", "flash_attn_func"),
    FLASHINFER: ("flashinfer", "single_prefill_with_kv_cache"),
}


def importable() -> dict[str, Callable[..., Any]]:
    """The function of each library that is installed, SDPA first."""
    found: dict[str, Callable[..., Any]] = {SDPA: scaled_dot_product_attention}
    for name, (module, function) in _FUNCTIONS.items():
        try:
            found[name] = getattr(import_module(module), function)
        except Exception:  # one that is broken raises anything
            continue
    return found


def rivals(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> dict[str, Callable[[], Any]]:
    """A call of each library for attention without mods; q, k and v as flex_attention's."""
    rows = [each.transpose(1, 2).contiguous() for each in (q, k, v)]
    calls: dict[str, Callable[[], Any]] = {}
    for name, attend in importable().items():
        if name == SDPA:
            calls[name] = partial(attend, q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        elif name != FLASHINFER:
            calls[name] = partial(attend, *rows, causal=causal, softmax_scale=scale)
        elif q.shape[0] == 1:
            one = (each[0] for each in rows)
            calls[name] = partial(attend, *one, causal=causal, sm_scale=scale)
    return calls
