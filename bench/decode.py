"""`python -m bench.decode`: one query token, GPU time of graph replays from a cold L2, in TB/s.

`--host --rows '^host'` times the host's part of repeated calls, and of a cache that grows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

from torch import Tensor

from bench.command import main
from bench.inputs import Inputs
from bench.peers import PEERS, TEMPLATES, Peer, Ready, Refusal, call_of, sdpa
from bench.random_draw import random_rows
from bench.rows import decode_rows, host_rows
from bench.runner import Method

METHOD = Method(rounds=20, min_ms=5.0, flush_l2=True, graph=True)
# The keys of its first call; in each later one there is a key more, up to the row's.
GROWING, FIRST = "host-growing", 4097


def growing(peer: Peer) -> Peer:
    """A peer whose calls have a key more each in the row of a cache that grows."""

    def build(x: Inputs) -> Ready | Refusal:
        if x.row.name != GROWING:
            return peer(x)
        calls: list[Callable[[], Tensor]] = []
        for keys in range(min(FIRST, x.row.shape.kv_len), x.row.shape.kv_len + 1):
            row = replace(x.row, shape=replace(x.row.shape, kv_len=keys))
            call = call_of(peer, replace(x, row=row, k=x.k[:, :, :keys], v=x.v[:, :, :keys]))
            if isinstance(call, Refusal):
                return call
            calls.append(call)
        turns = cycle(calls)
        return Ready(lambda: next(turns)(), ())

    return build


if __name__ == "__main__":
    known = {name: growing(peer) for name, peer in PEERS.items()}
    named = {**TEMPLATES, "torch-sdpa": growing(sdpa(None))}
    rows = [*decode_rows(), *host_rows(), *random_rows("decode")]
    sys.exit(main("decode", rows, METHOD, known=known, named=named))
