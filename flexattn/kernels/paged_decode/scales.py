"""Scales of a cache's single pages, tokens or heads: what a kernel takes and knows for them.

A scale of the whole cache, or one for each head, is taken into the softmax's scale and into the
output (`ServingForm.scaled`). Finer ones multiply scores and weights in the loop over tiles.
"""

from __future__ import annotations

from flexattn.kernels.base.arguments import Argument
from flexattn.problem.serving import ServingForm

# A row's weights reach to twice ROOM: below 65504, and far above the smallest float16 numbers.
ROOM = 2.0**14
# Weights are in units of at least so much: its inverse times ROOM is a float32 number.
LEAST_WEIGHT = 2.0**-110


def scale_arguments(form: ServingForm) -> list[Argument]:
    """Both tensors of scales, and the steps between pages (or requests), tokens and heads."""
    if not form.scales:
        return []
    axes = "p" + "n" * by_token(form) + "h" * by_head(form)
    tensors = [Argument(name, "*fp32", 4) for name in ("K_SCALE", "V_SCALE")]
    return tensors + [Argument(f"stride_s{axis}", "u32") for axis in axes]


def scale_context(form: ServingForm) -> dict[str, object]:
    """What templates know of them."""
    return {
        "scales": form.scales,
        "scale_by_token": by_token(form),
        "scale_by_head": by_head(form),
    }


def scale_constants(form: ServingForm) -> dict[str, float]:
    """Constants of a kernel that has them."""
    return {"ROOM": ROOM, "LEAST_WEIGHT": LEAST_WEIGHT} if form.scales else {}


def by_token(form: ServingForm) -> bool:
    """Whether the tokens of a page have scales of their own."""
    return form.scales in ("token", "token_head")


def by_head(form: ServingForm) -> bool:
    """Whether heads have scales of their own."""
    return form.scales in ("page_head", "token_head")
