"""What a call costs the host, in microseconds: many calls, and no wait for the GPU.

Repeated calls, and those of a cache that grows: each of another number of keys, which ours has not
seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from bench.environment import describe
from bench.inputs import Inputs, make
from bench.peers import OURS, Peer, Refusal, ours, sdpa, torch_flex_compiled
from bench.results import Report, RowResult
from bench.rows import Row
from bench.runner import Method
from bench.shapes import MODELS, Shape
from flexattn.frontend.launch_cache import launch_cache
from flexattn.measure.timing import Samples

__all__ = ["forget_lengths", "growing", "host_cost", "host_report"]

CALLS = 200  # below the launches that a driver queues, so that a call never waits for the GPU
# Sizes that the GPU is done with sooner than the host: decode, then prefill with more to look at.
SHORT = Shape(1, 16, 16, 512, 512, 128)
ROWS = (
    Row("host-decode", "grid", MODELS["llama3-8b"].decode(1, 512)),
    Row("host-plain", "grid", SHORT),
    Row("host-causal", "grid", SHORT, "causal"),
    Row("host-causal-captured", "mods", SHORT, "causal", "alibi"),
)
# Of so many keys first, all of one power of two.
GROWING, FIRST = Row("host-growing", "grid", MODELS["llama3-8b"].decode(1, 512)), 257
PEERS = {OURS: ours, "torch-sdpa": sdpa(None), "torch-flex": torch_flex_compiled(None)}


def host_cost(call: Callable[[], object], rounds: int) -> Samples:
    """Mean host time of one call, for each of `rounds` bursts."""
    us = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        us.append((time.perf_counter_ns() - begin) / CALLS / 1e3)
    return Samples(tuple(us), calls=CALLS)


def host_report(method: Method) -> Report:
    """Ours, SDPA and compiled flex_attention in turns on ROWS; the first two on GROWING too."""
    rows = tuple(_row(row, method) for row in ROWS)
    grown = {name: peer for name, peer in PEERS.items() if name != "torch-flex"}
    grown = {name: growing(peer) for name, peer in grown.items()}
    rows += (_row(GROWING, method, grown),)
    return Report("host", method.facts(), (describe(),), rows)


def growing(peer: Peer) -> Peer:
    """A peer whose calls have a key more each, CALLS of them; then it begins anew."""

    def build(inputs: Inputs) -> Callable[[], Tensor]:
        calls = []
        for keys in range(FIRST, FIRST + CALLS):
            k, v = inputs.k[:, :, :keys], inputs.v[:, :, :keys]
            shape = replace(inputs.row.shape, kv_len=keys)
            calls.append(peer(replace(inputs, row=replace(inputs.row, shape=shape), k=k, v=v)))
        turns = cycle(enumerate(calls))

        def call() -> Tensor:
            index, of_length = next(turns)
            if not index:
                forget_lengths()
            return of_length()  # type: ignore[operator, no-any-return]

        return call

    return build


def forget_lengths() -> None:
    """Forget the launches of all lengths; kernels stay, and what their calls have in common."""
    launch_cache.forget_lengths()


def _row(row: Row, method: Method, peers: Mapping[str, Peer] = PEERS) -> RowResult:
    inputs = make(row, method.device, method.dtype)
    calls: dict[str, Callable[[], Tensor]] = {}
    bursts: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    with torch.no_grad():
        for name, peer in peers.items():
            call = peer(inputs)
            if isinstance(call, Refusal):
                refused[name] = call.reason
                continue
            calls[name], bursts[name] = call, []
            host_cost(call, 2)  # compiles, and fills every cache
        for _ in range(method.rounds):
            for name in calls:
                bursts[name] += host_cost(calls[name], 1).us
    samples = {name: Samples(tuple(us), calls=CALLS) for name, us in bursts.items()}
    return RowResult(row.name, row.group, row.flops, row.kv_bytes, {}, samples, refused)
