"""The accuracy gate of a bench row: the oracle on slices of a shape too large to judge whole."""

from __future__ import annotations

from torch import Tensor

from bench.inputs import Inputs
from flexattn.verify.gate import Verdict
from flexattn.verify.oracle import Slices

__all__ = ["judge_slices"]


def judge_slices(out: Tensor, x: Inputs) -> Verdict:
    """Judge `out` at the first, middle and last query rows of three heads; the worst counts."""
    return Slices.of(x.q, x.k, x.v, x.score_mod, x.mask_mod, descales=x.descales).judge(out)
