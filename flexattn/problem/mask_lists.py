"""A BlockMask's lists: as maps of blocks, the runs of their rows, and the class of the mask.

Masks of one class take the same config; two of different classes may not, at the same lengths.
"causal" at any long length is "d1/2 i2 runs", a window of an eighth of the keys "d1/8 i1 runs".
"""

from __future__ import annotations

import math
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

_RUNS = "_flexattn_runs"


class Rows(NamedTuple):
    """The facts of a mask's rows by its lists, each [..., rows].

    listed: how many blocks. first, end: the lowest one, and one past the highest; the same number
    where there is none. runs [..., rows, 4] int32: (first, first full, end of full, end) in
    blocks, or (first, end, first, end) of a row without full blocks, so that none lies between
    the middle two. joined: a bool tensor without dimensions, whether the runs say all that the
    lists say.
    """

    listed: Tensor
    first: Tensor
    end: Tensor
    runs: Tensor
    joined: Tensor


class _Kept(NamedTuple):
    """A value computed from lists, these lists, and their versions at that time."""

    found: Any
    lists: tuple[Tensor | None, ...]
    versions: list[Any]


def rows_of(
    num: Tensor, idx: Tensor, full_num: Tensor | None, full_idx: Tensor | None, kv_blocks: int
) -> Rows:
    """The rows of lists of blocks: num [..., rows], idx [..., rows, width]; nothing is read back.

    Full blocks join up where they are consecutive, all blocks where they are so together; and no
    block may be listed twice.
    """
    low, high, listed, joined = _ends(num, idx, kv_blocks)
    full_low, full_high = torch.full_like(low, kv_blocks), torch.full_like(high, -1)
    counts = num
    if full_num is not None and full_idx is not None:
        full_low, full_high, _, rising = _ends(full_num, full_idx, kv_blocks)
        between = (idx >= full_low.unsqueeze(-1)) & (idx <= full_high.unsqueeze(-1)) & listed
        full = (full_num == 0) | (full_high - full_low + 1 == full_num)
        joined = joined & rising & full.all() & ~between.any()
        low, high = torch.minimum(low, full_low), torch.maximum(high, full_high)
        counts = num + full_num
    end = high + 1
    first = torch.minimum(low, end)
    some = full_high >= 0
    middle = torch.where(some, full_low, end), torch.where(some, full_high + 1, first)
    runs = torch.stack([first, *middle, end], -1).to(torch.int32)
    return Rows(counts, first, end, runs, joined & (end - first == counts).all())


def _ends(counts: Tensor, indices: Tensor, kv_blocks: int) -> tuple[Tensor, ...]:
    """The lowest and the highest listed block of each row; `kv_blocks` and -1 of an empty one.

    Then which entries are listed, and whether every row lists its blocks once and in order.
    """
    width = indices.shape[-1]
    listed = torch.arange(width, device=indices.device) < counts.unsqueeze(-1)
    if not width:
        nothing = torch.zeros_like(counts)
        return nothing + kv_blocks, nothing - 1, listed, listed.all()
    low = torch.where(listed, indices, kv_blocks).amin(-1)
    high = torch.where(listed, indices, -1).amax(-1)
    rising = (indices[..., 1:] > indices[..., :-1]) | ~listed[..., 1:]
    return low, high, listed, rising.all()


def keep_runs(mask: BlockMask, runs: Tensor) -> None:
    """Keep a mask's runs with it, while nobody writes to its lists."""
    keep_with(mask, _RUNS, runs)


def known_runs(mask: BlockMask) -> Tensor | None:
    """The runs kept with a mask, [B, H, rows, 4]; None where there are none that still hold."""
    found: Tensor | None = kept_with(mask, _RUNS)
    return found


def keep_with(mask: BlockMask, attribute: str, found: Any) -> None:
    """Keep what was found in a mask's lists by query with it, while nobody writes to them.

    A tensor that was made in inference mode does not tell when it is written to: nothing is kept
    with such a mask. What a replayed CUDA graph writes into lists goes unseen.
    """
    lists = query_lists(mask)
    given = [each for each in lists if each is not None]
    if not any(each.is_inference() for each in given):
        setattr(mask, attribute, _Kept(found, lists, versions(given)))


