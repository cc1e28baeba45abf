"""One checkout's side of `bench.trees`: builds a row's call, checks what it computes, times it.

The same files serve every checkout: this one and those it imports from bench need torch and
flexattn's public names alone. A line of JSON comes in, a line goes out: `{"row"}` builds a row and
answers with what is wrong with its results ("" where nothing is), `{"calls"}` answers microseconds
per call, `{"about"}` what this side is.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.trees_calls import Case, call_case
from bench.trees_plans import append_case, plan_case

# Of one request, which may compile for minutes.
SECONDS = 600
MIN_FLUSH_BYTES, LEAD_CYCLES = 128 << 20, 400_000
# An idle GPU lowers its clocks, and takes a while of work to raise them again.
IDLE_SECONDS, WARM_SECONDS = 0.5, 0.1
cuda: Any = torch.cuda  # its streams, events and graphs carry no types


def process_case(row: dict[str, Any], device: str) -> Case:
    """A fresh process whose import or first call is timed, from disk caches that are warm."""

    def call() -> float:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bench.trees_child", device, json.dumps(row)],
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return float(done.stdout.split()[-1])

    def check() -> str:
        call()  # fills the caches on disk
        return ""

    return Case(call, check)


def once(device: str, row: dict[str, Any]) -> float:
    """Microseconds of what a row of kind process says, in this process."""
    if row["what"] == "import":
        begin = time.perf_counter()
        import flexattn

        _ = flexattn.flex_attention, flexattn.create_block_mask
        return (time.perf_counter() - begin) * 1e6
    from flexattn import flex_attention, serving

    _ = flex_attention, serving
    torch.randn(64, device=device, dtype=torch.bfloat16)
    synchronize(device)
    x = SimpleNamespace(**row)
    begin = time.perf_counter()
    with torch.no_grad():
        case = plan_case(x, device) if "lens" in row else call_case(x, device)
        case.call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        cuda.synchronize()


class Clock:
    """Times a call as its row says: eager calls, graph replays from a cold L2, or the host."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.flush: Tensor | None = None
        self.last = -IDLE_SECONDS

    def prepare(self, call: Callable[[], Any], clock: str) -> Callable[[int], float]:
        """A function that gives mean microseconds of so many calls."""
        if clock == "process":
            return lambda calls: sum(call() for _ in range(calls)) / calls
        for _ in range(3 if self.device != "cpu" else 1):
            call()
        synchronize(self.device)
        if clock == "host" or self.device == "cpu":
            return lambda calls: self._host(call, calls)
        if clock == "eager":
            return lambda calls: self._events(call, calls, False)
        if self.flush is None:
            size = cuda.get_device_properties(0).L2_cache_size
            self.flush = torch.zeros(max(4 * size, MIN_FLUSH_BYTES) // 4, device=self.device)
        side = cuda.Stream()  # a capture needs a warm-up outside of the default stream
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            call()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        return lambda calls: self._events(graph.replay, calls, True)

    def _host(self, call: Callable[[], Any], calls: int) -> float:
        synchronize(self.device)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})  # both sides on one core: others may be half as fast
        try:
            begin = time.perf_counter_ns()
            for _ in range(calls):
                call()
            return (time.perf_counter_ns() - begin) / calls / 1e3
        finally:
            os.sched_setaffinity(0, cores)

    def _events(self, call: Callable[[], Any], calls: int, cold: bool) -> float:
        """Events around all calls; cold: around each one, behind a read of other memory."""
        begin = time.monotonic()
        if begin - self.last > IDLE_SECONDS:
            x = torch.zeros(4096, 4096, dtype=torch.float16, device=self.device)
            while time.monotonic() - begin < WARM_SECONDS:
                x @ x
                cuda.synchronize()
        pairs = calls if cold else 1
        events = [[cuda.Event(enable_timing=True) for _ in "be"] for _ in range(pairs)]
        cuda.synchronize()
        # The GPU waits while the host queues the first calls: their launches are not its time.
        cuda._sleep(LEAD_CYCLES)
        for begin_event, end_event in events:
            if cold and self.flush is not None:
                self.flush.amax(0)
            begin_event.record()
            for _ in range(calls // pairs):
                call()
            end_event.record()
        cuda.synchronize()
        self.last = time.monotonic()
        return float(sum(a.elapsed_time(b) for a, b in events) / calls * 1e3)


def digest(root: Path) -> Iterator[bytes]:
    """A hash of a side's code, templates and records, on which its times depend."""
    for folder in ("flexattn", "templates", "configs"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(root)).encode() + path.read_bytes()


def about(device: str) -> dict[str, str]:
    """Versions, device, and which code this side is."""
    import flexattn

    root = Path(str(flexattn.__file__)).parent.parent
    if root != Path.cwd():
        raise RuntimeError(f"flexattn was imported from {root}, and this side is {Path.cwd()}")
    found = hashlib.sha256()
    for part in digest(root):
        found.update(part)
    facts = {"code": found.hexdigest()[:16], "torch": torch.__version__, "device": device}
    facts["flexattn"] = flexattn.__version__
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        pass
    if device != "cpu":
        facts |= {"device": cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
    return facts


class Side:
    """The row that is built now."""

    def __init__(self, device: str) -> None:
        self.device, self.clock = device, Clock(device)
        self.sample: Any = None

    def build(self, row: dict[str, Any]) -> dict[str, Any]:
        """Build the row's call, check what it computes, warm it up."""
        self.sample = None
        gc.collect()
        if self.device != "cpu":
            cuda.empty_cache()
        torch.manual_seed(zlib.crc32(row["name"].encode()))
        kinds = {"call": call_case, "plan": plan_case, "append": append_case}
        x = SimpleNamespace(**row)
        process = row["kind"] == "process"
        case = process_case(row, self.device) if process else kinds[row["kind"]](x, self.device)
        found = case.check()
        if not found:
            self.sample = self.clock.prepare(case.call, row["clock"])
        return {"wrong": found}

    def answer(self, line: dict[str, Any]) -> dict[str, Any]:
        """The answer to the parent."""
        if "about" in line:
            return about(self.device)
        return {"us": self.sample(line["calls"])} if "calls" in line else self.build(line["row"])


def main(device: str) -> None:
    """Answer lines until the input ends."""
    side = Side(device)
    answers, sys.stdout = sys.stdout, sys.stderr
    with torch.no_grad():
        for line in sys.stdin:
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
            try:
                found = side.answer(json.loads(line))
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:600]}
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(once(sys.argv[1], json.loads(sys.argv[2])))
    else:
        main(sys.argv[1])
