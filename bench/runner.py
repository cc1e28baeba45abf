"""One row after the other: gate ours, then time everyone in one interleaved race."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bench.environment import clocks, describe
from bench.inputs import Inputs, make
from bench.oracle import judge_slices
from bench.peers import OURS, Peer, Refusal
from bench.results import Gate, Report, RowResult
from bench.rows import Row
from bench.time_limit import time_limit
from flexattn.measure.timing import Samples, time_interleaved

__all__ = ["Method", "forget", "run", "run_row"]


@dataclass(frozen=True)
class Method:
    """How rows are timed; part of the report, and equal for all rows of one table."""

    rounds: int = 20
    min_ms: float = 10.0
    flush_l2: bool = False
    graph: bool = False
    clock: Literal["cuda", "cpu"] = "cuda"
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def facts(self) -> dict[str, object]:
        """The method in a form that JSON keeps."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def run(
    bench: str,
    rows: Iterable[Row],
    peers: Mapping[str, Any],
    method: Method,
    each: Callable[[Report, float], None] = lambda report, seconds: None,
    one: Callable[..., RowResult] = lambda *given: run_row(*given),
    seconds: float = math.inf,
) -> Report:
    """Run all rows. `each` sees the report so far, and the last row's seconds, after each row.

    one: what runs a row; one that takes ten minutes ends the process. seconds: after which no row
    begins.
    """
    report = Report(bench, method.facts(), (describe(),), ())
    until = time.perf_counter() + seconds
    for row in rows:
        begin = time.perf_counter()
        if begin > until:
            break
        with time_limit():
            result = one(row, peers, method)
        report = Report(bench, report.method, report.environments, (*report.rows, result))
        each(report, time.perf_counter() - begin)
    return report


def run_row(row: Row, peers: Mapping[str, Peer], method: Method) -> RowResult:
    """Gate ours, and time nobody if the plain call is red; a red variant alone is left out."""
    inputs = make(row, method.device, method.dtype)
    calls: dict[str, Callable[[], Tensor]] = {}
    gates: dict[str, Gate] = {}
    refused: dict[str, str] = {}
    with torch.no_grad():
        for name, peer in peers.items():
            call = _prepared(peer, inputs)
            if isinstance(call, Refusal):
                refused[name] = call.reason
                continue
            if _is_ours(name):
                _poison(inputs.q)
                gates[name] = Gate.of(judge_slices(call(), inputs))
                if not gates[name].passed:
                    refused[name] = "the accuracy gate is red"
                    continue
            calls[name] = call
        samples: dict[str, Samples] = {}
        if OURS in gates and not gates[OURS].passed:
            refused |= dict.fromkeys(calls, f"{OURS} is red in this row")
        else:
            samples = time_interleaved(
                calls,
                rounds=method.rounds,
                min_ms=method.min_ms,
                flush_l2=method.flush_l2,
                graph=method.graph,
                clock=method.clock,
            )
    now = clocks()
    del calls, inputs
    forget(method)
    return RowResult(
        row.name, row.group, row.flops, row.kv_bytes, gates, samples, refused, clocks=now
    )


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _prepared(peer: Peer, inputs: Inputs) -> Callable[[], Tensor] | Refusal:
    """The peer's callable after a first call, which compiles; a peer that raises has refused."""
    try:
        call = peer(inputs)
        if not isinstance(call, Refusal):
            call()
            if inputs.q.is_cuda:
                torch.cuda.synchronize()
        return call
    except Exception as error:
        return Refusal.of(error)


def _poison(like: Tensor) -> None:
    """Leave NaN in the block that the allocator hands out next: unwritten output then shows."""
    torch.full_like(like, float("nan"))


def forget(method: Method) -> None:
    """Without this, torch's compiled functions and the row's tensors outlive the row."""
    if method.clock == "cuda":
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
