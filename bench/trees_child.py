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
import math
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.inputs import E4M3, Inputs, check, check_gradients, make
from bench.rows import Row
from bench.serving_inputs import check_requests, make_served, planned
from bench.serving_rows import ServingRow
from bench.trees_rows import AppendRow, RaceRow, race_row

# Of one request, which may compile for minutes.
SECONDS = 600
MIN_FLUSH_BYTES, LEAD_CYCLES = 128 << 20, 400_000
# An idle GPU lowers its clocks, and takes a while of work to raise them again.
IDLE_SECONDS, WARM_SECONDS = 0.5, 0.1
cuda: Any = torch.cuda  # its streams, events and graphs carry no types


class Case(NamedTuple):
    """A call to time, and a check that returns in words what is wrong with its results."""

    call: Callable[[], Any]
    check: Callable[[], str]


def case_of(row: RaceRow, device: str) -> Case:
    """The case of a row that is not of a fresh process."""
    if isinstance(row.of, Row):
        return call_case(row, make(row.of, device))
    return (
        plan_case(row, device) if isinstance(row.of, ServingRow) else append_case(row.of, device)
    )


def call_case(row: RaceRow, x: Inputs) -> Case:
    """A call of flex_attention, or its gradients by one backward of a forward that is kept."""
    from flexattn import flex_attention

    q, k, v = x.tensors
    about = x.arguments()
    if row.invariant:
        about["kernel_options"] = {"BATCH_INVARIANT": True}
    if row.backward:
        leaves = [*(each.requires_grad_() for each in x.tensors), *x.learned]
        with torch.enable_grad():
            out = flex_attention(q, k, v, **about)
        dout = torch.randn_like(out)

        def call() -> Any:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return Case(call, lambda: check_gradients(call(), dout, x))

    def check_call() -> str:
        torch.full_like(q, math.nan, dtype=x.dtype)  # the allocator hands it out next
        out = flex_attention(q, k, v, **about)
        found = check(out, x)
        if row.invariant:
            alone = flex_attention(q[:1], k[:1], v[:1], **about)
            found += "" if torch.equal(alone, out[:1]) else "bits follow the batch; "
        return found

    if row.grows:
        lengths = cycle(range(row.grows, k.shape[2] + 1))

        def growing() -> Tensor:
            keys = next(lengths)
            return flex_attention(q, k[:, :, :keys], v[:, :, :keys], **about)

        return Case(growing, check_call)
    return Case(lambda: flex_attention(q, k, v, **about), check_call)


def plan_case(row: RaceRow, device: str) -> Case:
    """A plan's run."""
    assert isinstance(row.of, ServingRow)
    x = make_served(row.of, device)
    run = planned(x, invariant=row.invariant)

    def check_plan() -> str:
        if x.row.shares:
            return check_requests(run(), x)
        shape = *x.q.shape[:-1], x.row.dv
        out = torch.full(shape, math.nan, device=device, dtype=x.q.dtype)
        run(out=out)
        found = check_requests(out, x)
        if row.invariant:
            one = {"seq_lens": x.lens[:1], "block_table": None if x.table is None else x.table[:1]}
            alone = run.func(x.q[:1], *run.args[1:], **run.keywords | one)
            found += "" if torch.equal(alone[:1], out[:1]) else "bits follow the batch; "
        return found

    return Case(run, check_plan)


