"""quantize(): q, k and v of 16 bits as e4m3, with factors of heads or of blocks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexattn.device import detect
from flexattn.errors import InputError
from flexattn.frontend.call import PLAIN
from flexattn.kernels.cache_append.source import render_quantize, rows_at_once
from flexattn.mods.expr import ScoreMod
from flexattn.problem import DTYPES
from flexattn.runtime.build import builder
from flexattn.runtime.launch import launches, raw_stream
from flexattn.settings import current

E4M3 = torch.float8_e4m3fn
BLOCKS = (64, 128)
# Columns of a program's tile at most.
_WIDEST = 512
if TYPE_CHECKING:
    from flexattn.frontend.attention import Extras


class Quantized(NamedTuple):
    """q [B, Hq, L, E], k, v [B, Hkv, S, E] in e4m3, and float32 factors that undo their scales.

    q_factor [B, Hq, blocks of L or 1], k_factor [B, Hkv, blocks of S or 1], v_descale [B, Hkv].
    block: rows, or keys, of a block; None where heads have one factor each.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_factor: Tensor
    k_factor: Tensor
    v_descale: Tensor
    block: int | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def descales(self) -> Extras:
        """The factors of heads, as flex_attention takes them by name."""
        v = self.v_descale
        if self.block is not None:
            return {"v_descale": v}
        q, k = self.q_factor[..., 0], self.k_factor[..., 0]
        return {"q_descale": q, "k_descale": k, "v_descale": v}

    def score_mod(self, score_mod: ScoreMod | None = None) -> ScoreMod | None:
        """The caller's score_mod, or none, on scores that blocks' factors have scaled before."""
        if self.block is None:
            return score_mod
        rows, keys, block = self.q_factor, self.k_factor, self.block
        group = self.q.shape[1] // self.k.shape[1]

        def scaled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            factor = rows[b, h, q_idx // block] * keys[b, h // group, kv_idx // block]
            score = score * factor
            return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

        return scaled


def quantize(
    q: Tensor, k: Tensor, v: Tensor, *, block: int | None = None, smooth: bool = False
) -> Quantized:
    """q [B, Hq, L, E], k and v [B, Hkv, S, E] of 16 or 32 bits in e4m3, each scaled to its range.

    Args:
        q: [B, Hq, L, E].
        k: [B, Hkv, S, E].
        v: [B, Hkv, S, E]; a head has one factor.
        block: 64 or 128, so many rows of q and keys of k that have a factor of their own; by
            default a head has one.
        smooth: k less its mean over all keys, which moves all scores of a row alike. The softmax
            is the same, but lse and max_scores are less by scale * q @ mean. Sinks, and a
            score_mod that bends scores, such as a soft cap, are not served so.

    Returns:
        A `Quantized`: the tensors, their descales and the score_mod of the blocks.

    Raises:
        InputError: for other shapes, dtypes or blocks.

    Example::

        made = quantize(q, k, v, block=128, smooth=True)
        out = flex_attention(*made.tensors, made.score_mod(), **made.descales)

    Method: SageAttention (Zhang et al., arXiv 2410.02367, section 4.2).
    """
    if block not in (None, *BLOCKS):
        raise InputError(f"block={block!r}", "a block has 64 or 128 rows, or is None")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise InputError(
                f"{name} has {x.ndim} dimensions of {x.dtype}",
                "q, k and v have four, of float16, bfloat16 or float32",
            )
    mean = k.mean(2, keepdim=True, dtype=torch.float32).contiguous() if smooth else None
    q8, rows = _scaled(q, block)
    k8, of_keys = _scaled(k, block, mean)
    v8, of_v = _scaled(v, None)
    return Quantized(q8, k8, v8, rows, of_keys, of_v[..., 0], block)


def _scaled(x: Tensor, block: int | None, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x less a mean [B, H, 1, E] in e4m3, and the factors [B, H, blocks] that undo its scale."""
    if _by_kernel(x):
        factor = None
        if block is None:
            factor = _factor(_launched(x.detach(), None, mean)[1].amax(2, keepdim=True))
        return _launched(x.detach(), block, mean, factor)
    wide = x.float() if mean is None else x.float() - mean
    length = x.shape[2]
    size, short = (max(length, 1), length == 0) if block is None else (block, -length % block)
    parts = torch.nn.functional.pad(wide, (0, 0, 0, short)).unflatten(2, (-1, size))
    factor = _factor(parts.abs().amax((3, 4)))
    return (parts / factor[..., None, None]).flatten(2, 3)[:, :, :length].to(E4M3), factor


def _factor(largest: Tensor) -> Tensor:
    factor = largest / torch.finfo(E4M3).max
    return torch.where(factor > 0, factor, 1.0)


def _by_kernel(x: Tensor) -> bool:
    """True if the kernel takes a tensor, which torch takes several passes over."""
    plain = type(x) in PLAIN and not torch.compiler.is_compiling()
    fits = x.numel() > 0 and x.stride(3) == 1 and x.shape[3] <= _WIDEST
    return plain and fits and (x.is_cuda or current().interpret)


def _launched(
    x: Tensor, block: int | None, mean: Tensor | None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same by the kernel; without a block and factors x itself, and the largest magnitudes."""
    B, heads, length, head_dim = x.shape
    rows = block or rows_at_once(head_dim, BLOCKS[0])
    index, target = x.get_device(), detect(x.device)
    tiles = -(-length // rows)
    places = (x.data_ptr(), *(step * x.itemsize for step in x.stride()[:3]))
    aligned = all(each % 16 == 0 for each in places)
    stores = block is not None or factor is not None
    form = DTYPES[x.dtype], head_dim, rows, aligned, block is not None, mean is not None, stores
    key = "quantize", form, x.shape, x.stride(), index
    launcher = launches.get(key)
    if launcher is None:
        fixed = {
            **dict(zip(("stride_xb", "stride_xh", "stride_xn"), x.stride(), strict=False)),
            "heads": heads, "length": length, "num_tiles": tiles,
        }  # fmt: skip
        names = ("X", *("OUT",) * stores, *("MEAN",) * (mean is not None), "FACTOR")
        kernel = builder().kernel(render_quantize(*form, target), target, index)
        launcher = kernel.prepare(B * heads * tiles, fixed, names)
        launches.put(key, launcher)
    out = torch.empty(x.shape, dtype=E4M3, device=x.device) if stores else x
    if factor is None:
        factor = torch.empty((B, heads, tiles), device=x.device)
    given = (x, *(out.view(torch.uint8),) * stores, *(() if mean is None else (mean,)), factor)
    with torch.cuda.device(index) if index >= 0 else nullcontext():
        launcher.launch(raw_stream(index) if index >= 0 else -1, given)
    return out, factor
