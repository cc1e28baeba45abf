"""Mods mapped over batches, heads, rows and keys, as torch's eager flex_attention maps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexattn.errors import CaptureError
from flexattn.mods.expr import ScoreMod
from flexattn.mods.operators import meaning_of

_HALVES = (torch.float16, torch.bfloat16)


def modded(
    score_mod: ScoreMod, scores: Tensor, kept: Tensor | None, lanes: tuple[Tensor, ...]
) -> Tensor:
    """Scores [b, h, m, n] as a score_mod leaves them; kept: the lanes that are attended."""

    def mod(score: Tensor, lane_kept: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
        return watched(score_mod, lane_kept if shield else None)(score, *index)

    shield = kept is not None and torch.is_grad_enabled()
    everywhere = torch.ones((), dtype=torch.bool, device=scores.device).expand(scores.shape)
    mask = everywhere if kept is None else kept
    # A derivative that is infinite in a removed lane would turn its zero gradient into NaN.
    safe = torch.where(mask, scores, 1.0) if shield and scores.requires_grad else scores
    value, outside = over_lanes(mod, (safe, mask), lanes)
    refuse(outside & mask, "score_mod", lanes)
    return value.to(scores.dtype)


def at_points(score_mod: ScoreMod, score: Tensor, *index: Tensor) -> Tensor:
    """A score_mod at points, all of one dimension, as `attention` maps it; differentiable.

    index: b, h, q_idx, kv_idx. What it reads outside of a tensor is the nearest element.
    """
    value, _ = torch.vmap(watched(score_mod))(score, *index)
    return value


def over_lanes(
    mod: Callable[..., tuple[Tensor, Tensor]], dense: tuple[Tensor, ...], lanes: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """`mod` at every (b, h, q_idx, kv_idx), as torch's eager flex_attention maps it."""
    for axis in (3, 2, 1, 0):
        in_dims = (0,) * len(dense) + tuple(0 if axis == i else None for i in range(4))
        mod = torch.vmap(mod, in_dims=in_dims)
    return mod(*dense, *lanes)


def watched(
    mod: Callable[..., Tensor], kept: Tensor | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`mod` that also returns whether it read a captured tensor out of range."""

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        with _Gather(kept) as mode:
            value = torch.as_tensor(mod(*args), device=args[-1].device)
        return value, args[-1].new_zeros((), dtype=torch.bool) | mode.outside

    return call


def refuse(outside: Tensor, name: str, lanes: tuple[Tensor, ...]) -> None:
    """Raise CaptureError for the first lane that reads outside of a captured tensor."""
    if not bool(outside.any()):
        return
    b, h, m, n = (int(lane[i]) for lane, i in zip(lanes, outside.nonzero()[0], strict=True))
    raise CaptureError(
        f"{name} reads a captured tensor out of range at b={b}, h={h}, q_idx={m}, kv_idx={n}",
        "only lanes that the mask removes may read out of range",
        "clamp the index, make the tensor larger, or mask the lane; FLEXATTN_CHECK=1 names it",
    )


class _Gather(TorchFunctionMode):
    """Inside a mod, `x[i, j]` with tensors or ints is a gather, even for 0-d indices.

    The rule of torch's TransformGetItemToIndex, but `x[b][h]` has a gradient, an index out of
    range is clamped and reported, and removed lanes pass no gradient to the tensor. An operator
    of torch.library is what it is known to compute.
    """

    def __init__(self, kept: Tensor | None) -> None:
        super().__init__()
        self.kept = kept
        self.outside: Tensor | bool = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if len(index) <= args[0].dim() and all(map(_is_position, index)):
                return self._gather(args[0], index)
        meaning = meaning_of(func)
        if meaning is not None:  # vmap would call the operator itself once for each element
            with self:
                return meaning(*args, **(kwargs or {}))
        value = func(*args, **(kwargs or {}))
        # The form in which mods that were printed for torch read a tensor.
        return self._shielded(value) if func is torch.ops.aten.index.Tensor else value

    def _gather(self, x: Tensor, index: tuple[Tensor | int, ...]) -> Tensor:
        if 0 in x.shape[: len(index)]:
            x = x.new_zeros([max(n, 1) for n in x.shape])
            self.outside = True
        places = []
        for i, n in zip(index, x.shape, strict=False):
            i = torch.as_tensor(i, device=x.device).long()
            self.outside = self.outside | ((i < -n) | (i >= n)).any()
            places.append(i.clamp(-n, n - 1))
        # A gradient that is added up in 16 bits stops growing long before the last score.
        wide = x.float() if x.requires_grad and x.dtype in _HALVES else x
        return self._shielded(torch.ops.aten.index.Tensor(wide, places).to(x.dtype))

    def _shielded(self, value: Tensor) -> Tensor:
        """An element that a removed lane passes no gradient to."""
        if self.kept is not None and value.dim() == 0 and value.is_floating_point():
            value = torch.where(self.kept, value, value.detach())
        return value


def _is_position(index: object) -> bool:
    if isinstance(index, Tensor):
        return index.dtype != torch.bool
    return isinstance(index, int) and not isinstance(index, bool)
