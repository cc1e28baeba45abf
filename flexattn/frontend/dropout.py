"""Calls with dropout: what can serve them, and when their seed is drawn."""

from __future__ import annotations

from flexattn.errors import UnsupportedError
from flexattn.frontend.call import Call
from flexattn.problem import FP8
from flexattn.settings import current


def check_dropout(call: Call, wants: str) -> None:
    """That kernels can drop weights of a call; raises UnsupportedError where none can.

    wants: the name of what requires grad, or nothing.
    """
    got = f"dropout_p={call.dropout_p} on {call.q.device}"
    needed = ["backward", "dropout"] if wants else ["dropout"]
    if call.q.is_cuda and not current().experimental.issuperset(needed):
        raise UnsupportedError(
            got,
            "this library's dropout has not run on a GPU yet, and torch's flex_attention has none",
            f"set FLEXATTN_EXPERIMENTAL={','.join(needed)}, or pass dropout_p=0.0",
        )
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