def kept_with(mask: BlockMask, attribute: str) -> Any:
    """The value that `keep_with` stored; None where there is none that still holds."""
    kept: _Kept | None = getattr(mask, attribute, None)
    if kept is None or not all(map(is_, query_lists(mask), kept.lists)):
        return None
    return kept.found if unwritten(kept.versions) else None


def versions(lists: list[Tensor]) -> list[Any]:
    """A mask's lists, how often they were written to, where they lie and how.

    A version counts what is written in place; `.data = …` gives other memory and sizes unseen.
    """
    return [(x, x._version, x.data_ptr(), x.shape, x.is_contiguous()) for x in lists]


def unwritten(seen: list[Any]) -> bool:
    """True if lists still are as `versions` saw them."""
    for each, version, place, shape, dense in seen:
        if each._version != version or each.data_ptr() != place:
            return False
        if each.shape != shape or each.is_contiguous() != dense:
            return False
    return True


def query_lists(mask: BlockMask) -> tuple[Tensor | None, ...]:
    """A mask's lists by query: counts and indices of partial blocks, then of full ones."""
    return (
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
    )  # fmt: skip


def dense_blocks(num_blocks: Tensor, indices: Tensor, cols: int) -> Tensor:
    """Block lists as a bool map; entries past the count or past `cols` columns are dropped."""
    while indices.dim() < 4:
        num_blocks, indices = num_blocks[None], indices[None]
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    places = torch.where(listed & (indices >= 0), indices, cols).clamp(max=cols).long()
    dense = torch.zeros((*indices.shape[:-1], cols + 1), dtype=torch.bool, device=indices.device)
    return dense.scatter(-1, places, True)[..., :cols]


def block_maps(mask: BlockMask, cols: int) -> list[Tensor]:
    """A mask's partial blocks as a bool map, and its full ones if it lists such."""
    num, idx, full_num, full_idx = query_lists(mask)
    pairs = (num, idx), (full_num, full_idx)
    return [dense_blocks(n, x, cols) for n, x in pairs if n is not None and x is not None]


def spread(blocks: Tensor, block_size: tuple[int, int], lanes: tuple[Tensor, ...]) -> Tensor:
    """The map [B or 1, H or 1, q blocks, kv blocks] at batches, heads, rows, keys: [b, h, m, n].

    lanes: the numbers of each, in one dimension.
    """
    b, h, m, n = lanes
    rows, cols = m // block_size[0], n // block_size[1]
    return blocks[(b % blocks.shape[0])[:, None], h % blocks.shape[1]][:, :, rows][..., cols]


UNKNOWN = "unknown"
# The coarsest densities and imbalances that are still told apart: 1/64 and 16.
DENSITY_STEPS, IMBALANCE_STEPS = 6, 4
_CLASS = "_flexattn_class"
_FORM = "_flexattn_form"
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
    setattr(mask, _CLASS, name)


def known_class(mask: BlockMask) -> str | None:
    """The class that is kept with a mask; None before anybody looked."""
    found: str | None = getattr(mask, _CLASS, None)
    return found


def keep_form(mask: BlockMask, form: tuple[Any, ...] | None = None) -> None:
    """Let calls with other lists of the same sizes share a mask's launches.

    form: as of `shared_form`. For masks of a kept class, without runs, whose lists are as kernels
    read them: int32, contiguous, partial and full blocks apart.
    """
    setattr(mask, _FORM, (id(mask.mask_mod), *(form or shared_form(mask))))


def shared_form(mask: BlockMask) -> tuple[Any, ...]:
    """What masks that share launches have in common, except their mask_mod."""
    shapes = [x.shape for x in query_lists(mask) if x is not None]
    return known_class(mask), *mask.BLOCK_SIZE, *mask.seq_lengths, *shapes


def list_form(mask: BlockMask | None) -> tuple[Any, ...] | None:
    """The key by which a mask's calls share launches, from `keep_form`; None without one."""
    found: tuple[Any, ...] | None = getattr(mask, _FORM, None)
    return found


def keeps_all(mask: BlockMask) -> bool:
    """True if a mask is the one block of everything that torch has for calls without a mask.

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
    """True if numbers can be read back now: real data, and no graph under capture."""
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


def kept(name: str) -> Kept:
    """The kept share and imbalance of a class of masks; "" keeps all, "unknown" is as causal."""
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
