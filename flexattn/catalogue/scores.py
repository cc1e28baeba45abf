"""Score mods: factories, one idea each, written as users write them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.mods.expr import ScoreMod as ScoreMod  # as MaskMod of masks


def scaled(factor: float) -> ScoreMod:
    """Multiplies the score by a Python number, as a temperature.

    The factor is multiplied into the softmax scale and costs nothing. Its second value
    compiles once more, and further values compile nothing.

        score_mod = scaled(1.75)

    Source: Hinton et al., Distilling the Knowledge (temperature), 2015, arXiv:1503.02531.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * factor

    score_mod.__name__ = f"scaled_{factor}"
    return score_mod


def softcap(cap: float) -> ScoreMod:
    """Keeps scores within plus and minus `cap` by tanh.

    Gemma 2 caps at 50. In 16 bits a kernel uses the hardware's `tanh`, as a part of the
    softmax.

        score_mod = softcap(50.0)

    Source: Gemma Team, Gemma 2, 2024, arXiv:2408.00118.
    """

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
    """A bias that falls linearly with distance, with a slope for each head.

    It replaces position embeddings. Some keys are so far away that their weights are 0 in
    float32. A long causal prefill skips them.

        score_mod = alibi(16, "cpu")

    Source: Press et al., Train Short, Test Long (ALiBi), 2021, arXiv:2108.12409.
    """
    slopes = alibi_slopes(Hq, device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    score_mod.__name__ = f"alibi_{Hq}"
    return score_mod


def t5_bias(table: Tensor, max_distance: int) -> ScoreMod:
    """T5's bidirectional buckets of relative positions; table [buckets, Hq] is learned.

    Half of a direction's buckets have one distance each. The others grow with the logarithm of
    the distance.

        score_mod = t5_bias(torch.linspace(-1, 1, 32)[:, None], 128)

    Source: Raffel et al., T5, 2019, arXiv:1910.10683.
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
    """A learned bias for each head and distance; table [Hq, n].

    n must be above q_idx - kv_idx + offset. A kernel reads one value for each diagonal of a
    tile, not one for each score. The table may require a gradient.

        score_mod = relative_bias(torch.cos(torch.arange(4096) / 200)[None], 2048)

    Source: Shaw et al., Relative Position Representations, 2018, arXiv:1803.02155.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx - kv_idx + offset]

    score_mod.__name__ = f"relative_bias_{offset}"
    return score_mod


def head_bias(bias: Tensor) -> ScoreMod:
    """A learned bias for each score; bias [B, Hq, L, S].

    Protein models add a pair representation to the scores. Its memory grows with L x S, and
    most of the time goes to reading it.

        rows = torch.linspace(-1, 1, 2048)
        score_mod = head_bias((rows[:, None] * rows)[None, None])

    Source: Jumper et al., AlphaFold 2 (pair bias), Nature, 2021, doi:10.1038/s41586-021-03819-2.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b, h, q_idx, kv_idx]

    score_mod.__name__ = "head_bias"
    return score_mod


def length_temperature(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """Multiplies scores by a factor that grows with the query's position.

    Over more keys a softmax becomes flatter. The factor, log(q_idx + 3), keeps it sharp.

        score_mod = length_temperature

    Source: Nakanishi, Scalable-Softmax, 2025, arXiv:2501.19399.
    """
    return score * torch.log(q_idx + 3.0)
