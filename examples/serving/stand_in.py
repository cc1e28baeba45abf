"""Attention in plain torch over the same pages, for a machine without a GPU.

It stands in for the plans, so that all else of the server runs at full load on a CPU: scheduler,
pages, prefixes, HTTP. It is no way to serve: it copies every key that it reads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.serving.attention import new_cache
from examples.serving.inputs import Inputs
from examples.serving.model import Shape
from examples.serving.request import Limits


class TorchAttention:
    """As PlanAttention; members of a cascade are not expected."""

    def __init__(
        self, shape: Shape, limits: Limits, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._cache = new_cache(shape, limits, device, dtype)
        self._page = limits.page

    def attend(
        self, inputs: Inputs, layer: int, q: Tensor, k: Tensor, v: Tensor, shared: bool
    ) -> Tensor:
        """[R, Hq, D] of the step's rows."""
        assert not shared
        slots = inputs.on["slots"][: len(k)].long()
        for pages, new in zip(self._cache[layer], (k, v), strict=True):
            pages.flatten(0, 1)[slots[slots >= 0]] = new[slots >= 0]
        out = torch.zeros_like(q)
        ends, lens = inputs.on["ends"], inputs.on["lens"]
        counts = ends.diff()
        for slot in (counts > 1).nonzero()[:, 0].tolist():
            rows = slice(int(ends[slot]), int(ends[slot + 1]))
            out[rows] = self._read(inputs, layer, q[rows], [slot], int(lens[slot]))
        if slots := (counts == 1).nonzero()[:, 0].tolist():
            rows = ends[slots].long()
            each = self._read(inputs, layer, q[rows], slots, int(lens[slots].max()))
            out[rows] = each
        return out

    def _read(
        self, inputs: Inputs, layer: int, q: Tensor, slots: list[int], longest: int
    ) -> Tensor:
        """Rows of one slot, or one row of each: the last ones of each slot's keys."""
        table = inputs.on["table"][slots, : -(-longest // self._page)].long()
        k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in self._cache[layer])
        q = q.unflatten(0, (len(slots), -1)).transpose(1, 2)
        lens = inputs.on["lens"][slots]
        places = lens[:, None] - torch.arange(q.shape[2], 0, -1)
        seen = torch.arange(k.shape[2]) <= places[:, None, :, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)
