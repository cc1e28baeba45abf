"""`python -m bench.tuned`: tuned beside untuned and torch's tuned flex; how often winners flip."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import flexattn
from bench.command import chosen_rows
from bench.inputs import Inputs, make
from bench.peers import OURS, PEERS, Refusal
from bench.rows import Row, decode_rows
from bench.shapes import MODELS
from bench.tasks import STUDIED, task
from bench.tuned_results import TORCH, Result, made, percent, save, table
from flexattn.device import Device, detect
from flexattn.errors import FlexAttnError, MeasureError
from flexattn.frontend.admission import make_call
from flexattn.frontend.plan import plan
from flexattn.measure.protocol import Measurer
from flexattn.measure.task import Task
from flexattn.measure.timing import Samples, time_interleaved
from flexattn.measure.worker import Worker
from flexattn.records.record import Record
from flexattn.records.store import Store
from flexattn.settings import override
from flexattn.tune.builds import BuiltConfig, build_all, compilers
from flexattn.tune.compile_queue import CompileQueue, Runs
from flexattn.tune.gpu_tuner import build_ahead
from flexattn.tune.method import Method, method_for
from flexattn.tune.tuner import tune

__all__ = ["main", "tuned_rows"]

# Seconds that torch's compiler takes for its tuned kernel of a row, until one was seen.
TORCH_S = 20.0


def tuned_rows() -> list[Row]:
    """Decode of the presets' heads, one more length, and the prefills of the studies."""
    between = Row("b4-32k", "grid", MODELS["llama3-8b"].decode(4, 32768))
    return [*decode_rows(), between, *(row for row in STUDIED if row.shape.q_len > 1)]


def _tunings(
    job: Task, measurer: Measurer, pool: Runs, method: Method, times: int
) -> tuple[list[Record], list[float]]:
    """Independent tunings of one problem, and their seconds without what the builds took.

    Each search draws from a seed of its own.
    """
    records, seconds = [], []
    measurer.start()
    for seed in range(times):
        building = [0.0]

        def build(configs: Sequence[Any], building: list[float] = building) -> list[BuiltConfig]:
            begin = time.monotonic()
            built = build_all(job.problem, configs, job.device, pool=pool)
            building[0] += time.monotonic() - begin
            return built

        begin = time.monotonic()
        records.append(tune(job, measurer, build, replace(method, seed=seed)))
        seconds.append(round(time.monotonic() - begin - building[0], 2))
    return records, seconds


def _race(
    row: Row, job: Task, record: Record, torch_too: bool
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Default, tuned and torch in one race, each called as its users call it; who was refused."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        Store(Path(folder)).write(record)
        inputs = make(row, "cuda", torch.bfloat16)

        with override(mode="replay", cache=(Path(folder),)):
            _served(inputs)

        def within(**settings: object) -> Callable[[], object]:
            call = PEERS[OURS](inputs)
            assert not isinstance(call, Refusal)

            def run() -> object:
                with override(**settings):
                    return call()

            run()
            return run

        calls = {
            "default": within(mode="off"),
            "tuned": within(mode="replay", cache=(Path(folder),)),
        }
        refused = {}
        if torch_too:
            try:
                rival = PEERS[TORCH](inputs)
                assert not isinstance(rival, Refusal)
                rival()
                calls[TORCH] = rival
            except Exception as error:  # torch's compiler may refuse a row in any way
                refused[TORCH] = f"{type(error).__name__}: {str(error)[:200]}"
        policy = job.policy
        samples = time_interleaved(
            calls,
            rounds=policy.rounds,
            min_ms=policy.min_ms,
            flush_l2=policy.cold_l2,
            graph=policy.graph,
        )
    torch.compiler.reset()
    return samples, refused


def _served(inputs: Inputs) -> None:
    """Raises MeasureError unless the row's call is served by the record that it was tuned for."""
    s, mask = inputs.row.shape, None
    if inputs.mask_mod is not None:
        mask = flexattn.create_block_mask(
            inputs.mask_mod, None, None, s.q_len, s.kv_len, inputs.q.device
        )
    call = make_call(
        inputs.q, inputs.k, inputs.v, inputs.score_mod, mask, None, inputs.gqa, False, None, None
    )
    choice = plan(call).launch.choice
    if choice.how != "hit":
        raise MeasureError(
            f"{inputs.row.name} is served by {choice.origin}",
            "what is raced as tuned is the record of this row",
        )


class _Clock:
    """The seconds that are left, and whether torch's compiler fits into them once more."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._slowest = 0.0

    def left(self) -> float:
        """Seconds."""
        return self._until - time.monotonic()

    def allows(self) -> bool:
        """Whether a row with torch is likely to end in time."""
        return self.left() > (self._slowest or TORCH_S)

    def took(self, seconds: float) -> None:
        """A row with torch did."""
        self._slowest = max(self._slowest, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Tune all rows, then race each; the status is 1 if one of them has no result."""
    args = _parser().parse_args(argv)
    clock = _Clock(math.inf if args.seconds is None else args.seconds)
    try:
        rows = chosen_rows(tuned_rows(), args.rows)
    except FlexAttnError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(row.name for row in rows))
        return 0
    found = _tuned(rows, detect(torch.device("cuda")), args)
    results: list[Result] = []
    for row in rows:
        if row.name in found:
            job, records, seconds = found[row.name]
            try:
                results.append(_raced(row, job, records, seconds, clock, not args.no_torch))
            except Exception:  # the others may still be raced, whatever this one met
                print(f"{row.name}: failed\n{traceback.format_exc()}", flush=True)
            if args.out is not None:
                save(args.out, {"effort": args.effort, "times": args.times}, results)
    print(table(results))
    return int(len(results) < len(rows))


