"""Scores in base 2, as softmax has them, and back: texts of kernels.

A score beyond 2.36e38, like finfo(float32).min, times log2(e) is none that float32 holds. Where
scores can be that far, what lies beyond 2^127 rises by half its own rise instead: no order
changes, weights of such scores are 0 or equal in any case, and all that is finite stays finite.
"""

from __future__ import annotations

# 2^127 (log2(e) - 1/2), as an odd multiple of 2^104: finfo.max comes back as a finite number.
_BEYOND = 1.6039124662230744e38
# What an infinite sink is: above all finite scores, and infinite again in the natural logarithm.
_LARGEST = 3.4028234663852886e38


def in_base_2(text: str, far: bool, tl: str = "tl") -> str:
    """A natural score in base 2; far: it may be beyond 2^127. Infinities and NaN stay."""
    if not far:
        return f"{text} * LOG2E"
    near = f"{tl}.maximum({text} * LOG2E, {text} * 0.5 - {_BEYOND})"
    return f"{tl}.minimum({near}, {text} * 0.5 + {_BEYOND})"


def natural(text: str, far: bool, tl: str = "tl") -> str:
    """The inverse."""
    if not far:
        return f"{text} * LN2"
    near = f"{tl}.maximum({text} * LN2, ({text} - {_BEYOND}) * 2.0)"
    return f"{tl}.minimum({near}, ({text} + {_BEYOND}) * 2.0)"


def finite(text: str, tl: str = "tl") -> str:
    """The nearest finite number."""
    return f"{tl}.minimum({tl}.maximum({text}, -{_LARGEST}), {_LARGEST})"


def sink_in_base_2(text: str, tl: str = "tl") -> str:
    """A sink's logit in base 2, finite where it is +inf."""
    return f"{tl}.minimum({in_base_2(text, True, tl)}, {_LARGEST})"
