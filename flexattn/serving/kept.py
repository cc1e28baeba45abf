"""KeptKeys: a cache that some keys were evicted from, whose mods see positions all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.device import usable
from flexattn.errors import InputError
from flexattn.serving.checks import pair, whole


class KeptKeys:
    """The places of the keys that a request's cache still holds, for the mods of a DecodePlan.

    batch: the most requests. keys: the most kept keys of one, a plan's kv_len. page: of how many
    neighbouring keys one position is known: the cache's page size where whole pages are evicted
    (StreamingLLM), 1 where single keys are, and the rest moved together (H2O, SnapKV). heads:
    (Hq, Hkv) where each KV head keeps other keys, None where all keep the same.

    positions int32 [batch, keys / page], or [batch, Hkv, keys / page]: the position of the first
    key of each page, below 0 where a page counts as empty. evicted int32 [batch]: how many keys
    fewer the cache holds than the request has. Both are on the device and start as a cache that
    nothing was evicted from; kernels read them in each run, so change them in place. seq_lens and
    block_table of a run list what is kept, in any order but that the keys of this call's queries
    come last.

    `score(mod)` and `mask(mod)` are what the plan is given. Masks compare positions that are
    loaded, so all kept keys are read: no bound of a window skips any. Rotations that keys have by
    their positions are the caller's.

    Source: Xiao et al., Attention Sinks (StreamingLLM), arXiv 2309.17453; Zhang et al., H2O, arXiv
    2306.14048; Li et al., SnapKV, arXiv 2404.14469.
    """

    def __init__(
        self,
        *,
        batch: int,
        keys: int,
        page: int = 1,
        heads: tuple[int, int] | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        for name, value in (("batch", batch), ("keys", keys), ("page", page)):
            if whole(name, value) < 1:
                raise InputError(f"KeptKeys({name}={value})", f"{name} is at least 1")
        where, shape = usable(device), [batch, -(-keys // page)]
        self._group = 0
        if heads is not None:
            Hq, Hkv = pair("heads", heads, "(query heads, KV heads)")
            if Hkv < 1 or Hq < 1 or Hq % Hkv:
                raise InputError(
                    f"KeptKeys(heads={heads})", "Hq is a multiple of Hkv, both above 0"
                )
            self._group = Hq // Hkv
            shape.insert(1, Hkv)
        self._page = page
        # Who writes them need not be in the inference mode that this may be made in.
        with torch.inference_mode(False):
            first = torch.arange(shape[-1], dtype=torch.int32, device=where) * page
            self.positions = first.expand(shape).contiguous()
            self.evicted = torch.zeros(batch, dtype=torch.int32, device=where)

    def score(self, score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A score_mod of positions as one of the cache's places."""
        place, evicted = self._place(), self.evicted
        return lambda score, b, h, q_idx, kv_idx: score_mod(
            score, b, h, q_idx + evicted[b], place(b, h, kv_idx)[0]
        )

    def mask(self, mask_mod: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
        """A mask_mod of positions as one of places; of None, what hides empty pages."""
        place, evicted = self._place(), self.evicted
        if mask_mod is None:
            return lambda b, h, q_idx, kv_idx: place(b, h, kv_idx)[1]

        def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
            position, held = place(b, h, kv_idx)
            return held & mask_mod(b, h, q_idx + evicted[b], position)

        return mask

    def _place(self) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        """The position of the key at a place, and whether there is one."""
        positions, page, group = self.positions, self._page, self._group

        def place(b: Any, h: Any, kv_idx: Any) -> tuple[Any, Any]:
            of = (b, h // group, kv_idx // page) if group else (b, kv_idx // page)
            first = positions[of]
            return first + kv_idx % page, first >= 0

        return place
