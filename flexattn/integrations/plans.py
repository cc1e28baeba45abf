"""Shared parts of the adaptors: a model's layer, its plans, its mods, writes to its cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from flexattn import catalogue
from flexattn.errors import InputError, SettingsError
from flexattn.mods import bind
from flexattn.serving import DecodePlan
from flexattn.serving.decode import live_identity
from flexattn.settings import current

_Mod = Callable[..., Tensor]
_KINDS = ("score_mod", "mask_mod")


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer of causal self-attention: equal ones share their plans.

    name: the model's for it. heads (Hq, Hkv) and head_dim (D, Dv): of this process. page_size:
    tokens of a page. softcap: scores stay within it. window: keys that a row sees, its own
    included. slopes [Hq]: of ALiBi. sinks, scaled: its runs are given sinks, and the scales of
    an 8-bit cache.
    """

    heads: tuple[int, int]
    head_dim: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    page_size: int
    kv_dtype: torch.dtype | None = None
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    slopes: tuple[float, ...] | None = None
    sinks: bool = False
    scaled: bool = False
    name: str = field(default="", compare=False)

    @property
    def index(self) -> int:
        """The first number in its name, its place in the model; -1 where there is none."""
        found = re.search(r"\d+", self.name)
        return int(found[0]) if found else -1

    def score_mod(self, own: _Mod | None) -> _Mod | None:
        """Soft-capping, then ALiBi, then the user's; None where there is none."""
        chain = [] if not self.softcap else [catalogue.softcap(self.softcap)]
        if self.slopes is not None:
            chain.append(_alibi(torch.tensor(self.slopes, device=self.device)))
        chain += [] if own is None else [own]

        def score_mod(score: Tensor, *place: Tensor) -> Tensor:
            for mod in chain:
                score = mod(score, *place)
            return score

        return chain[0] if len(chain) == 1 else score_mod if chain else None

    def mask_mod(self, own: _Mod | None) -> _Mod:
        """The layer's mask, and with the user's mask both of them."""
        window = self.window
        seen = catalogue.causal if window is None else catalogue.sliding_window(window - 1)
        return seen if own is None else and_masks(seen, own)


def _alibi(slopes: Tensor) -> _Mod:
    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


class Plans:
    """Plans that the layers of one model share, each made at its first use, run by one stream."""

    def __init__(self) -> None:
        self._plans: dict[Any, DecodePlan] = {}

    def plan(
        self, layer: Layer, *, mods: Mapping[str, _Mod] | None = None, **maxima: Any
    ) -> DecodePlan:
        """The plan of layers like this one. maxima: batch, kv_len and total_q of DecodePlan, 0 for
        single tokens, and batch_invariant."""
        own = [(mods or {}).get(kind) for kind in _KINDS]
        bound = [bind(mod, kind[:-4]) for mod, kind in zip(own, _KINDS, strict=True)]
        key = (layer, *map(live_identity, bound), *maxima.values())
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = DecodePlan(
                heads=layer.heads, head_dim=layer.head_dim, dtype=layer.dtype,
                kv_dtype=layer.kv_dtype, device=layer.device, page_size=layer.page_size,
                scale=layer.scale, sinks=layer.sinks, scaled=layer.scaled,
                score_mod=layer.score_mod(own[0]), mask_mod=layer.mask_mod(own[1]), **maxima,
            )  # fmt: skip
        return found

    def pair(self, layer: Layer, rows: int, **maxima: Any) -> tuple[DecodePlan, DecodePlan]:
        """A layer's plans with the user's mods: of single tokens, and of chunks of these rows."""
        mods = user_mods(layer)
        single, chunks = (
            self.plan(layer, mods=mods, total_q=total, **maxima) for total in (0, rows)
        )
        return single, chunks


def user_mods(layer: Layer) -> Mapping[str, _Mod]:
    """The mods of a layer by the function that FLEXATTN_MODS names: score_mod, mask_mod, neither.

    Raises SettingsError where it cannot be imported, and InputError for another answer.
    """
    named = current().mods
    if not named:
        return {}
    module, _, function = named.partition(":")
    try:
        mods = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"FLEXATTN_MODS={named!r}: {error}",
            "it names a function as module:function, in a module that can be imported",
            "add the module's folder to PYTHONPATH",
        ) from error
    found = mods(layer)
    if found is not None and not (isinstance(found, Mapping) and found.keys() <= set(_KINDS)):
        raise InputError(
            f"{named} gives {found!r:.80} for layer {layer.name}",
            "it gives a dict with score_mod, mask_mod or both, or None",
        )
    return found or {}


def write_pages(
    pages: tuple[Tensor, Tensor],
    slots: Tensor,
    new: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Put new keys and values where they belong in a paged cache; a CUDA graph can hold it.

    pages: K [pages, page, Hkv, D] and V, with any strides. slots int64 [rows]: page times its size
    plus place. A slot below 0 has no token: a zero goes to slot 0, which is to be nobody's. new:
    K [rows, Hkv, D] and V. scales fp32 [1] or [Hkv]: what each is divided by in a cache of 8 bits,
    whose largest value is kept.
    """
    page, slots = pages[0].shape[1], slots[: len(new[0])]
    used, at = (slots >= 0)[:, None, None], slots.clamp(min=0)
    where = at // page, at % page
    for pool, rows, scale in zip(pages, new, scales, strict=True):
        rows = torch.where(used, rows[: len(slots)], 0)
        if pool.dtype.itemsize == 1:
            most = torch.finfo(pool.dtype).max
            rows = rows if scale is None else rows / scale.view(-1, 1)
            rows = rows.clamp(-most, most).to(pool.dtype).view(torch.uint8)
            pool = pool.view(torch.uint8)
        pool.index_put_(where, rows.to(pool.dtype))
