"""One row after the other: gate ours, then time everyone in one interleaved race."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from bench.environment import clocks, describe
from bench.inputs import Inputs, check, make
from bench.peers import OURS, Ready, Refusal, call_of
from bench.results import Gate, Report, RowResult
from bench.table import BAR
from bench.time_limit import SECONDS, time_limit
from flexattn.measure.timing import Samples, time_interleaved
from flexattn.verify.gate import E4M3_SHARE


class Uncounted:
    """A row whose operations and bytes are not counted."""

    flops, kv_bytes = 0.0, 0


ROOT = Path(__file__).resolve().parent.parent
HOST_CALLS = 200  # below the launches that a driver queues, so that a call never waits for the GPU


@dataclass(frozen=True)
class Method:
    """The timing of rows; a part of the report, the same for all rows of one table.

    clock: "host" times the host's part of a call, in bursts that never wait for the GPU.
    """

    rounds: int = 20
    min_ms: float = 10.0
    flush_l2: bool = False
    graph: bool = False
    clock: Literal["cuda", "cpu", "host"] = "cuda"
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def facts(self) -> dict[str, object]:
        """The method in a form that JSON keeps."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def host_bursts(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Samples]:
    """Mean host time of a call in microseconds, for each of `rounds` bursts of all in turns."""
    us: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(HOST_CALLS):
                call()
            spent = (time.perf_counter_ns() - begin) / HOST_CALLS / 1e3
            us[name] += [spent] * (turn > 0)  # the first burst fills every cache
    return {name: Samples(tuple(found), calls=HOST_CALLS) for name, found in us.items()}


def timed(calls: Mapping[str, Any], inputs: Any, method: Method) -> dict[str, Samples]:
    """All calls interleaved, as the method says."""
    if method.clock == "host":
        return host_bursts(calls, method.rounds)
    return time_interleaved(
        calls, rounds=method.rounds, min_ms=method.min_ms, flush_l2=method.flush_l2,
        graph=method.graph, clock=method.clock,
    )  # fmt: skip


Race: TypeAlias = Callable[[Mapping[str, Any], Any, Method], dict[str, Samples]]


def in_turns(us_of: Callable[[Any], float]) -> Race:
    """A race of calls in turns, so that a machine that warms up warms up for all of them.

    us_of: the microseconds of one call, which it makes.
    """

    def race(calls: Mapping[str, Any], inputs: Any, method: Method) -> dict[str, Samples]:
        rounds = [[us_of(call) for call in calls.values()] for _ in range(method.rounds)]
        taken = zip(calls, zip(*rounds, strict=True), strict=True)
        return {name: Samples(us, calls=1) for name, us in taken}

    return race


def wall_us(call: Callable[[], Any]) -> float:
    """Microseconds until the GPU has ended a call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


def fresh(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The answer of a fresh process of a module, a line of JSON, without this one's settings.

    Raises RuntimeError if it failed.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLEXATTN_")}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=kept | environment, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=2 * SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def no_memory(call: Any, inputs: Any) -> int:
    """Bytes at a call's peak: not measured."""
    return 0


@dataclass(frozen=True)
class Kind:
    """The properties that rows of one kind share.

    make: inputs of a row. prepare: the call that is timed, of a peer and inputs. judge: the gate
    of a call of ours. work: operations of a row. grad: whether calls are differentiated.
    memory: bytes at the peak of a call that passed, 0 where nobody measures them; bar: the most
    that they may be, under the name BAR. race: samples of the calls on a row's inputs.
    """

    make: Callable[[Any, Method], Any]
    judge: Callable[[Callable[[], Any], Any], Gate]
    prepare: Callable[[Any, Any], Callable[[], Any] | Refusal] = call_of
    work: Callable[[Any], float] = lambda row: row.flops
    grad: bool = False
    memory: Callable[[Any, Any], int] = no_memory
    bar: Callable[[Any], int] = lambda inputs: 0
    race: Race = timed


def _judged(call: Callable[[], Tensor], x: Inputs) -> Gate:
    poison(x.q)
    eight = isinstance(call, Ready) and call.e4m3_weights
    return Gate.of(check(call(), x, E4M3_SHARE if eight else None))


