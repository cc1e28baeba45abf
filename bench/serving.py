"""`python -m bench.serving`: paged and ragged decoding, graph replays from a cold L2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.chunks import chunk_rows
from bench.command import main, parse_config
from bench.random_draw import random_rows
from bench.results import Gate
from bench.runner import Kind, Method
from bench.serving_inputs import Served, check_requests, make_served
from bench.serving_peers import SERVING_PEERS, ServingPeer, served_with
from bench.serving_rows import serving_rows

METHOD = Method(rounds=20, min_ms=5.0, flush_l2=True, graph=True)


def _judge(call: Callable[[], Tensor], x: Served) -> Gate:
    """A plan's output is its own: what a run does not write stays NaN."""
    call().fill_(torch.nan)
    return Gate.of(check_requests(call(), x))


SERVING = Kind(
    lambda row, method: make_served(row, method.device), _judge, lambda peer, x: peer(x),
    work=lambda row: 0.0,
)  # fmt: skip


def variant(text: str) -> ServingPeer:
    """Ours with these fields of its config; batch_invariant=1.

    own.FIELD: of a cascade's second pass; prefill.FIELD: of the kernel of prefills, or
    a number of its rules, as prefill._CUT_FROM.
    """
    changes = parse_config(text)
    return served_with(changes, bool(changes.pop("batch_invariant", 0)))


run = partial(
    main, "decode", [*serving_rows(), *random_rows("paged"), *chunk_rows()], METHOD,
    known=SERVING_PEERS, variant=variant, kind=SERVING,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run())
