"""`python -m bench.serving`: paged and ragged decoding, graph replays from a cold L2."""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.environment import clocks, describe
from bench.host import host_cost
from bench.peers import OURS, Refusal
from bench.results import Gate, Report, RowResult, save
from bench.runner import Method
from bench.serving_ahead import compile_ahead
from bench.serving_inputs import judge_requests, make_served
from bench.serving_peers import (
    INVARIANT,
    SERVING_PEERS,
    ServingPeer,
    invariant_with,
    searched,
    served_with,
)
from bench.serving_rows import ServingRow, serving_rows
from bench.table import markdown
from bench.time_limit import time_limit
from flexattn.device import detect
from flexattn.errors import InputError
from flexattn.measure.timing import Samples, time_interleaved
from flexattn.serving import DecodePlan, ServingConfig

METHOD = Method(rounds=20, min_ms=5.0, flush_l2=True, graph=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; the status is 1 if ours has no time in some row."""
    args = _parser().parse_args(argv)
    rows = [row for row in serving_rows() if re.search(args.rows, f"{row.group}/{row.name}")]
    if args.list:
        print("\n".join(row.name for row in rows))
        return 0
    if not torch.cuda.is_available():
        print(InputError("no GPU is visible to torch", "a bench times a GPU"), file=sys.stderr)
        return 2
    if args.host:
        with time_limit():
            print(_host(args.rounds))
        return 0
    names = args.peers.split(",") if args.peers else list(SERVING_PEERS)
    peers = {name: SERVING_PEERS[name] for name in names}
    peers |= {f"{OURS} {text}": served_with(_changes(text)) for text in args.config}
    peers |= {f"{INVARIANT} {text}": invariant_with(_changes(text)) for text in args.invariant}
    method = replace(METHOD, rounds=args.rounds, min_ms=args.min_ms)
    compile_ahead(rows, detect(torch.device(method.device)))
    report = Report("decode", method.facts(), (describe(),), ())
    for row in rows:
        with time_limit():
            found = run_row(row, peers, method, args.search)
        report = replace(report, rows=(*report.rows, found))
        ordered = sorted(found.samples.items(), key=lambda each: each[1].median)
        times = [f"{name} {s.median:.1f}" for name, s in ordered if not s.failure][:12]
        print(f"{row.name}: {', '.join(times)} us", flush=True)
        if args.out:
            save(report, args.out)
    print(markdown(report))
    return int(any(OURS not in row.samples or not row.samples[OURS].us for row in report.rows))


def run_row(
    row: ServingRow, peers: Mapping[str, ServingPeer], method: Method, search: int = 0
) -> RowResult:
    """Gate ours, then time everyone in one interleaved race; a red variant is not timed.

    search: so many other configs of ours are in the race.
    """
    x = make_served(row, method.device)
    peers = {**peers, **(searched(x, search) if search else {})}
    calls: dict[str, Callable[[], Tensor]] = {}
    gates: dict[str, Gate] = {}
    refused: dict[str, str] = {}
    samples: dict[str, Samples] = {}
    with torch.no_grad():
        for name, peer in peers.items():
            try:
                call = peer(x)
                out = None if isinstance(call, Refusal) else call()
            except Exception as error:
                call = Refusal.of(error)
            if isinstance(call, Refusal):
                refused[name] = call.reason
                continue
            if name.startswith(OURS) and out is not None:
                out.fill_(torch.nan)
                gates[name] = Gate.of(judge_requests(call(), x))
                if not gates[name].passed:
                    refused[name] = "the accuracy gate is red"
                    continue
            calls[name] = call
        samples = time_interleaved(
            calls, rounds=method.rounds, min_ms=method.min_ms, flush_l2=True, graph=True
        )
    now = clocks()
    del calls, x
    gc.collect()
    torch.cuda.empty_cache()
    return RowResult(row.name, row.group, 0.0, row.kv_bytes, gates, samples, refused, clocks=now)


def _host(rounds: int) -> str:
    """Microseconds of Python for one plan.run, of bursts that never wait for the GPU."""
    x = make_served(next(row for row in serving_rows() if row.name == "b1-1k"))
    lines = []
    one = DecodePlan(batch=1, kv_len=1024, heads=(32, 8), head_dim=128, page_size=16).config
    # One kernel, and a second one that merges.
    for config in (one, ServingConfig(16, 64, 4, 3, combine="launch")):
        plan = DecodePlan(
            batch=1, kv_len=1024, heads=(32, 8), head_dim=128, page_size=16, config=config
        )
        cache = (x.k, x.v)
        call = lambda: plan.run(x.q, cache, seq_lens=x.lens, block_table=x.table)  # noqa: B023, E731
        host_cost(call, 2)
        lines.append(
            f"plan.run, combine={config.combine}: {host_cost(call, rounds).median:.1f} us"
        )
    return "\n".join(lines)


def _changes(text: str) -> dict[str, int | str]:
    """Fields of a ServingConfig from "BLOCK_N=128,combine=launch"."""
    pairs = [item.split("=") for item in text.split(",")]
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.serving")
    add = parser.add_argument
    add("--rows", default="", metavar="REGEX", help="run the rows whose group/name matches")
    add("--list", action="store_true", help="print the names of those rows, and stop")
    add("--peers", default="", help=f"out of {', '.join(SERVING_PEERS)}; default: all")
    more = (
        "one more variant of ours with these fields of its config (own.FIELD: a cascade's second)"
    )
    add("--config", action="append", default=[], metavar="FIELD=VALUE,…", help=more)
    of_invariant = "one more batch-invariant variant of ours: fields that decide no bit"
    add("--invariant", action="append", default=[], metavar="FIELD=VALUE,…", help=of_invariant)
    add("--search", type=int, default=0, metavar="N", help="race N other configs of ours as well")
    add("--rounds", type=int, default=METHOD.rounds, help="samples of each candidate")
    add("--min-ms", type=float, default=METHOD.min_ms, help="least time of one sample")
    add("--out", type=Path, metavar="FILE.json", help="write the results, after each row")
    add("--host", action="store_true", help="time the host's part of plan.run instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
