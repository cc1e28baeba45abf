"""`python -m bench.tuned`: tuned beside untuned and torch's tuned flex; how often winners flip."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import flexattn
from bench.command import chosen_rows
from bench.environment import describe
from bench.inputs import Inputs, make
from bench.peers import OURS, PEERS, Refusal
from bench.rows import Row, decode_rows
from bench.tasks import STUDIED, task
from flexattn.attention import make_call
from flexattn.cache.record import Record
from flexattn.cache.store import Store
from flexattn.device import detect
from flexattn.errors import FlexAttnError, MeasureError
from flexattn.measure.protocol import Measurer
from flexattn.measure.task import Task
from flexattn.measure.timing import Samples, paired_ratio, time_interleaved
from flexattn.measure.worker import Worker
from flexattn.plan import plan
from flexattn.settings import override
from flexattn.space.config import describe as said
from flexattn.tune.builds import Built, build_all, compilers
from flexattn.tune.method import Method, method_for
from flexattn.tune.pool import Pool
from flexattn.tune.transfer import regret
from flexattn.tune.tuner import tune

__all__ = ["Result", "flip", "main", "summary"]

# Winners of two tunings that differ by less than this are one answer.
FLIP = 0.03
# One kernel raced with itself, called in two ways, reads up to 0.3 % apart.
NOISE = 0.01
TORCH = "torch-flex-tuned"


@dataclass(frozen=True)
class Result:
    """One row. *_us: medians of one interleaved race; 0 for who was not timed.

    gain: default over tuned, torch_ratio: torch over tuned, both as medians of paired rounds.
    slower: whether even the interval of the gain lies more than NOISE below 1.
    flip: as the function of this name.
    seconds: of each tuning without its builds.
    """

    name: str
    config: str
    default_us: float
    tuned_us: float
    torch_us: float
    gain: float
    torch_ratio: float
    slower: bool
    flip: float | None
    seconds: tuple[float, ...]
    why: str
    samples: dict[str, tuple[float, ...]]
    refused: dict[str, str]


def flip(one: Record, other: Record) -> float | None:
    """How far two tunings of a problem disagree: the regret of a winner in the other's samples.

    0 where they agree; None where neither timed the other's winner, and nobody can tell.
    """
    if one.config == other.config:
        return 0.0
    found = [regret(one.config, other), regret(other.config, one)]
    return max((each for each in found if each is not None), default=None)


def _flipped(flip: float | None) -> bool:
    return flip is None or flip > FLIP


def _tunings(
    job: Task, measurer: Measurer, pool: Pool, method: Method, times: int
) -> tuple[list[Record], list[float]]:
    """Independent tunings of one problem, and their seconds without what the builds took.

    Each search draws from a seed of its own.
    """
    records, seconds = [], []
    measurer.start()
    for seed in range(times):
        building = [0.0]

        def build(configs: Sequence[Any], building: list[float] = building) -> list[Built]:
            begin = time.monotonic()
            built = build_all(job.problem, configs, job.device, pool=pool)
            building[0] += time.monotonic() - begin
            return built

        begin = time.monotonic()
        records.append(tune(job, measurer, build, replace(method, seed=seed)))
        seconds.append(round(time.monotonic() - begin - building[0], 2))
    return records, seconds


def _race(row: Row, job: Task, record: Record, torch_too: bool) -> tuple[dict[str, Samples], Any]:
    """Default, tuned and torch in one race, each called as its users call it."""
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


def _result(
    row: Row, records: Sequence[Record], seconds: Sequence[float], samples: Any, refused: Any
) -> Result:
    first = records[0]
    us = {name: each.median if each.us else 0.0 for name, each in samples.items()}
    refused |= {name: str(each.failure) for name, each in samples.items() if each.failure}

    gain = paired_ratio(samples["default"], samples["tuned"])

    def ratio(name: str) -> float:
        if not us.get(name) or not us["tuned"]:
            return 0.0
        return paired_ratio(samples[name], samples["tuned"]).value

    return Result(
        row.name,
        said(first.config),
        us["default"],
        us["tuned"],
        us.get(TORCH, 0.0),
        ratio("default"),
        ratio(TORCH),
        gain.high < 1 - NOISE,
        _worst([flip(first, other) for other in records[1:]]),
        tuple(seconds),
        first.decision.why,
        {name: each.us for name, each in samples.items()},
        refused,
    )


def _worst(flips: Sequence[float | None]) -> float | None:
    known = [each for each in flips if each is not None]
    return None if len(known) < len(flips) else max(known, default=0.0)


def _geometric(values: Iterable[float]) -> float:
    found = [value for value in values if value]
    return math.exp(statistics.fmean(map(math.log, found))) if found else 0.0


def summary(results: Sequence[Result]) -> dict[str, float]:
    """The promises in numbers."""
    return {
        "rows": len(results),
        "gain over the default": _geometric(r.gain for r in results),
        "least gain": min((r.gain for r in results if r.gain), default=0.0),
        "slower beyond noise": sum(r.slower for r in results),
        "over torch's tuned flex": _geometric(r.torch_ratio for r in results),
        "flip rate": sum(_flipped(r.flip) for r in results) / max(1, len(results)),
        "longest tuning in s": max((s for r in results for s in r.seconds), default=0.0),
    }


def _percent(flip: float | None) -> str:
    return "unknown" if flip is None else f"{100 * flip:.1f} %"


def _table(results: Sequence[Result]) -> str:
    lines = [
        "| row | default µs | tuned µs | gain | torch µs | torch / tuned | flip | tuning s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        seconds = ", ".join(f"{s:.1f}" for s in r.seconds)
        lines.append(
            f"| {r.name} | {r.default_us:.1f} | {r.tuned_us:.1f} | {r.gain:.3f} | "
            f"{r.torch_us:.1f} | {r.torch_ratio:.2f} | {_percent(r.flip)} | {seconds} |"
        )
    lines += ["", *(f"{name}: {value:.3f}" for name, value in summary(results).items())]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Tune and race the rows; the status is 1 if one of them has no result."""
    args = _parser().parse_args(argv)
    try:
        prefill = [row for row in STUDIED if row.shape.q_len > 1]
        rows = chosen_rows([*decode_rows(), *prefill], args.rows)
    except FlexAttnError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(row.name for row in rows))
        return 0
    target, results, failed = detect(torch.device("cuda")), [], 0
    with compilers(args.jobs) as pool, Worker() as worker:
        for row in rows:
            begin = time.monotonic()
            try:
                job = task(row, target, "cuda")
                method = method_for(args.effort, args.budget)
                records, seconds = _tunings(job, worker, pool, method, args.times)
                raced = _race(row, job, records[0], not args.no_torch)
                results.append(_result(row, records, seconds, *raced))
                _save(args.out, args, results)
                r = results[-1]
                print(
                    f"{row.name}: {r.gain:.3f}x the default, {r.torch_ratio:.2f}x torch, flip "
                    f"{_percent(r.flip)}, {time.monotonic() - begin:.0f} s; {r.config}",
                    flush=True,
                )
            except Exception:  # the others may still be measured, whatever this one met
                failed += 1
                print(f"{row.name}: failed\n{traceback.format_exc()}", flush=True)
    print(_table(results))
    return int(failed > 0)


def _save(path: Path | None, args: argparse.Namespace, results: Sequence[Result]) -> None:
    if path is None:
        return
    data = {
        "bench": "tuned",
        "method": {"effort": args.effort, "times": args.times},
        "environment": describe(),
        "summary": summary(results),
        "rows": [asdict(each) for each in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.tuned", description=__doc__)
    add = parser.add_argument
    add("--rows", default="^(?!.*prefill)", metavar="REGEX", help="rows whose group/name matches")
    add("--list", action="store_true", help="print the names of those rows, and stop")
    add("--effort", default="full", choices=("quick", "full", "exhaustive"))
    add("--budget", type=float, help="seconds of measuring for each tuning")
    add("--times", type=int, default=2, help="independent tunings of each row")
    add("--no-torch", action="store_true", help="leave torch's tuned flex out")
    add("--jobs", type=int, default=0, help="processes that compile; 0 for all cores")
    add("--out", type=Path, metavar="FILE.json", help="write the results, after each row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