def append_case(x: AppendRow, device: str) -> Case:
    """An AppendPlan's run: new tokens of bfloat16 into pages in random order."""
    from flexattn import serving

    k, v = (torch.randn(x.tokens, x.hkv, x.d, device=device).bfloat16() for _ in "kv")
    pages = 4 * -(-x.tokens // x.page)
    dtype = E4M3 if x.scaled else torch.bfloat16
    caches = tuple(torch.zeros(pages, x.page, x.hkv, x.d, device=device).to(dtype) for _ in "kv")
    slots = torch.randperm(pages * x.page, generator=torch.Generator().manual_seed(1))
    slots = slots[: x.tokens].to(device)
    call: dict[str, Any] = {"slot_mapping": slots}
    scaled: Any = x.scaled if x.scaled == "token_head" else bool(x.scaled)
    if x.scaled:
        shape = (pages, x.page, x.hkv) if scaled == "token_head" else (1,)
        call |= {name: torch.full(shape, 0.5, device=device) for name in ("k_scale", "v_scale")}
    if x.rope:
        call["positions"] = torch.arange(x.tokens, device=device)
    plan = serving.AppendPlan(
        heads=x.hkv, head_dim=x.d, page_size=x.page, kv_dtype=dtype, scaled=scaled, device=device,
        rope=serving.Rope(x.d, base=1e4) if x.rope else None,
    )  # fmt: skip

    def check_append() -> str:
        plan.run(k, v, caches, **call)
        found = ""
        for name, new, cache in zip("kv", (k.double(), v.double()), caches, strict=True):
            if x.rope and name == "k":
                half = torch.arange(0, x.d, 2, device=device).double() / x.d
                turn = call["positions"][:, None, None].double() * 1e4**-half
                a, b = new.chunk(2, -1)
                new = torch.cat(
                    [a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1
                )
            stored = cache.flatten(0, 1)[slots].double()
            scale = 1.0
            if x.scaled:
                scale = call[f"{name}_scale"]
                scale = scale.flatten(0, 1)[slots, :, None] if scaled == "token_head" else scale
            error = (stored * scale - new).abs()
            # Half a step of e4m3, and float32's of an angle as large as the last position.
            angle = x.tokens * 2**-23 * new.abs().amax(-1, keepdim=True) if x.rope else 0.0
            if not bool((error <= new.abs() * 2**-4 + scale * 2**-9 + angle).all()):
                found += f"{name}: stored numbers are off by {float(error.max()):.3e}; "
        return found

    return Case(lambda: plan.run(k, v, caches, **call), check_append)


def process_case(row: RaceRow, device: str) -> Case:
    """A fresh process whose import or first call is timed, from disk caches that are warm."""

    def call() -> float:
        command = [sys.executable, "-P", "-m", "bench.trees_child", device]
        done = subprocess.run(
            [*command, json.dumps(asdict(row))], capture_output=True, text=True, check=False,
            timeout=SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return float(done.stdout.split()[-1])

    def check_process() -> str:
        call()  # fills the caches on disk
        return ""

    return Case(call, check_process)


def once(device: str, row: RaceRow) -> float:
    """Microseconds of the first call or the import of a row, in this process."""
    if row.first == "import":
        begin = time.perf_counter()
        import flexattn

        _ = flexattn.flex_attention, flexattn.create_block_mask
        return (time.perf_counter() - begin) * 1e6
    from flexattn import flex_attention, serving

    _ = flex_attention, serving
    torch.randn(64, device=device, dtype=torch.bfloat16)
    synchronize(device)
    begin = time.perf_counter()
    with torch.no_grad():
        case_of(row, device).call()
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
        self.case: Case | None = None  # a graph's replays read the tensors of its call
        self.sample: Any = None

    def build(self, row: RaceRow) -> dict[str, Any]:
        """Build the row's call, check what it computes, warm it up."""
        self.case = self.sample = None
        gc.collect()
        if self.device != "cpu":
            cuda.empty_cache()
        torch.manual_seed(zlib.crc32(row.name.encode()))
        self.case = (process_case if row.first else case_of)(row, self.device)
        found = self.case.check()
        if not found:
            self.sample = self.clock.prepare(self.case.call, row.clock)
        return {"wrong": found}

    def answer(self, line: dict[str, Any]) -> dict[str, Any]:
        """The answer to the parent."""
        if "about" in line:
            return about(self.device)
        if "calls" in line:
            return {"us": self.sample(line["calls"])}
        return self.build(race_row(line["row"]))


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
        print(once(sys.argv[1], race_row(json.loads(sys.argv[2]))))
    else:
        main(sys.argv[1])
