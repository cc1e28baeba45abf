"""Calls with dropout: what can serve them, and when their seed is drawn."""

from __future__ import annotations

from flexattn.errors import UnsupportedError
from flexattn.frontend.call import Call
from flexattn.problem import FP8


def check_kernels_drop(call: Call) -> None:
    """That kernels can drop weights of a call; raises UnsupportedError where none can."""
    got = f"dropout_p={call.dropout_p} on {call.q.device}"
    why = ""
    if call.q.dtype in FP8:
        why = "dropout is for training, and float8 has no backward"
    elif call.options.kind == "decode":
        why = "kernel_options ask for split-KV decode, and prefill alone drops weights"
    if why:
        raise UnsupportedError(got, why, "leave one of them out")


def without_torch(call: Call, why: str) -> UnsupportedError:
    """The error of a call that only torch's flex_attention could differentiate."""
    return UnsupportedError(
        f"dropout_p={call.dropout_p}, and {why}",
        "torch's flex_attention, which would differentiate the call, has no dropout",
        "pass dropout_p=0.0, or write the score_mod without it",
    )


def drawn(call: Call) -> Call:
    """The call with a seed, where it drops weights: once, when it is run."""
    if call.dropout is None:
        return call
    return call._replace(dropout=call.dropout.drawn(call.q.device))
