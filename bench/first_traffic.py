"""The longest stall of traffic after warm(), where nothing was tuned.

    python -m bench.first_traffic --out first_traffic.json --trace first_traffic.trace.json

Fresh processes with empty caches warm up as the manual tells a server to, then serve requests of
random lengths, each waited for: prompts, decoding by calls, and steps of a DecodePlan in turns.
One looks for records, as users' processes do, one has them off, and one is profiled: its trace
opens in chrome://tracing or Perfetto. A stall is a call's wall time, the GPU's work included.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexattn
from bench.environment import describe
from bench.results import write
from bench.runner import fresh
from bench.time_limit import time_limit
from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.base import source
from flexattn.mods.bind import stats
from flexattn.runtime.build import builder
from flexattn.serving import DecodePlan

# The longest stall that the warm-up may leave.
LIMIT_MS = 50.0
# What FLEXATTN_MODE is, by how a process is called in the results.
MODES = {"records looked for": "replay", "records off": "off"}
PROFILED = "profiled"
CAP = 30.0
# The slowest calls that are kept, with their sizes.
KEPT = 10


@dataclass(frozen=True)
class Sizes:
    """The sizes of the traffic.

    longest: keys of a prompt or request. batch: of a prompt, at most. requests: of a plan. warmed:
    the one length that warm() compiles for.
    """

    heads: tuple[int, int] = (24, 6)
    head_dim: int = 128
    longest: int = 8192
    batch: int = 4
    requests: int = 32
    page: int = 16
    window: int = 1000
    warmed: int = 2048
    dtype: torch.dtype = torch.bfloat16


SIZES = Sizes()


def workload(sizes: Sizes) -> dict[str, Any]:
    """The workload that a server of two kinds of layers hands to warm()."""
    window = {"mod": "flexattn.catalogue:sliding_window", "args": [sizes.window]}
    cap = {"mod": "flexattn.catalogue.scores:softcap", "args": [CAP]}
    shared = {"heads": list(sizes.heads), "head_dim": sizes.head_dim, "score": cap}
    prompt = {"name": "prompt", "q_len": sizes.warmed}
    decode = {"name": "decode", "mixes": [[sizes.batch, 1, sizes.warmed]]}
    return {
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "layers": [
            {**shared, "name": "global",
             "calls": [{**prompt, "mask": "flexattn.catalogue:causal"}, decode]},
            {**shared, "name": "local", "calls": [{**prompt, "mask": window}]},
        ],
    }  # fmt: skip


class Traffic:
    """Calls of random sizes on tensors that are there; making it makes the plan."""

    def __init__(self, sizes: Sizes, device: str, seed: int) -> None:
        self._sizes, self._device = sizes, device
        self._draw = random.Random(seed)
        (Hq, Hkv), D = sizes.heads, sizes.head_dim
        make = {"dtype": sizes.dtype, "device": device}
        rows = sizes.batch, sizes.longest
        self._q, self._k, self._v = (
            torch.randn(*rows, heads, D, **make) for heads in (Hq, Hkv, Hkv)
        )
        pages = sizes.requests * -(-sizes.longest // sizes.page) // 2
        self._cache = tuple(torch.randn(pages, sizes.page, Hkv, D, **make) for _ in "kv")
        self._step = torch.randn(sizes.requests, 1, Hq, D, **make)
        shape = (sizes.requests, -(-sizes.longest // sizes.page))
        self._table = torch.randint(0, pages, shape, device=device, dtype=torch.int32)
        self._plan = DecodePlan(
            batch=sizes.requests, kv_len=sizes.longest, heads=sizes.heads, head_dim=D,
            page_size=sizes.page, dtype=sizes.dtype, device=device, score_mod=softcap(CAP),
            mask_mod=sliding_window(sizes.window),
        )  # fmt: skip

    @property
    def origin(self) -> str:
        """The origin of the plan's config."""
        return self._plan.origin

    def requests(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """A request's calls after the other's, for ever: what each is called, and the call."""
        while True:
            B, keys = self._draw.randint(1, self._sizes.batch), self._length()
            for name, mod in (("causal", causal), ("window", sliding_window(self._sizes.window))):
                yield f"prompt {name} {B}x{keys}", lambda m=mod, b=B, n=keys: self._prompt(b, n, m)
            for _ in range(4):
                B, keys = self._draw.randint(1, self._sizes.batch), self._length()
                yield f"decode {B}x{keys}", lambda b=B, n=keys: self._attend(b, 1, n)
                requests = self._draw.randint(1, self._sizes.requests)
                lengths = [self._length() for _ in range(requests)]
                lens = torch.tensor(lengths, dtype=torch.int32, device=self._device)
                yield f"plan {requests} requests", lambda n=lens: self._decode(n)

    def _length(self) -> int:
        return round(self._sizes.longest ** self._draw.random())

    def _prompt(self, B: int, keys: int, mod: Any) -> object:
        mask = flexattn.create_block_mask(mod, None, None, keys, keys, self._device)
        return self._attend(B, keys, keys, mask)

    def _attend(self, B: int, rows: int, keys: int, mask: Any = None) -> object:
        q, k, v = (
            x[:B, :n].transpose(1, 2)
            for x, n in ((self._q, rows), (self._k, keys), (self._v, keys))
        )
        return flexattn.flex_attention(q, k, v, softcap(CAP), mask, enable_gqa=True)

    def _decode(self, lens: Tensor) -> object:
        count = len(lens)
        table = self._table[:count]
        return self._plan.run(self._step[:count], self._cache, seq_lens=lens, block_table=table)


@contextmanager
def counting() -> Iterator[Callable[[], Counter[str]]]:
    """Counts kernels compiled, mods traced and templates filled so far."""
    fill, filled = source.render_template, []

    def counted(*given: Any) -> str:
        filled.append(given)
        return fill(*given)

    source.render_template = counted
    try:
        yield lambda: Counter(
            compiled=builder().compiled, traced=stats().traces, filled=len(filled)
        )
    finally:
        source.render_template = fill


def run(
    sizes: Sizes = SIZES, device: str = "cuda", seconds: float = 5.0, seed: int = 0,
    trace: Path | None = None, most: int = 10**9,
) -> dict[str, Any]:  # fmt: skip
    """Warm up, then serve for some seconds, or `most` calls.

    trace: a file for Chrome's trace format. Returns figures of the calls' wall times in
    milliseconds by their kind, the slowest calls, and what the host did besides.
    """
    begin = time.perf_counter()
    compiled = flexattn.warm(workload(sizes), device)
    traffic = Traffic(sizes, device, seed)
    gc.freeze()
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    warmed = time.perf_counter() - begin
    found: list[tuple[float, float, str]] = []
    profiled: AbstractContextManager[Any] = nullcontext()
    if trace is not None:  # it starts before the traffic does
        profiled = torch.profiler.profile(
            on_trace_ready=lambda done: done.export_chrome_trace(str(trace))
        )
    with torch.no_grad(), profiled, counting() as counts:
        wait()
        before, modules = counts(), set(sys.modules)
        end = time.perf_counter() + seconds
        for name, call in traffic.requests():
            begin = time.perf_counter()
            if begin > end or len(found) == most:
                break
            with torch.profiler.record_function(name) if trace else nullcontext():
                kept = call()
                returned = time.perf_counter()
                wait()
            found.append((1e3 * (time.perf_counter() - begin), 1e3 * (returned - begin), name))
            del kept
        now = counts()
    kinds: dict[str, list[float]] = {}
    for wall, _, name in found:
        kinds.setdefault(name.split()[0], []).append(wall)
    return {
        "warm_seconds": round(warmed, 2), "kernels": compiled,
        "wall_ms": {kind: _figures(walls) for kind, walls in kinds.items()},
        "slowest": [
            {"call": name, "wall_ms": round(wall, 4), "host_ms": round(host, 4)}
            for wall, host, name in sorted(found, reverse=True)[:KEPT]
        ],
        "plan": traffic.origin,
        "served": dict(Counter(each.choice.how for each in launch_cache.launches())),
        "imported": sorted(set(sys.modules) - modules),
        **{what: now[what] - before[what] for what in now},
    }  # fmt: skip


def _figures(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "count": len(times), "median": statistics.median(times),
        "99 %": ordered[int(0.99 * len(times))], "longest": ordered[-1],
    }  # fmt: skip


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each process and kind of call, in milliseconds; then the slowest call of each."""
    head = ["process", "calls", "count", "median ms", "99 % ms", "longest ms"]
    lines = [head, ["---"] * len(head)]
    for name, each in found.items():
        for kind, walls in each["wall_ms"].items():
            count, *figures = walls.values()
            lines.append([name, kind, str(count), *(f"{ms:.2f}" for ms in figures)])
    slowest = [
        f"{name}: warm-up {each['warm_seconds']:.1f} s, {each['kernels']} kernels; "
        f"slowest {each['slowest'][0]['call']}, {each['slowest'][0]['wall_ms']:.1f} ms "
        f"({each['slowest'][0]['host_ms']:.1f} of the host)"
        for name, each in found.items()
    ]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *slowest])


def faults(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The faults that the traffic met, in words."""
    wrong = []
    for name, each in found.items():
        longest = max(walls["longest"] for walls in each["wall_ms"].values())
        if name != PROFILED and longest > LIMIT_MS:
            wrong.append(f"{name}: a stall of {longest:.1f} ms, {LIMIT_MS:g} are allowed")
        for what in ("compiled", "traced", "filled"):
            if each[what]:
                wrong.append(f"{name}: {each[what]} {what} after the warm-up")
        if set(each["served"]) - {"default"}:
            wrong.append(f"{name}: tuned records served, {each['served']}")
    return wrong


def _process(mode: str, options: Sequence[str]) -> dict[str, Any]:
    """The findings of one fresh process, which has directories of its own for all that is kept."""
    with tempfile.TemporaryDirectory() as empty:
        own = {
            "FLEXATTN_CACHE_DIR": f"{empty}/own", "TRITON_CACHE_DIR": f"{empty}/triton",
            "FLEXATTN_MODE": mode,
        }  # fmt: skip
        return fresh("bench.first_traffic", "--here", *options, **own)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the status is 1 where traffic stalled, compiled or traced, 2 without a GPU.

    The profiled process is not judged by its times, which have the profiler's part in them.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.first_traffic", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of traffic in each process")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write what was found")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write a profiled run")
    parser.add_argument("--here", action="store_true", help="in this process; prints JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: a stall is one of a GPU's traffic", file=sys.stderr)
        return 2
    if args.here:
        with time_limit():
            print(json.dumps(run(seconds=args.seconds, seed=args.seed, trace=args.trace)))
        return 0
    options = ["--seconds", str(args.seconds), "--seed", str(args.seed)]
    found = {name: _process(mode, options) for name, mode in MODES.items()}
    if args.trace:
        args.trace.parent.mkdir(parents=True, exist_ok=True)
        found[PROFILED] = _process("replay", [*options, "--trace", str(args.trace.resolve())])
    wrong = faults(found)
    if args.out:
        method = {"seconds": args.seconds, "seed": args.seed, "limit_ms": LIMIT_MS}
        report = {"schema": 1, "bench": "first_traffic", "environment": describe()}
        write(report | {"method": method, "processes": found, "faults": wrong}, args.out)
    print(table(found), *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