FORWARD = Kind(lambda row, method: make(row, method.device, method.dtype), _judged)


def run(
    bench: str,
    rows: Iterable[Any],
    peers: Mapping[str, Any],
    method: Method,
    each: Callable[[Report, float], None] = lambda report, seconds: None,
    kind: Kind = FORWARD,
    seconds: float = math.inf,
) -> Report:
    """Run all rows. `each` sees the report so far, and the last row's seconds, after each row.

    A row that takes ten minutes ends the process. seconds: after which no row begins.
    """
    report = Report(bench, method.facts(), (describe(),), ())
    until = time.perf_counter() + seconds
    for row in rows:
        begin = time.perf_counter()
        if begin > until:
            break
        with time_limit():
            result = run_row(row, peers, method, kind)
        report = Report(bench, report.method, report.environments, (*report.rows, result))
        each(report, time.perf_counter() - begin)
    return report


def run_row(row: Any, peers: Mapping[str, Any], method: Method, kind: Kind = FORWARD) -> RowResult:
    """Gate ours, and time nobody if the plain call is red; a red variant alone is left out."""
    inputs = kind.make(row, method)
    calls: dict[str, Callable[[], Any]] = {}
    gates: dict[str, Gate] = {}
    refused: dict[str, str] = {}
    memory: dict[str, int] = {}
    samples: dict[str, Samples] = {}
    with torch.set_grad_enabled(kind.grad):
        for name, peer in peers.items():
            call = _prepared(kind, peer, inputs)
            if isinstance(call, Refusal):
                refused[name] = call.reason
                continue
            if name.startswith(OURS):
                gates[name] = kind.judge(call, inputs)
                if not gates[name].passed:
                    refused[name] = "the accuracy gate is red"
                    continue
            calls[name] = call
            if peak := kind.memory(call, inputs):
                memory[name] = peak
        if OURS in gates and not gates[OURS].passed:
            refused |= dict.fromkeys(calls, f"{OURS} is red in this row")
        else:
            samples = kind.race(calls, inputs, method)
    if memory:
        memory[BAR] = kind.bar(inputs)
    now, work = clocks(), kind.work(row)
    del calls, inputs
    forget(method)
    return RowResult(
        row.name, row.group, work, row.kv_bytes, gates, samples, refused, clocks=now,
        memory=memory,
    )  # fmt: skip


def prepare(rows: Iterable[Any], peers: Mapping[str, Any], method: Method, kind: Kind) -> None:
    """Call ours once on each row, which compiles its kernels; what raises is left to the run."""
    for row in rows:
        with time_limit(), suppress(Exception), torch.set_grad_enabled(kind.grad):
            inputs = kind.make(row, method)
            for name, peer in peers.items():
                if name.startswith(OURS):
                    _prepared(kind, peer, inputs)
        inputs = None
        forget(method)


def profile(rows: Iterable[Any], peers: Mapping[str, Any], method: Method, kind: Kind) -> None:
    """Call each peer on each row once between a profiler's marks, after a call that warms up."""
    marks: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for row in rows:
        inputs = kind.make(row, method)
        for peer in peers.values():
            with torch.set_grad_enabled(kind.grad):
                call = _prepared(kind, peer, inputs)
                if not isinstance(call, Refusal):
                    marks.cudaProfilerStart()
                    call()
                    torch.cuda.synchronize()
                    marks.cudaProfilerStop()


def _prepared(kind: Kind, peer: Any, inputs: Any) -> Callable[[], Any] | Refusal:
    """The peer's callable after a first call, which compiles; a peer that raises has refused."""
    try:
        call = kind.prepare(peer, inputs)
        if not isinstance(call, Refusal):
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return call
    except Exception as error:
        return Refusal.of(error)


def poison(*like: Tensor) -> None:
    """Leave NaN in the blocks that the allocator hands out next: unwritten output then shows."""
    blocks = [torch.full_like(each, float("nan")) for each in like]
    del blocks


def forget(method: Method) -> None:
    """Without this, torch's compiled functions and the row's tensors outlive the row."""
    if method.clock != "cpu":
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
