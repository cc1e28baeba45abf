"""The oracle in plain torch that every kernel is held to, and the CPU path of the public function.

Scores are made a slice of heads and query rows at a time, so memory does not grow with L x S. The
user's callables run as they are, under nested `torch.vmap`, and never pass flexattn's own tracer.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.overrides import TorchFunctionMode

from flexattn.errors import CaptureError, InputError
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.mods.operators import meaning_of
from flexattn.problem.checks import check_dense, check_shapes
from flexattn.problem.inputs import NO_DESCALES, Descales, Dropout, add_sinks, descaled
from flexattn.problem.mask_lists import dense_blocks, spread
from flexattn.reference.dropout import kept_weights
from flexattn.reference.rounding import Precision, Rounding, saved_softmax
from flexattn.util.locks import awaited

_SLICE_SCORES = 2**26
_SLICE_KV = 2**27
# Elements of K, and of V, that are in the working dtype at a time, of rows computed by themselves.
_PIECE = 2**22
# Reentrant: a mod may call the oracle.
_DEFAULT_DTYPE_LOCK = awaited(threading.RLock())


class SomeRows(NamedTuple):
    """Rows of some batches and heads of a call, each of each, computed without the others.

    b, h, rows: int64 numbers of batches, query heads and rows, in one dimension, on the call's
    device. heads: query heads of the whole call.
    """

    b: Tensor
    h: Tensor
    rows: Tensor
    heads: int

    def of(self, x: Tensor) -> Tensor:
        """These rows of a tensor like q, or of statistics."""
        return x[self.b[:, None, None], self.h[:, None], self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of each batch and head, from a tensor with one for each KV head, such as k."""
        kv_head = self.h // (self.heads // x.shape[1])
        return x[self.b.clamp(max=x.shape[0] - 1)[:, None], kv_head]


