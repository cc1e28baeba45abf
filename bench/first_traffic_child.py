"""One fresh process of `bench.first_traffic`: warm(), plans, then traffic of random lengths.

What warm() and the plans are made for is what the manual tells a server to do. Then prompts of
random batches and lengths, decoding by calls, and steps of a DecodePlan come in turns; each call
is waited for, so that its wall time is what a user of the server waits. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexattn
from bench.time_limit import time_limit
from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.base import source
from flexattn.mods.bind import stats
from flexattn.runtime.build import builder
from flexattn.serving import DecodePlan

__all__ = ["SIZES", "Sizes", "run", "workload"]

CAP = 30.0
# Of the slowest calls so many are kept, with their sizes.
KEPT = 50


@dataclass(frozen=True)
class Sizes:
    """The sizes of the traffic.

    longest: keys of a prompt or request. batch: of a prompt, at most. requests: of a plan. warmed:
    the one length that warm() is told.
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


class Work:
    """Counts of the host's work during the traffic that belongs before it."""

    def __init__(self) -> None:
        self._filled = 0
        self._fill = source.render_template
        self._modules: set[str] = set()
        self._before: Counter[str] = Counter()

    def __enter__(self) -> Work:
        source.render_template = self._counted
        return self

    def __exit__(self, *error: object) -> None:
        source.render_template = self._fill

    def _counted(self, *given: Any) -> str:
        self._filled += 1
        return self._fill(*given)

    def _now(self) -> Counter[str]:
        return Counter(compiled=builder().compiled, traced=stats().traces, filled=self._filled)

    def begin(self) -> None:
        """The traffic begins."""
        self._before, self._modules = self._now(), set(sys.modules)

    def since(self) -> dict[str, Any]:
        """Kernels compiled, mods traced, templates filled, modules imported since it began."""
        now = self._now()
        imported = sorted(set(sys.modules) - self._modules)
        return {name: now[name] - self._before[name] for name in now} | {"imported": imported}


def run(
    sizes: Sizes = SIZES, device: str = "cuda", seconds: float = 5.0, seed: int = 0,
    trace: Path | None = None, most: int = 10**9,
) -> dict[str, Any]:  # fmt: skip
    """Warm up, then serve for some seconds, or `most` calls.

    trace: a file for Chrome's trace format. Returns milliseconds of every call by its kind (wall),
    the slowest calls, and what the host did besides.
    """
    begin = time.perf_counter()
    compiled = flexattn.warm(workload(sizes), device)
    traffic = Traffic(sizes, device, seed)
    gc.freeze()
    clock = _Clock(device)
    warmed = time.perf_counter() - begin
    found: list[tuple[float, float, float, str]] = []
    with torch.no_grad(), _profiled(trace, device), Work() as work:
        clock.wait()
        work.begin()
        end = time.perf_counter() + seconds
        for name, call in traffic.requests():
            if time.perf_counter() > end or len(found) == most:
                break
            with torch.profiler.record_function(name) if trace else nullcontext():
                found.append((*clock.time(call), name))
    kinds: dict[str, list[float]] = {}
    for wall, _, _, name in found:
        kinds.setdefault(name.split()[0], []).append(round(wall, 4))
    slowest = sorted(found, reverse=True)[:KEPT]
    return {
        "warm_seconds": round(warmed, 2), "kernels": compiled, "wall_ms": kinds,
        "slowest": [
            {"call": name, "wall_ms": round(wall, 4), "host_ms": round(host, 4),
             "device_ms": round(device_ms, 4)}
            for wall, host, device_ms, name in slowest
        ],
        "plan": traffic.origin,
        "served": dict(Counter(each.choice.how for each in launch_cache.launches())),
        **work.since(),
    }  # fmt: skip


class _Clock:
    """Milliseconds of a call: until it is done, until it returns, and of the GPU."""

    def __init__(self, device: str) -> None:
        self._gpu = device.startswith("cuda")

    def wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], object]) -> tuple[float, float, float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if self._gpu else []
        for event in events[:1]:
            event.record()
        begin = time.perf_counter()
        kept = call()
        returned = time.perf_counter()
        for event in events[1:]:
            event.record()
        self.wait()
        done = time.perf_counter()
        del kept
        device = events[0].elapsed_time(events[1]) if events else 0.0
        return 1e3 * (done - begin), 1e3 * (returned - begin), device


def _profiled(trace: Path | None, device: str) -> AbstractContextManager[Any]:
    """torch.profiler, which has started before the traffic does."""
    if trace is None:
        return nullcontext()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
    )


def main() -> None:
    """Print what `run` finds."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_traffic_child")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    with time_limit():
        found = run(seconds=asked.seconds, seed=asked.seed, trace=asked.trace)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
