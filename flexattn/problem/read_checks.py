"""Checked mode (FLEXATTN_CHECK=1): what mods read of captured tensors, held to their sizes.

Kernels read 0 outside of a tensor, as if nothing were wrong. Here the indices themselves are
computed, by torch and for all positions, where their bounds do not prove them right.
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
from flexattn.mods.expr import Expr
from flexattn.mods.outside import Evaluated, buffer_of, evaluated, unproven
from flexattn.mods.refusal import capture_name, named_mod
from flexattn.mods.simplify import plug
from flexattn.problem.inputs import Descales, descaled
from flexattn.problem.mask_lists import dense_blocks, spread

_Mod = Callable[..., Any]
_Sizes = tuple[int, int, int, int]
Lanes = tuple[Tensor, Tensor, Tensor, Tensor]
_Kept = Callable[[Lanes], Tensor]

_NAMES = ("b", "h", "q_idx", "kv_idx")
# Positions that are looked at together.
_CHUNK = 2**22


def check_mask_reads(fn: _Mod, bound: Bound, sizes: _Sizes, device: torch.device) -> None:
    """Raises CaptureError if a mask_mod reads outside its tensors, in sizes B, H, q_len, kv_len.

    It may read outside where it is False whatever stands there. Raises CaptureError.
    """
    _Check(_Reader.of(fn, bound), sizes, device).run()


def check_reads(
    q: Tensor,
    k: Tensor,
    scale: float,
    descales: Descales,
    score_mod: _Mod | None,
    score: Bound | None,
    block_mask: BlockMask | None,
    mask: Bound | None,
) -> None:
    """Raises CaptureError if mods read outside their tensors where the mask keeps the score.

    q [B, Hq, L, E], k [Bkv, Hkv, S, E]; score and mask: what the mods are bound to. A mask_mod is
    asked in its listed blocks but the full ones. Raises CaptureError. It waits for the device, so
    a stream that is being captured is not checked.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    B, H, L, _ = q.shape
    sizes, kept = (B, H, L, k.shape[2]), None
    if block_mask is not None and mask is not None:
        reader = _Reader.of(block_mask.mask_mod, mask)
        kept = _KeptLanes(block_mask, reader, k.shape[2])
        _Check(reader, sizes, q.device, kept.partial_lanes).run()
    if score_mod is not None and score is not None:
        lanes = None if kept is None else kept.lanes
        scores = _Scores(q, k, scale, descales)
        _Check(_Reader.of(score_mod, score), sizes, q.device, lanes, scores).run()


@dataclass(frozen=True, slots=True)
class _Reader:
    """A mod with what it captures, its numbers being constants of the expression."""

    fn: _Mod
    kind: str
    expr: Expr
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, fn: _Mod, bound: Bound) -> _Reader:
        expr = plug(bound.mod.expr, dict(enumerate(bound.scalars)))
        return cls(fn, bound.mod.kind, expr, bound.tensors)