class Reference(NamedTuple):
    """The results of attention: out [B, Hq, L, Ev], lse and max_scores [B, Hq, L] in natural
    log.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    descales: Descales = NO_DESCALES,
    dropout: Dropout | None = None,
    precision: Precision = Precision.WORKING,
    at: SomeRows | None = None,
) -> Reference:
    """Attention as torch's eager flex_attention defines it, in slices of bounded memory.

    q [B, Hq, L, E], k [Bkv, Hkv, S, E], v [Bkv, Hkv, S, Ev]: Bkv is B or 1, Hkv divides Hq, L and
    S may be 0, any floating dtypes. `scale` defaults to 1/sqrt(E). sinks [Hq]: a logit of each
    head in the softmax's sum, without a value; lse has it, max_scores has not. descales: factors
    of q's, k's and v's heads, those of q and k above 0 or their heads are NaN. dropout: which
    weights are dropped once they are normalised; lse does not know of it. Differentiable in q, k,
    v, sinks and what the mods capture; `max_scores` is not. Only lanes in listed blocks are
    attended; full blocks skip mask_mod. A row with no lane gives zeros, and -inf for lse (or its
    sink) and max_scores. at: q and sinks are those of some rows and heads, all else is the whole
    call's; keys are read in pieces, and no gradient passes.
    Raises InputError for shapes that do not fit, and CaptureError where a lane that the mask keeps
    reads a captured tensor out of range. Lanes that the mask removes may read anything.
    """
    if at is None:
        check_dense(q, k, v)
        check_shapes(q, k, v, enable_gqa=True)
    B, Hq, L, E = q.shape
    S, Ev = v.shape[-2:]
    blocks = None if block_mask is None else Blocks.of(block_mask, L, S, at)
    scale = 1 / math.sqrt(E) if scale is None else scale
    rounding = Rounding.of(precision, q, v)
    run = AttentionSlice(score_mod, blocks, scale, rounding, dropout, sinks, descales, Hq, at)
    if at is not None:
        # The process may be a server: its default dtype must not change.
        with torch.autocast(q.device.type, enabled=False):
            return run(q, k, v, slice(0, B), slice(0, Hq), slice(0, L))
    k, v = k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)
    nb, nh, nm = _slice_sizes(B, Hq, _group(q, k), L, S, E + Ev)
    batches = []
    with torch.autocast(q.device.type, enabled=False), float_of_indices(precision):
        for b in _spans(B, nb):
            heads = []
            for h in _spans(Hq, nh):
                heads.append(_cat([run(q, k, v, b, h, m) for m in _spans(L, nm)], 2))
            batches.append(_cat(heads, 1))
    return _cat(batches, 0)


@contextlib.contextmanager
def float_of_indices(precision: Precision) -> Iterator[None]:
    """An oracle in float64 also where a mod makes a float of an index, as in torch.log(q_idx).

    The default dtype is the whole process's, so oracles of several threads run one at a time: of
    two at once the later one would read float64 as the default, and leave it to the process.
    """
    if precision is not Precision.ORACLE:
        yield
        return
    with _DEFAULT_DTYPE_LOCK:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _group(q: Tensor, k: Tensor) -> int:
    return max(q.shape[1] // max(k.shape[1], 1), 1)


def _slice_sizes(B: int, Hq: int, group: int, L: int, S: int, width: int) -> tuple[int, int, int]:
    """Batches, heads and rows of one slice; its heads are whole groups, or an even part of one."""
    kv_heads = max(1, _SLICE_KV // max(S * width, 1))
    pairs = max(1, min(_SLICE_SCORES // max(L * S, 1), kv_heads * group))
    if pairs >= Hq:
        return max(1, min(B, pairs // max(Hq, 1))), max(Hq, 1), max(L, 1)
    heads = pairs // group * group or max(n for n in range(1, pairs + 1) if group % n == 0)
    return 1, heads, max(1, _SLICE_SCORES // max(heads * S, 1))


def _spans(length: int, size: int) -> Iterator[slice]:
    """Slices that cover range(length); one empty slice for length 0, so that shapes survive."""
    for start in range(0, max(length, 1), size):
        yield slice(start, min(start + size, length))


def _cat(parts: list[Reference], dim: int) -> Reference:
    if len(parts) == 1:
        return parts[0]
    return Reference(*(torch.cat(tensors, dim) for tensors in zip(*parts, strict=True)))


@dataclass(frozen=True)
class AttentionSlice:
    """Attention for one slice of batches, query heads and query rows, all keys at once."""

    score_mod: ScoreMod | None
    blocks: Blocks | None
    scale: float
    rounding: Rounding
    dropout: Dropout | None = None
    sinks: Tensor | None = None
    descales: Descales = NO_DESCALES
    heads: int = 1
    at: SomeRows | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, b: slice, h: slice, m: slice) -> Reference:
        q_work = descaled(self.rounding.load(q[b, h, m]), self._factor("q", b, h))
        keys = self._pieces("k", k, q, b, h)
        product = partial(self.rounding.product, scale=self.scale)
        made = [shared(product, q_work, each.mT) for _, each in keys]
        scores = made[0] if len(made) == 1 else torch.cat(made, -1)
        values = self._pieces("v", v, q, b, h)
        if scores.numel() == 0:
            none = scores.new_full(scores.shape[:3], -math.inf)
            out = shared(torch.matmul, scores, next(values)[1])
            return self._stored(out, none, none, h)
        lanes = self.lanes(b, h, m, slice(0, k.shape[2]), q.device)
        return self._softmax(self.modified(scores, lanes), values, h, self.drop(lanes, scores))

    def lanes(
        self, b: slice, h: slice, m: slice, n: slice, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Positions in the call of some batches, query heads, rows and keys."""
        found = [torch.arange(s.start, s.stop, device=device) for s in (b, h, m, n)]
        if self.at is not None:
            found[:3] = self.at.b, self.at.h, self.at.rows
        return tuple(found)

    def _pieces(
        self, name: str, x: Tensor, q: Tensor, b: slice, h: slice
    ) -> Iterator[tuple[slice, Tensor]]:
        """Keys or values [b, kv heads, n, i] in the working dtype, with their place among all."""
        keys, width = x.shape[2:]
        if self.at is not None:
            for span in _spans(keys, max(1, _PIECE // (q.shape[0] * q.shape[1] * width))):
                x_work = self.rounding.load(self.at.of_keys(x[:, :, span]))
                yield span, descaled(x_work, self._factor(name, b, h))
            return
        group = _group(q, x)
        kv_heads = slice(h.start // group, (h.stop - 1) // group + 1)
        factor = self._factor(name, b, kv_heads)
        yield slice(0, keys), descaled(self.rounding.load(x[b, kv_heads]), factor)

    def _factor(self, name: str, b: slice, h: slice) -> Tensor | None:
        """A slice of q's, k's or v's factors, as kernels take them."""
        found: Tensor | None = getattr(self.descales, name)
        if found is None:
            return None
        if self.at is not None:
            found = self.at.of_keys(found)
        else:
            found = found[b if found.shape[0] > 1 else slice(None), h]
        return found if name == "v" else torch.where(found > 0, found, math.nan)

    def modified(self, scores: Tensor, lanes: tuple[Tensor, ...]) -> Tensor:
        """Scores [b, h, m, n] as score_mod and the mask leave them; lanes: their positions."""
        kept = None if self.blocks is None else self.blocks.kept(lanes)
        if self.score_mod is not None:
            scores = modded(self.score_mod, scores, kept, lanes)
        return scores if kept is None else torch.where(kept, scores, -math.inf)

    def drop(self, lanes: tuple[Tensor, ...], scores: Tensor) -> Tensor | None:
        """The factors by which dropout multiplies weights: 0, or the one that keeps their mean."""
        if self.dropout is None:
            return None
        heads = self.heads if self.at is None else self.at.heads
        return kept_weights(self.dropout, lanes, heads).to(scores.dtype) * self.dropout.scale

    def _softmax(
        self,
        scores: Tensor,
        values: Iterator[tuple[slice, Tensor]],
        h: slice,
        drop: Tensor | None,
    ) -> Reference:
        top = scores.detach().amax(-1)
        empty = top == -math.inf
        p = torch.exp(scores - torch.where(empty, 0.0, top)[..., None])
        total = torch.where(empty, 1.0, p.sum(-1))
        weights = self.rounding.weights(p)
        weights = weights if drop is None else weights * drop
        v, out = scores, scores.new_zeros(())
        for span, v in values:
            out = out + shared(_weighted_sum, weights[..., span], v)
        out = out / total[..., None]
        lse = torch.where(empty, -math.inf, top + torch.log(total))
        sinks = None if self.sinks is None else self.sinks[h]
        learn = any(x is not None and x.requires_grad for x in (scores, v, sinks))
        if not (self.rounding.saves and learn and torch.is_grad_enabled()):
            return self._stored(out, lse, top, h)
        out, lse = saved_softmax(scores, v, sinks, out, lse, drop, self.rounding)
        return Reference(self.rounding.store(out), lse, top)

    def _stored(self, out: Tensor, lse: Tensor, top: Tensor, h: slice) -> Reference:
        if self.sinks is not None:
            out, lse = add_sinks(out, lse, self.sinks[h])
        return Reference(self.rounding.store(out), lse, top)


def shared(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """product(x, y) for x [b, heads, m, i] and y [b, kv heads, i, j] shared by groups."""
    b, heads, m, inner = x.shape
    kv_heads = y.shape[1]
    rows = heads * m // max(kv_heads, 1)
    return product(x.reshape(b, kv_heads, rows, inner), y).reshape(b, heads, m, y.shape[-1])


def _weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    """p @ v, where a lane of weight zero adds nothing even if its value is NaN or infinite."""
    finite = v.isfinite()
    if bool(finite.all()):
        return p @ v
    met = (p > 0).to(p.dtype) @ (~finite).to(p.dtype) > 0
    return torch.where(met, p @ v, p @ torch.where(finite, v, 0.0))


@dataclass(frozen=True)
class Blocks:
    """A BlockMask as two dense block maps [B or 1, H or 1, q blocks, kv blocks].

    gathered: the maps are of the batches and heads that are asked for, in this order.
    """

    partial: Tensor
    full: Tensor | None
    block_size: tuple[int, int]
    mask_mod: MaskMod
    gathered: bool = False

    @classmethod
    def of(cls, mask: BlockMask, L: int, S: int, at: SomeRows | None) -> Blocks:
        block_q, block_kv = mask.BLOCK_SIZE
        rows, cols = -(-L // block_q), -(-S // block_kv)
        if at is None and mask.kv_indices.shape[-2] < rows:
            has = mask.kv_indices.shape[-2]
            raise InputError(
                f"block_mask has {has} blocks of {block_q} query rows, L is {L}",
                "every query row lies in a listed block",
                "make the block mask for this L",
            )
        listed = [(mask.kv_num_blocks, mask.kv_indices)]
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            listed.append((mask.full_kv_num_blocks, mask.full_kv_indices))
        if at is not None:
            listed = [(_gathered(num, at), _gathered(indices, at)) for num, indices in listed]
        partial, full = (*(dense_blocks(num, indices, cols) for num, indices in listed), None)[:2]
        assert partial is not None
        return cls(partial, full, (block_q, block_kv), mask.mask_mod, at is not None)

    def kept(self, lanes: tuple[Tensor, ...]) -> Tensor:
        """The lanes that are attended, bool [b, h, m, n]."""
        places = lanes
        if self.gathered:
            b, h = (torch.arange(len(x), device=x.device) for x in lanes[:2])
            places = (b, h, *lanes[2:])
        allowed = spread(self.partial, self.block_size, places)
        if self.mask_mod is not noop_mask:
            inside, outside = over_lanes(watched(self.mask_mod), (), lanes)
            allowed = allowed & inside.to(torch.bool)
            refuse(outside & allowed, "mask_mod", lanes)
        if self.full is None:
            return allowed
        return allowed | spread(self.full, self.block_size, places)


def _gathered(x: Tensor, at: SomeRows) -> Tensor:
    """A BlockMask's counts or indices of some batches and heads, of which it may have one."""
    return x[(at.b % x.shape[0])[:, None], at.h % x.shape[1]]


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
