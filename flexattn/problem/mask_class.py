"""The class of a BlockMask: how dense, how uneven, how contiguous, in a few coarse words.

Masks of one class take the same config; two of different classes may not, at the same lengths.
"causal" at any long length is "d1/2 i2 runs", a window of an eighth of the keys "d1/8 i1 runs".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexattn.problem.runs import keep_runs, query_lists, rows_of

UNKNOWN = "unknown"
# The coarsest densities and imbalances that are still told apart: 1/64 and 16.
DENSITY_STEPS, IMBALANCE_STEPS = 6, 4
_ATTRIBUTE = "_flexattn_class"
# What torch makes of no block mask: one block, larger than any length, and no mask_mod.
_OF_ALL = (2**30, 2**30)


def mask_class(mask: BlockMask) -> str:
    """The class of a mask's listed blocks, found once and kept with the mask, as its runs are.

    The first call reads four numbers back from the device; later ones read an attribute, so what
    is written into the lists afterwards changes nothing. While a CUDA graph is being captured, or
    where the lists hold no data, it is "unknown" until a call that can look.
    """
    found = known_class(mask)
    if found is not None:
        return found
    if not _readable(mask.kv_num_blocks):
        return UNKNOWN
    found, runs = look_at_lists(query_lists(mask), -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1]))
    keep_class(mask, found)
    if runs is not None:
        keep_runs(mask, runs)
    return found


def keep_class(mask: BlockMask, name: str = UNKNOWN) -> None:
    """Keep a class with a mask, so that nobody looks at its lists for it."""
    setattr(mask, _ATTRIBUTE, name)


def known_class(mask: BlockMask) -> str | None:
    """The class that is kept with a mask; None before anybody looked."""
    found: str | None = getattr(mask, _ATTRIBUTE, None)
    return found


def keeps_all(mask: BlockMask) -> bool:
    """Whether a mask is the one block of everything that torch has for calls without a mask.

    Such a mask fits any lengths, whatever its own are. It reads two numbers back from the device;
    while these cannot be read, as under the capture of a CUDA graph, the answer is no.
    """
    if tuple(mask.BLOCK_SIZE) != _OF_ALL or mask.mask_mod is not noop_mask:
        return False
    if mask.full_kv_num_blocks is not None or mask.kv_indices.numel() != 1:
        return False
    if not _readable(mask.kv_num_blocks):
        return False
    return mask.kv_num_blocks.tolist() == [[[1]]] and mask.kv_indices.tolist() == [[[[0]]]]


def look_at_lists(lists: tuple[Tensor | None, ...], kv_blocks: int) -> tuple[str, Tensor | None]:
    """The class of lists of blocks, and their runs where the blocks of each row join up.

    lists: counts [..., rows], indices [..., rows, width], as of `query_lists`. One read back.
    """
    num, idx, full_num, full_idx = lists
    assert num is not None and idx is not None
    if not num.numel() or not kv_blocks:
        return "empty", None
    rows = rows_of(num, idx, full_num, full_idx, kv_blocks)
    listed = rows.listed.float()
    gaps = (rows.listed > 0) & (rows.end - rows.first > rows.listed)
    facts = [listed.mean(), listed.amax(), gaps.any().float(), rows.joined.float()]
    mean, most, gapped, joined = torch.stack(facts).tolist()
    if not mean:
        return "empty", None
    density = min(DENSITY_STEPS, round(-math.log2(min(1.0, mean / kv_blocks))))
    imbalance = min(IMBALANCE_STEPS, round(math.log2(most / mean)))
    shown = f"1/{2**density}" if density else "1"
    name = f"d{shown} i{2**imbalance} {'gaps' if gapped else 'runs'}"
    return name, rows.runs if joined else None


def _readable(tensor: Tensor) -> bool:
    """Whether numbers can be read back now: real data, and no graph under capture."""
    if tensor.is_meta or _is_fake(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_fake(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


class Kept(NamedTuple):
    """The share of the keys that a mask's blocks keep in the mean row, and the most over that."""

    share: float
    imbalance: float


@lru_cache(maxsize=256)
def kept(name: str) -> Kept:
    """What a class says of a mask's blocks; of "", all of them, and of "unknown", causal's."""
    if not name:
        return Kept(1.0, 1.0)
    if name == "empty":
        return Kept(0.0, 1.0)
    density, imbalance, _ = (UNKNOWN_LIKE if name == UNKNOWN else name).split()
    share = 1 / int(density.removeprefix("d1/")) if "/" in density else 1.0
    return Kept(share, float(imbalance.removeprefix("i")))


def representative(name: str, rows: int, kv_blocks: int) -> Tensor:
    """A dense block mask [rows, kv_blocks] of a class, as near as its size allows.

    For tuning a class of masks of which no member is at hand; "unknown" gives causal's.
    """
    if name == "empty" or not rows or not kv_blocks:
        return torch.zeros(rows, kv_blocks, dtype=torch.bool)
    share, imbalance = kept(name)
    most = min(1.0, share * imbalance)
    # A straight line from `least` to `most` has the mean, as causal's rows have.
    least = max(0.0, 2 * share - most)
    steps = torch.linspace(int(rows == 1), 1, rows, dtype=torch.float32)
    flat = torch.full((rows,), share, dtype=torch.float32)
    line = flat if most == share else least + (most - least) * steps ** _bend(share, least, most)
    counts = (line * kv_blocks).round().clamp(1, kv_blocks).long()
    columns = torch.arange(kv_blocks)
    if name == UNKNOWN or name.endswith("runs"):
        return columns < counts[:, None]
    # Spread evenly: every row has a block at its start, and the others apart from it.
    stride = (kv_blocks / counts.double())[:, None]
    return (columns % stride) < 1


def _bend(share: float, least: float, most: float) -> float:
    """The power p for which least + (most - least) x**p has the mean `share` on [0, 1]."""
    return max(1.0, (most - least) / max(share - least, 1e-9) - 1)


UNKNOWN_LIKE = "d1/2 i2 runs"
