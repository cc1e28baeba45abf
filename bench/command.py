"""The command line of the benches of rows: prefill, decode, backward, serving."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.peers import OURS, PEERS, Peer, ours_exactly, ours_with
from bench.results import Report, RowResult, load, merge, save
from bench.runner import FORWARD, Kind, Method, prepare, profile, run
from bench.table import markdown
from flexattn.errors import FlexAttnError, InputError
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS, HopperPrefillConfig

T = TypeVar("T")


def _compile_ahead(jobs: int) -> None:
    """Call ours once in so many processes, each on a share of the rows.

    Their kernels stay in the caches on disk. The error of a row is printed when it runs.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    with ExitStack() as stack:
        for index in range(jobs if jobs > 1 else 0):
            part = [*command, "--part", f"{index}/{jobs}"]
            stack.enter_context(subprocess.Popen(part, stdout=subprocess.DEVNULL))


def _ours_missing(row: RowResult) -> bool:
    red = any(not gate.passed for gate in row.gates.values())
    return red or OURS in row.refused or (OURS in row.samples and not row.samples[OURS].us)


def named(*names: str) -> dict[str, str]:
    """Peers that are their names: a row's kind knows what each is."""
    return dict(zip(names, names, strict=True))


def matching(
    known: Iterable[T], pattern: str, option: str, noun: str, text: Callable[[T], str]
) -> list[T]:
    """Those whose text matches the pattern somewhere; raises InputError if none does.

    option: where the pattern came from, as "--rows"; noun: what one of them is, as "row".
    """
    every = list(known)
    try:
        found = [each for each in every if re.search(pattern, text(each))]
    except re.error as error:
        raise InputError(f"{option} {pattern!r}", f"is a regular expression: {error}") from error
    if not found:
        names = ", ".join(map(text, every))
        raise InputError(f"{option} {pattern!r} matches no {noun}", f"the {noun}s are {names}")
    return found


def chosen_rows(rows: Sequence[T], pattern: str) -> list[T]:
    """Rows whose name, or group, matches the pattern somewhere. Raises InputError if none does."""
    return matching(rows, pattern, "--rows", "row", lambda row: f"{row.group}/{row.name}")  # type: ignore[attr-defined]


def parse_config(text: str) -> dict[str, int | str]:
    """Kernel options from "BLOCK_M=128,BACKEND=TRITON,TANH=exact". Raises InputError otherwise."""
    try:
        pairs = [item.split("=") for item in text.split(",")]
        return {key.strip(): int(value) if value.isdigit() else value for key, value in pairs}
    except ValueError as e:
        raise InputError(f"--config {text!r}", "KEY=VALUE, separated by commas") from e


def _peers(
    names: str,
    configs: Sequence[str],
    known: Mapping[str, Any],
    named: Mapping[str, Any],
    variant: Callable[[str], Any],
) -> dict[str, Any]:
    asked, known = names.split(",") if names else list(known), {**known, **named}
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise InputError(f"--peers {', '.join(unknown)}", f"the peers are {', '.join(known)}")
    variants = {f"{OURS} {text}": variant(text) for text in configs}
    return {name: known[name] for name in asked} | variants


def config_variant(text: str) -> Peer:
    """Ours with kernel options, or with a config of the Gluon template: "consumers=2,…", beside
    which FP8_WEIGHTS alone is an option.
    """
    given = parse_config(text)
    if "consumers" not in given:
        return ours_with(given)
    weights = str(given.pop("FP8_WEIGHTS", "exact"))
    given.setdefault("consumer_regs", CONSUMER_REGISTERS.get(int(given["consumers"]), 0))
    try:
        return ours_exactly(HopperPrefillConfig(**typed(given, HopperPrefillConfig)), weights)
    except TypeError as e:
        raise InputError(f"--config {text!r}", f"fields of HopperPrefillConfig: {e}") from e


def typed(given: Mapping[str, int | str], config: type) -> dict[str, Any]:
    """The fields of a config by name, with truth values where the config has them."""
    switches = {each.name for each in fields(config) if each.type == "bool"}
    return {key: bool(value) if key in switches else value for key, value in given.items()}