Tuned = tuple[Task, list[Record], list[float]]


def _tuned(rows: Sequence[Row], device: Device, args: argparse.Namespace) -> Mapping[str, Tuned]:
    """The tunings of each row, while the kernels of the next ones are compiled."""
    method, found = method_for(args.effort, args.budget), {}
    jobs = {row.name: task(row, device, "cuda") for row in rows}
    with CompileQueue(compilers(args.jobs)) as compile_queue, Worker() as worker:
        build_ahead(list(jobs.values()), method, compile_queue)
        for name, job in jobs.items():
            try:
                records, seconds = _tunings(job, worker, compile_queue, method, args.times)
            except Exception:  # the others may still be measured, whatever this one met
                print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
                continue
            found[name] = job, records, seconds
            print(f"{name}: tuned {args.times} times in {seconds} s", flush=True)
    return found


def _raced(
    row: Row,
    job: Task,
    records: Sequence[Record],
    seconds: Sequence[float],
    clock: _Clock,
    torch_too: bool,
) -> Result:
    """Torch is a rival in decode, as long as there is time to compile it."""
    wanted = torch_too and row.shape.q_len == 1
    rival, begin = wanted and clock.allows(), time.monotonic()
    samples, refused = _race(row, job, records[0], rival)
    spent = time.monotonic() - begin
    if rival:
        clock.took(spent)
    elif wanted:
        refused[TORCH] = "no time was left to compile it"
    r = made(row, records, seconds, samples, refused)
    print(
        f"{row.name}: {r.gain:.3f}x the default, {r.torch_ratio:.2f}x torch, flip "
        f"{percent(r.flip)}, raced in {spent:.0f} s; {r.config}",
        flush=True,
    )
    return r


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.tuned", description=__doc__)
    add = parser.add_argument
    add("--rows", default="", metavar="REGEX", help="rows whose group/name matches")
    add("--list", action="store_true", help="print the names of those rows, and stop")
    add("--effort", default="full", choices=("quick", "full", "exhaustive"))
    add("--budget", type=float, help="seconds of measuring for each tuning")
    add(
        "--seconds",
        type=float,
        help="of all: torch's compiler is left out where it would pass them",
    )
    add("--times", type=int, default=2, help="independent tunings of each row")
    add("--no-torch", action="store_true", help="leave torch's tuned flex out")
    add("--jobs", type=int, default=0, help="processes that compile; 0 for all cores")
    add("--out", type=Path, metavar="FILE.json", help="write the results, after each row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
