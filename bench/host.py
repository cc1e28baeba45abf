"""Rows whose calls the GPU ends sooner than the host: what a call costs the host.

Repeated calls, and those of a cache that grows: each of another number of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

from torch import Tensor

from bench.inputs import Inputs
from bench.peers import Peer, Refusal
from bench.rows import Row
from bench.shapes import MODELS, Shape

__all__ = ["FIRST", "GROWING", "growing", "host_rows"]

SHORT = Shape(1, 16, 16, 512, 512, 128)
# The keys of its first call; in each later one there is a key more, up to the row's.
GROWING, FIRST = "host-growing", 4097


def host_rows() -> list[Row]:
    """Decode, then prefill with more to look at, then a cache that grows."""
    llama = MODELS["llama3-8b"]
    return [
        Row("host-decode", "host", llama.decode(1, 512)),
        Row("host-plain", "host", SHORT),
        Row("host-causal", "host", SHORT, "causal"),
        Row("host-causal-captured", "host", SHORT, "causal", "alibi"),
        Row(GROWING, "host", llama.decode(1, 8192)),
    ]


def growing(peer: Peer) -> Peer:
    """A peer whose calls have a key more each in the row of a cache that grows."""

    def build(x: Inputs) -> Callable[[], Tensor] | Refusal:
        if x.row.name != GROWING:
            return peer(x)
        calls: list[Callable[[], Tensor]] = []
        for keys in range(min(FIRST, x.row.shape.kv_len), x.row.shape.kv_len + 1):
            row = replace(x.row, shape=replace(x.row.shape, kv_len=keys))
            call = peer(replace(x, row=row, k=x.k[:, :, :keys], v=x.v[:, :, :keys]))
            if isinstance(call, Refusal):
                return call
            calls.append(call)
        turns = cycle(calls)
        return lambda: next(turns)()

    return build
