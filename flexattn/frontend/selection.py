"""Selection: which keys each row may read, as tensors that other operations wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, and_masks, noop_mask

from flexattn.block_mask.chosen import ChosenBlocks, dense_choices, map_choices
from flexattn.block_mask.lists import kept_tensors, lazy_mask, lists_of
from flexattn.catalogue.masks import causal as causal_mask
from flexattn.errors import InputError, InputTypeError, PlaceError, UnsupportedError
from flexattn.kernels.block_mask.source import MOST_CHOSEN
from flexattn.mods.expr import MaskMod
from flexattn.problem import DTYPES
from flexattn.problem.mask_lists import keep_class
from flexattn.settings import current

# Rows and keys of blocks that kernels walk are multiples of this; other choices are a mask.
_WALKED = 16
# Rows and keys of a block of the lists of such a mask.
_BLOCK = 128
# Elements of the map of choices that such a mask reads.
_MOST_MAPPED = 2**32
# Operations of a dense kernel in the time in which a kernel that reads what single rows chose gets
# a byte of K and V: 477 TFLOP/s beside 7.8 TB/s on an H200.
_FLOPS_OF_A_BYTE = 60
# Query rows, of all heads of a group, of that kernel's highest tile.
_MOST_GATHERED = 64


class Apart(NamedTuple):
    """A call whose key heads are batches, so that a tile has a group's heads of few rows.

    q [B * Hkv, group, L, E], k, v [B * Hkv, 1, S, E]: views. mask: lists of each row's blocks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    batch: int

    def joined(self, found: Any) -> Any:
        """The results of flex_attention, with the head axis where the caller has it."""
        if isinstance(found, AuxOutput):
            return AuxOutput(self.joined(found.lse), self.joined(found.max_scores))
        if isinstance(found, tuple):
            return tuple(map(self.joined, found))
        return None if found is None else found.unflatten(0, (self.batch, -1)).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Selection:
    """The keys that rows may read: block_mask of a flex_attention whose keys data choose.

    indices int32 or int64 [B or 1, heads, blocks of rows, k], on query's device: the blocks of
    `unit` keys that each block of `rows` query rows chose, in any order. heads: 1, key's or
    query's. Indices below 0, past the keys or given twice are left out, never read. counts, of
    the same dimensions without k: only so many of the first indices are valid; None: all.
    mask_mod(b, h, q_idx, kv_idx): what is kept of the chosen keys; `flexattn.catalogue.causal` is
    known, and costs little.

    The host reads no number of it, and k alone is a size: one launch and one CUDA graph serve
    whatever is chosen. Choices whose rows and unit are multiples of 16 are lists of blocks that
    kernels walk. What few rows of a long sequence chose is gathered. Others are a map that a mask
    reads: all keys are visited that some row of 128 chose. A Selection has no gradient.

    Raises InputError and InputTypeError for tensors that do not fit.
    """

    indices: Tensor
    counts: Tensor | None = None
    unit: int = 64
    rows: int = 1
    mask_mod: MaskMod | None = None

    def __post_init__(self) -> None:
        given = ("indices", self.indices), ("counts", self.counts)
        for name, x in given if self.counts is not None else given[:1]:
            if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
                got = f"of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise InputTypeError(
                    f"{name} is {got}", "it is an int32 tensor", f"pass {name}.int()"
                )
        if self.indices.dim() != 4:
            raise InputError(
                f"indices has shape {tuple(self.indices.shape)}",
                "it is [batch, heads, blocks of rows, k]",
            )
        counts = self.counts
        if counts is not None and counts.shape != self.indices.shape[:3]:
            raise InputError(
                f"counts has shape {tuple(counts.shape)}, indices {tuple(self.indices.shape)}",
                "it has the dimensions of indices, without the last one",
            )
        for name, size in (("unit", self.unit), ("rows", self.rows)):
            if not isinstance(size, int) or size < 1:
                raise InputError(f"{name} is {size!r:.80}", "it is an integer above 0")

    @classmethod
    def from_topk(
        cls,
        scores: Tensor,
        k: int,
        *,
        unit: int = 64,
        rows: int = 1,
        causal: bool = False,
        mask_mod: MaskMod | None = None,
    ) -> Selection:
        """The k highest scores [B, heads, blocks of rows, blocks of keys] of each block of rows.

        A score of -inf or NaN is never chosen. causal: blocks that begin after the last row of
        theirs are not chosen, and keys after a row are masked. Without gradients, by torch.topk.
        """
        if scores.dim() != 4 or not scores.is_floating_point():
            raise InputError(
                f"scores of {scores.dtype} with shape {tuple(scores.shape)}",
                "they are floating numbers [batch, heads, blocks of rows, blocks of keys]",
            )
        with torch.no_grad():
            if causal:
                last = torch.arange(1, scores.shape[2] + 1, device=scores.device) * rows
                first = torch.arange(scores.shape[3], device=scores.device) * unit
                scores = scores.masked_fill(first >= last[:, None], -torch.inf)
            scores = scores.masked_fill(scores.isnan(), -torch.inf)
            best = torch.topk(scores, min(k, scores.shape[3]), sorted=False)
            indices = best.indices.masked_fill(best.values == -torch.inf, -1)
        if causal:
            mask_mod = causal_mask if mask_mod is None else and_masks(causal_mask, mask_mod)
        return cls(indices.int(), None, unit, rows, mask_mod)

    @classmethod
    def from_block_mask(cls, mask: BlockMask) -> Selection:
        """The blocks that a BlockMask lists, which its mask_mod then decides within."""
        rows, unit = mask.BLOCK_SIZE
        indices, counts = mask.kv_indices, mask.kv_num_blocks
        valid: Tensor | None = counts
        if mask.full_kv_indices is not None and mask.full_kv_num_blocks is not None:
            both = (counts, indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
            parts = [
                torch.where(torch.arange(x.shape[-1], device=x.device) < n[..., None], x, -1)
                for n, x in both
            ]
            indices, valid = torch.cat(parts, -1), None
        kept = None if mask.mask_mod is noop_mask else mask.mask_mod
        return cls(indices.contiguous(), valid, int(unit), int(rows), kept)

    def for_call(self, q: Tensor, k: Tensor) -> BlockMask:
        """The BlockMask of a call; raises InputError where it was not made for these tensors."""
        self._check(q, k)
        lengths = q.shape[2], k.shape[2]
        if self.rows % _WALKED or self.unit % _WALKED:
            return self._mapped(q, lengths)
        if not torch.compiler.is_dynamo_compiling():
            return self._listed(q.shape[1], lengths)
        given, counts = self.mask_mod, self.counts
        # Backends that compute a node by plain operations read its mask_mod alone.
        lists = self._chosen().by_torch(q.shape[1] if self.indices.shape[1] > 1 else 1, lengths)
        units = -(-lengths[1] // self.unit)
        kept = self._among(dense_choices(self.indices, counts, units), q.shape[1])
        mask_mod = kept if given is None else and_masks(kept, given)
        return _traced(lists, (self.rows, self.unit), mask_mod, lengths)

    def apart(
        self, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, beside: tuple[Any, ...]
    ) -> Apart | None:
        """The call as a kernel reads what single rows chose; None where a map is read instead.

        beside: a call's other arguments, None where they are not given: with one of them, and
        with gradients, whose lists a backward walks, a map is read. Sizes decide, and no number
        of the choice: a dense kernel computes all pairs, this one reads the keys of each row for
        each key head.
        """
        if torch.compiler.is_dynamo_compiling() or any(each is not None for each in beside):
            return None
        if not self.rows % _WALKED or self.unit % _WALKED:
            return None
        self._check(q, k)
        (B, Hq, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
        group = Hq // max(1, Hkv)
        given, heads, _, chosen = self.indices.shape
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if (
            wanted
            or not (enable_gqa or Hq == Hkv)
            or not (q.is_cuda or current().interpret)
            or q.dtype not in DTYPES
            or not q.dtype == k.dtype == v.dtype
            or not B == k.shape[0] == v.shape[0]
            or self.rows * group > _MOST_GATHERED
            or self.mask_mod not in (None, causal_mask)
            or (given, heads) not in ((B, Hkv), (1, 1))
            or not 0 < chosen <= MOST_CHOSEN
            or current().batch_invariant
        ):
            return None
        dense = 2 * (D + Dv) * group * S / (1 if self.mask_mod is None else 2)
        # A tile of a short unit takes about as long as one of 64 keys.
        gathered = min(chosen * max(self.unit, 64), S) * (D + Dv) * q.itemsize
        if gathered * _FLOPS_OF_A_BYTE > dense:
            return None
        try:
            parts = [x.view(B * Hkv, -1, *x.shape[2:]) for x in (q, k, v)]
        except RuntimeError:  # heads lie outside of batches
            return None
        indices, counts = (
            None if x is None else x.reshape(-1, 1, *x.shape[2:])
            for x in (self.indices, self.counts)
        )
        assert indices is not None
        alone = Selection(indices, counts, self.unit, self.rows, self.mask_mod)
        one, key, value = parts
        return Apart(one, key, value, alone._listed(group, (L, S)), B)

    def _listed(self, heads: int, lengths: tuple[int, int]) -> BlockMask:
        """The mask of lists of the blocks that each block of rows chose."""
        given = self.mask_mod
        return self._chosen().mask(heads, lengths, noop_mask if given is None else given)

    def _chosen(self) -> ChosenBlocks:
        given, counts = self.mask_mod, self.counts
        return ChosenBlocks(
            self.indices.contiguous(),
            None if counts is None else counts.to(torch.int32).contiguous(),
            self.rows,
            self.unit,
            given is not None,
            given is causal_mask,
        )

    def _check(self, q: Tensor, k: Tensor) -> None:
        B, heads, rows, _ = self.indices.shape
        batch, Hq, q_len, _ = q.shape
        if self.indices.device != q.device:
            raise PlaceError(
                f"indices is on {self.indices.device}, query on {q.device}",
                "they are on one device",
                f"call indices.to({str(q.device)!r})",
            )
        if B not in (1, batch) or heads not in (1, k.shape[1], Hq):
            raise InputError(
                f"a Selection for batch {B} and {heads} heads, query has {(batch, Hq)} and key "
                f"{k.shape[1]} heads",
                "its batch is query's or 1, its heads are 1, key's or query's",
            )
        if rows != -(-q_len // self.rows):
            raise InputError(
                f"a Selection of {rows} blocks of {self.rows} rows for {q_len} query rows",
                "each block of rows has a choice",
                f"give it {-(-q_len // self.rows)}",
            )

    def _among(self, chosen: Tensor, Hq: int) -> MaskMod:
        """The mask of a map of choices [B or 1, heads, blocks of rows, units]."""
        shared, group = chosen.shape[0] == 1, Hq // chosen.shape[1]
        rows, unit = self.rows, self.unit

        def among_chosen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            batch = b * 0 if shared else b
            return chosen[batch, h // group, q_idx // rows, kv_idx // unit]

        return among_chosen

    def _mapped(self, q: Tensor, lengths: tuple[int, int]) -> BlockMask:
        """The mask of a map of choices, of rows or keys that no kernel walks as blocks."""
        units = -(-lengths[1] // self.unit)
        B, heads, blocks, _ = self.indices.shape
        if B * heads * blocks * units > _MOST_MAPPED:
            raise UnsupportedError(
                f"a Selection of {B} x {heads} x {blocks} choices among {units} units",
                f"the map of choices that are no blocks has at most {_MOST_MAPPED} elements",
                "choose by blocks: rows and unit multiples of 16",
            )
        tracing = torch.compiler.is_dynamo_compiling()
        listed = q.shape[1] if heads > 1 else 1
        made = None if tracing else map_choices(
            self.indices, self.counts, self.rows, self.unit, lengths, listed,
            self.mask_mod is causal_mask, _BLOCK,
        )  # fmt: skip
        chosen, lists = made or self._by_torch(units, listed, lengths)
        among_chosen = self._among(chosen, q.shape[1])
        mask_mod: Any = among_chosen
        if self.mask_mod is not None:
            mask_mod = and_masks(among_chosen, self.mask_mod)
        if tracing:
            return _traced((*lists, None, None), (_BLOCK, _BLOCK), mask_mod, lengths)
        mask = lazy_mask(lists, (_BLOCK, _BLOCK), mask_mod, lengths)
        keep_class(mask)
        return mask

    def _by_torch(
        self, units: int, heads: int, lengths: tuple[int, int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The map and the lists of its blocks by plain torch."""
        chosen = dense_choices(self.indices, self.counts, units)
        near = _any(_any(chosen, 3, self.unit, lengths[1]), 2, self.rows, lengths[0])
        if self.mask_mod is causal_mask:
            at = (torch.arange(x, device=near.device) * _BLOCK for x in near.shape[2:])
            first_row, first_key = at
            near = near & (first_key < first_row[:, None] + _BLOCK)
        near = near.to(torch.int8).repeat_interleave(heads // near.shape[1], 1)
        shape: Any = tuple(near.shape)
        parts = [(0, near.view(-1, shape[3]))] if near.numel() else []
        return chosen, lists_of(parts, shape, near.device, separate=False)


def _traced(
    lists: tuple[Any, ...], block: tuple[int, int], mask_mod: Any, lengths: tuple[int, int]
) -> BlockMask:
    """A mask in a graph that is traced, where it has torch's own class and no more."""
    make: Any = BlockMask
    mask: BlockMask = make(lengths, *lists, None, None, None, None, block, mask_mod)
    return mask


def _any(chosen: Tensor, dim: int, size: int, length: int) -> Tensor:
    """True for each block of _BLOCK positions with a chosen one; `size` positions share one."""
    if torch.compiler.is_dynamo_compiling():
        (at,) = _places(size, length, chosen.device)
    else:
        (at,) = kept_tensors(_places, (size, length), chosen.device)
    found: Tensor = chosen.index_select(dim, at.flatten()).unflatten(dim, at.shape)
    return found.any(dim + 1)


def _places(size: int, length: int, device: torch.device) -> tuple[Tensor]:
    """The units (or blocks of rows) of each block of _BLOCK positions.

    int64 [blocks, the most of one]. Some are there twice.
    """
    first = torch.arange(0, length, _BLOCK, device=device)[:, None]
    last = (first + _BLOCK).clamp(max=length) - 1
    step = torch.arange((size + _BLOCK - 2) // size + 1, device=device)
    return (torch.minimum(first // size + step, last // size),)