def main(
    bench: str,
    rows: Sequence[Any],
    method: Method,
    argv: Sequence[str] | None = None,
    known: Mapping[str, Any] = PEERS,
    named: Mapping[str, Any] = {},
    variant: Callable[[str], Any] = config_variant,
    kind: Kind = FORWARD,
) -> int:
    """Run a bench; the status is 0, 1 if ours has no time in some row, 2 for a bad request.

    known: the peers there are; named: those that run where they are asked for. variant: ours with
    the text of --config. kind: how rows are made, called and judged.
    """
    args = _parser(bench, method, known, named).parse_args(argv)
    method = replace(method, rounds=args.rounds, min_ms=args.min_ms)
    if args.host:
        bench, method = "host", replace(method, clock="host", graph=False, flush_l2=False)
    try:
        chosen = chosen_rows(rows, args.rows)
        peers = _peers(args.peers, args.config, known, named, variant)
        if args.list:
            print("\n".join(row.name for row in chosen))
            return 0
        if args.merge:
            report = merge([load(path) for path in args.merge])
        elif not torch.cuda.is_available():
            raise InputError(
                "no GPU is visible to torch", "a bench times a GPU", "run `make demo` without one"
            )
        elif args.part:
            index, count = map(int, args.part.split("/"))
            prepare(chosen[index::count], peers, method, kind)
            return 0
        elif args.profile:
            profile(chosen, peers, method, kind)
            return 0
        else:
            _compile_ahead(min(args.jobs, len(chosen) // 2))
            progress = _progress(len(chosen), args.out)
            report = run(bench, chosen, peers, method, progress, kind, args.seconds)
    except FlexAttnError as e:
        print(e, file=sys.stderr)
        return 2
    if args.out:
        save(report, args.out)
    print(markdown(report))
    return 1 if any(_ours_missing(row) for row in report.rows) else 0


def _progress(total: int, out: Path | None) -> Callable[[Report, float], None]:
    def each(report: Report, seconds: float) -> None:
        row = report.rows[-1]
        times = [f"{name} {s.median:.1f}" for name, s in row.samples.items() if not s.failure]
        what = ", ".join(times) + " us" if times else "no time: " + ", ".join(row.refused.values())
        print(f"[{len(report.rows)}/{total}] {row.name} in {seconds:.0f} s: {what}", flush=True)
        if out:
            save(report, out)  # a run that is cut short leaves its rows to be merged

    return each


def _parser(
    bench: str, method: Method, known: Mapping[str, Any], named: Mapping[str, Any]
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{bench}",
        description="Ours beside torch's flex_attention and SDPA, interleaved in one run.",
    )
    add = parser.add_argument
    add("--rows", default="", metavar="REGEX", help="run the rows whose group/name matches")
    add("--list", action="store_true", help="print the names of those rows, and stop")
    add("--peers", default="", metavar="A,B",
        help=f"of {', '.join({**known, **named})}; default: {', '.join(known)}")  # fmt: skip
    add("--config", action="append", default=[], metavar="KEY=VALUE,…",
        help="one more variant of ours, with these kernel options, or, where consumers is one of "
        "them, these fields of a Gluon config; may be repeated")  # fmt: skip
    add("--rounds", type=int, default=method.rounds, help="samples of each candidate")
    add("--min-ms", type=float, default=method.min_ms, help="least time of one sample")
    add("--seconds", type=float, default=math.inf, help="no row begins after so many")
    add("--out", type=Path, metavar="FILE.json", help="write the results, after each row")
    add("--merge", type=Path, nargs="+", metavar="FILE.json",
        help="run nothing; make one table, and --out, of these")  # fmt: skip
    add("--host", action="store_true", help="time the host's part of a call instead")
    add("--jobs", type=int, default=8, help="processes that compile ours before the first row")
    add("--profile", action="store_true", help="call each peer once between a profiler's marks: "
        "ncu --set full --profile-from-start off -o report python -m …")  # fmt: skip
    add("--part", default="", help=argparse.SUPPRESS)
    return parser
