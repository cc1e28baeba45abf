"""quantize(): q, k and v of 16 bits as e4m3, with factors of heads or of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import InputError
from flexattn.mods.expr import ScoreMod

E4M3 = torch.float8_e4m3fn
BLOCKS = (64, 128)
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
    keys = k.float() - k.float().mean(2, keepdim=True) if smooth else k
    (q8, rows), (k8, of_keys) = _scaled(q, block), _scaled(keys, block)
    v8, of_v = _scaled(v, None)
    return Quantized(q8, k8, v8, rows, of_keys, of_v[..., 0], block)


def _scaled(x: Tensor, block: int | None) -> tuple[Tensor, Tensor]:
    """x in e4m3, and the factors [B, H, blocks] that give its numbers back."""
    length = x.shape[2]
    size = max(length, 1) if block is None else block
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -length % size))
    parts = padded.unflatten(2, (-1, size))
    factor = parts.abs().amax((3, 4)) / torch.finfo(E4M3).max
    factor = torch.where(factor > 0, factor, 1.0)
    return (parts / factor[..., None, None]).flatten(2, 3)[:, :, :length].to(E4M3), factor
