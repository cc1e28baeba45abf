"""Checked mode (FLEXATTN_CHECK=1): what mods read of captured tensors, held to their sizes.

Kernels read 0 outside of a tensor, as if nothing were wrong. Here the indices themselves are
computed, by torch and for all positions, where their bounds do not prove them right. Indices that
follow from a score are not: plain torch, which computes calls on the CPU, finds those too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.errors import CaptureError
from flexattn.mods import Bound
from flexattn.mods.expr import Expr, reads
from flexattn.mods.outside import buffer_of, evaluated, unproven
from flexattn.mods.refusal import capture_name, named_mod
from flexattn.mods.simplify import plug
from flexattn.problem.mask_lists import block_maps, spread

_Mod = Callable[..., Any]
_Sizes = tuple[int, int, int, int]
Lanes = tuple[Tensor, Tensor, Tensor, Tensor]
_Kept = Callable[[Lanes], Tensor]

_NAMES = ("b", "h", "q_idx", "kv_idx")
# Positions that are looked at together.
_CHUNK = 2**22


def check_mask_reads(fn: _Mod, bound: Bound, sizes: _Sizes, device: torch.device) -> None:
    """Raises CaptureError if a mask_mod reads outside its tensors, in sizes B, H, q_len, kv_len.

    It may read outside if it is False for every value that it could read there.
    """
    _check(fn, bound, sizes, device)


def check_reads(
    sizes: _Sizes,
    device: torch.device,
    score_mod: _Mod | None,
    score: Bound | None,
    block_mask: BlockMask | None,
    mask: Bound | None,
) -> None:
    """Raises CaptureError if mods read outside their tensors where the mask keeps the score.

    sizes: B, Hq, L, S. score and mask: the mods with their captured tensors. A mask_mod is called
    in its partial blocks alone. The check waits for the device, so a stream that is being captured
    is not checked.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    kept = None
    if block_mask is not None and mask is not None:
        blocks = _Blocks(block_mask, mask, sizes[3])
        _check(block_mask.mask_mod, mask, sizes, device, blocks.asked)
        kept = blocks.kept
    if score_mod is not None and score is not None:
        _check(score_mod, score, sizes, device, kept)


@dataclass(frozen=True)
class _Blocks:
    """The positions that a BlockMask and its mask_mod keep; its lists are read when asked for."""

    blocks: BlockMask
    mask: Bound
    kv_len: int

    @cached_property
    def maps(self) -> list[Tensor]:
        """The partial blocks, in which mask_mod is called, and the full ones if there are any."""
        return block_maps(self.blocks, -(-self.kv_len // self.blocks.BLOCK_SIZE[1]))

    def asked(self, lanes: Lanes) -> Tensor:
        """True at each element on which mask_mod is called, [b, h, m, n]."""
        return spread(self.maps[0], self.blocks.BLOCK_SIZE, lanes)

    def kept(self, lanes: Lanes) -> Tensor:
        """True at each element where a score counts, [b, h, m, n]."""
        expr = _plain(self.mask)
        kept = self.asked(lanes) & evaluated((expr,), self.mask.tensors, _env(lanes))[expr].value
        for full in self.maps[1:]:
            kept = kept | spread(full, self.blocks.BLOCK_SIZE, lanes)
        return kept


def _plain(bound: Bound) -> Expr:
    """A mod's expression with its numbers as constants."""
    return plug(bound.mod.expr, dict(enumerate(bound.scalars)))


@torch.no_grad()
def _check(
    fn: _Mod, bound: Bound, sizes: _Sizes, device: torch.device, kept: _Kept | None = None
) -> None:
    """Raises CaptureError for the first read outside; kept: where reads count, None of all."""
    expr, tensors = _plain(bound), bound.tensors
    ranges = {name: (0, size - 1) for name, size in zip(_NAMES, sizes, strict=True)}
    loads = [x for x in unproven(expr, tensors, ranges) if not reads(x, "score")]
    if not loads or 0 in sizes:
        return
    mask = expr if bound.mod.kind == "mask" else None
    # An index that no position moves is looked at once; where it counts, only if it is wrong.
    b, h, m, n = (
        size if any(reads(root, name) for root in ([mask] if mask else loads)) else 1
        for name, size in zip(_NAMES, sizes, strict=True)
    )
    found = _first_outside(mask, loads, tensors, _chunks((b, h, m, n), device), None)
    if found is not None and kept is not None:
        found = _first_outside(mask, loads, tensors, _chunks(sizes, device), kept)
    if found is not None:
        raise _error(fn, bound, *found)


def _first_outside(
    mask: Expr | None,
    loads: Sequence[Expr],
    tensors: Sequence[Tensor],
    chunks: Iterator[Lanes],
    kept: _Kept | None,
) -> tuple[Expr, int, int, list[int]] | None:
    """The first read outside that counts: the load, its dimension, the index, and the position.

    mask: the expression of a mask_mod. Its False that is sure removes the position, whatever was
    read on the way.
    """
    for lanes in chunks:
        found = evaluated([mask] if mask else loads, tensors, _env(lanes))
        for load in loads:
            for dim, size in enumerate(buffer_of(load, tensors).shape):
                index = found[load.args[dim]].value
                outside = (index < -size) | (index >= size)
                if not outside.any():
                    continue
                if mask:
                    outside = outside & (found[mask].value | found[mask].unsure)
                if kept is not None:
                    outside = outside & kept(lanes)
                shape = [len(each) for each in lanes]
                places = outside.expand(shape).nonzero()
                if len(places):
                    at = places[0].tolist()
                    position = [int(x[i]) for x, i in zip(lanes, at, strict=True)]
                    return load, dim, int(index.expand(shape)[tuple(at)]), position
    return None


def _error(
    fn: _Mod, bound: Bound, load: Expr, dim: int, index: int, at: list[int]
) -> CaptureError:
    tensor = buffer_of(load, bound.tensors)
    size = tensor.shape[dim]
    about = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    place = ", ".join(f"{x}={i}" for x, i in zip(_NAMES, at, strict=True))
    return CaptureError(
        f"{named_mod(fn, bound.mod.kind)} reads "
        f"{capture_name(fn, tensor) or 'a captured tensor'}, {about}, at {index} in dimension "
        f"{dim}, which has {size} elements, at {place}",
        f"an index is from {-size} to {size - 1} wherever the mask keeps the score, or asks the "
        "tensor whether to",
        "make the tensor longer, clamp the index, or mask the position",
    )


def _env(lanes: Lanes) -> dict[str, Tensor]:
    """The mods' variables, which broadcast against one another."""
    return {
        name: each.reshape([-1 if axis == dim else 1 for axis in range(4)])
        for dim, (name, each) in enumerate(zip(_NAMES, lanes, strict=True))
    }


def _chunks(sizes: _Sizes, device: torch.device) -> Iterator[Lanes]:
    """All positions, some rows of one head at a time, each with all keys."""
    rows = max(1, _CHUNK // sizes[3])
    b, h, m, n = (torch.arange(size, device=device) for size in sizes)
    for batch in b.split(1):
        for head in h.split(1):
            for some in m.split(rows):
                yield batch, head, some, n
