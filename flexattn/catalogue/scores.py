"""Score mods: factories, one idea each, written as users write them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def scaled(factor: float) -> ScoreMod:
    """The score times a Python number."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * factor

    score_mod.__name__ = f"scaled_{factor}"
    return score_mod


def softcap(cap: float) -> ScoreMod:
    """Scores kept within plus and minus `cap` by tanh."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    score_mod.__name__ = f"softcap_{cap}"
    return score_mod


def alibi_slopes(Hq: int, device: torch.device | str) -> Tensor:
    """ALiBi's slope of each head, 2^(-8 (h + 1) / Hq), float32 [Hq]."""
    heads = torch.arange(1, Hq + 1, dtype=torch.float32)
    # Made on the CPU: devices differ in the last bit of exp2.
    return torch.exp2(-8.0 * heads / Hq).to(device)


def alibi(Hq: int, device: torch.device | str) -> ScoreMod:
    """A bias that falls linearly with distance, with a slope for each head."""
    slopes = alibi_slopes(Hq, device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    score_mod.__name__ = f"alibi_{Hq}"
    return score_mod


def t5_bias(table: Tensor, max_distance: int) -> ScoreMod:
    """T5's bidirectional relative position buckets; table [buckets, Hq] is learned.

    Half of a direction's buckets are exact, the others grow with the logarithm of the distance.
    """
    buckets = table.shape[0] // 2
    exact = buckets // 2
    growth = (buckets - exact) / math.log(max_distance / exact)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        relative = kv_idx - q_idx
        distance = relative.abs()
        far = exact + (torch.log(distance.to(torch.float32) / exact) * growth).to(torch.int64)
        far = torch.clamp(far, max=buckets - 1)
        bucket = torch.where(distance < exact, distance, far)
        bucket = bucket + torch.where(relative > 0, buckets, 0)
        return score + table[bucket, h]

    score_mod.__name__ = f"t5_bias_{2 * buckets}"
    return score_mod


def relative_bias(table: Tensor, offset: int) -> ScoreMod:
    """A learned bias for each head and distance; table [Hq, n], n > q_idx - kv_idx + offset."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx - kv_idx + offset]

    score_mod.__name__ = f"relative_bias_{offset}"
    return score_mod


def head_bias(bias: Tensor) -> ScoreMod:
    """A learned bias for each lane; bias [B, Hq, L, S]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b, h, q_idx, kv_idx]

    score_mod.__name__ = "head_bias"
    return score_mod


def length_temperature(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """Scores that sharpen with the logarithm of the query's position; reads q_idx alone."""
    return score * torch.log(q_idx + 3.0)


def causal_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal attention by a score of minus infinity, with no mask."""
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def half_precision_bias(bias: Tensor) -> ScoreMod:
    """Casts of every kind: bfloat16 arithmetic on a bias, a double sum, a half step; bias [S].

    The score itself is not rounded: where two precisions round it to different neighbours there
    is no one right answer for a gate to ask for.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        low = bias[kv_idx].to(torch.bfloat16) * 1.5 + 0.125
        step = (q_idx.to(torch.float32) * 0.5).to(torch.int32) % 3
        return (score.to(torch.float64) + low).to(torch.float32) + step.to(torch.float16)

    score_mod.__name__ = "half_precision_bias"
    return score_mod


def nested(factor: float, bias: Tensor) -> ScoreMod:
    """A mod inside a mod inside a mod, each with a capture of its own; bias [Hq]."""

    def with_factor(inner: ScoreMod) -> ScoreMod:
        def outer_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return inner(s * factor, b, h, q_idx, kv_idx)

        return outer_mod

    def with_bias(inner: ScoreMod) -> ScoreMod:
        def middle_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return inner(s + bias[h], b, h, q_idx, kv_idx)

        return middle_mod

    score_mod = with_factor(with_bias(softcap(20.0)))
    score_mod.__name__ = "nested"
    return score_mod