@dataclass(frozen=True)
class _KeptLanes:
    """The positions that a BlockMask and its mask_mod keep; its lists are read when asked for."""

    blocks: BlockMask
    mask: _Reader
    kv_len: int

    @cached_property
    def partial(self) -> Tensor:
        """The map of blocks in which mask_mod is asked."""
        return self._map(self.blocks.kv_num_blocks, self.blocks.kv_indices)

    @cached_property
    def full(self) -> Tensor | None:
        """The map of those in which it is not."""
        counts, indices = self.blocks.full_kv_num_blocks, self.blocks.full_kv_indices
        return None if counts is None or indices is None else self._map(counts, indices)

    def _map(self, counts: Tensor, indices: Tensor) -> Tensor:
        return dense_blocks(counts, indices, -(-self.kv_len // self.blocks.BLOCK_SIZE[1]))

    def partial_lanes(self, lanes: Lanes) -> Tensor:
        """True at each element on which mask_mod is called, [b, h, m, n]."""
        return spread(self.partial, self.blocks.BLOCK_SIZE, lanes)

    def lanes(self, lanes: Lanes) -> Tensor:
        """True at each element where a score counts, [b, h, m, n]."""
        expr = self.mask.expr
        inside = evaluated((expr,), self.mask.tensors, _env(lanes))[expr].value
        kept = self.partial_lanes(lanes) & inside
        if self.full is None:
            return kept
        return kept | spread(self.full, self.blocks.BLOCK_SIZE, lanes)


@dataclass(frozen=True, slots=True)
class _Scores:
    """The scores before a score_mod, for one that reads a table by them."""

    q: Tensor
    k: Tensor
    scale: float
    descales: Descales

    def at(self, lanes: Lanes) -> Tensor:
        """fp32 [b, h, m, n]."""
        b, h, m, _ = lanes
        group = self.q.shape[1] // self.k.shape[1]
        q = descaled(self.q.float(), self.descales.q)[b][:, h][:, :, m]
        k = descaled(self.k.float(), self.descales.k)[b % self.k.shape[0]][:, h // group]
        return torch.matmul(q, k.mT) * self.scale


@dataclass(slots=True)
class _Seen:
    """The least and largest index of one dimension of one load, and where it is first outside."""

    low: int = 0
    high: int = 0
    first: tuple[int, ...] = ()
    index: int = 0
    any: bool = False

    def add(self, index: Tensor, lanes: Tensor, size: int, corner: Sequence[int]) -> None:
        """Adds the indices that positions of a chunk read; corner: of its first one."""
        read = index.expand(lanes.shape)[lanes]
        if not read.numel():
            return
        low, high = int(read.min()), int(read.max())
        self.low = min(self.low, low) if self.any else low
        self.high = max(self.high, high) if self.any else high
        self.any = True
        if not self.first and (low < -size or high >= size):
            place = (lanes & ((index < -size) | (index >= size))).nonzero()[0]
            self.index = int(index.expand(lanes.shape)[tuple(place)])
            self.first = tuple(int(at) + start for at, start in zip(place, corner, strict=True))


@dataclass(frozen=True, slots=True)
class _Check:
    """One mod at all positions; kept: those where it counts, None for all."""

    reader: _Reader
    sizes: _Sizes
    device: torch.device
    kept: _Kept | None = None
    scores: _Scores | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Raise CaptureError for the first dimension of a tensor that is read outside."""
        ranges = {name: (0, size - 1) for name, size in zip(_NAMES, self.sizes, strict=True)}
        expr, tensors = self.reader.expr, self.reader.tensors
        loads = unproven(expr, tensors, ranges)
        if not loads or 0 in self.sizes:
            return
        roots = (expr,) if self.reader.kind == "mask" else loads
        asked = {name for root in roots for name in root.variables}
        # An index that no position moves is looked at once; where it counts, only if it is wrong.
        scores = self.scores if "score" in asked else None
        few = _only(self.sizes, asked) if scores is None else self.sizes
        seen = self._seen(few, None, scores, roots, loads)
        if self.kept is not None and any(each.first for each in seen.values()):
            seen = self._seen(self.sizes, self.kept, scores, roots, loads)
        for (load, dim), each in seen.items():
            if each.first:
                raise self._error(load, dim, each)

    def _seen(
        self,
        sizes: _Sizes,
        kept: _Kept | None,
        scores: _Scores | None,
        roots: Sequence[Expr],
        loads: Sequence[Expr],
    ) -> dict[tuple[Expr, int], _Seen]:
        """The indices that each dimension of each load reads, where the mod counts."""
        seen = {(load, dim): _Seen() for load in loads for dim in range(len(load.args))}
        for lanes in _chunks(sizes, self.device):
            env = _env(lanes)
            if scores is not None:
                env["score"] = scores.at(lanes)
            found = evaluated(roots, self.reader.tensors, env)
            counts = self._counts(found, lanes, kept)
            for (load, dim), each in seen.items():
                size = buffer_of(load, self.reader.tensors).shape[dim]
                each.add(found[load.args[dim]].value, counts, size, [int(x[0]) for x in lanes])
        return seen

    def _counts(self, found: dict[Expr, Evaluated], lanes: Lanes, kept: _Kept | None) -> Tensor:
        """The positions, bool [b, h, m, n], at which a read outside would be seen."""
        counts = torch.ones((), dtype=torch.bool, device=self.device)
        if kept is not None:
            counts = kept(lanes)
        if self.reader.kind == "mask":
            # A False that is sure removes the position, whatever was read on the way.
            result = found[self.reader.expr]
            counts = counts & (result.value | result.unsure)
        return counts.expand([len(each) for each in lanes])

    def _error(self, load: Expr, dim: int, seen: _Seen) -> CaptureError:
        tensor = buffer_of(load, self.reader.tensors)
        size = tensor.shape[dim]
        about = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        name = f"{capture_name(self.reader.fn, tensor) or 'a captured tensor'}, {about},"
        place = ", ".join(f"{x}={at}" for x, at in zip(_NAMES, seen.first, strict=True))
        return CaptureError(
            f"{named_mod(self.reader.fn, self.reader.kind)} reads {name} "
            f"from {seen.low} to {seen.high} in dimension {dim}, which has {size} elements",
            f"an index is from {-size} to {size - 1} wherever the mask keeps the score, or asks "
            f"the tensor whether to; at {place} it is {seen.index}",
            "make the tensor longer, clamp the index, or mask the position",
        )


def _only(sizes: _Sizes, names: set[str]) -> _Sizes:
    b, h, m, n = (size if name in names else 1 for name, size in zip(_NAMES, sizes, strict=True))
    return b, h, m, n


def _env(lanes: Lanes) -> dict[str, Tensor]:
    """The mods' variables, which broadcast against one another."""
    return {
        name: each.reshape([-1 if axis == dim else 1 for axis in range(4)])
        for dim, (name, each) in enumerate(zip(_NAMES, lanes, strict=True))
    }


def _chunks(sizes: Sequence[int], device: torch.device) -> Iterator[Lanes]:
    """All positions, some batches, heads and rows at a time, each with all keys."""
    steps, room = [0, 0, 0], max(1, _CHUNK // sizes[3])
    for dim in (2, 1, 0):
        steps[dim] = max(1, min(sizes[dim], room))
        room = max(1, room // steps[dim])
    keys = torch.arange(sizes[3], device=device)

    def spans(dim: int) -> Iterator[Tensor]:
        for start in range(0, sizes[dim], steps[dim]):
            yield torch.arange(start, min(start + steps[dim], sizes[dim]), device=device)

    for b in spans(0):
        for h in spans(1):
            for rows in spans(2):
                yield b, h, rows, keys
