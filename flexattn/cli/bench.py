"""`flexattn bench`: what dispatch runs beside the static default and torch's flex_attention."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from flexattn.block_mask.create import create_block_mask
from flexattn.catalogue import causal
from flexattn.cli import options
from flexattn.cli.selection import asked_rows, writable
from flexattn.cli.terminal import say, say_json, tell
from flexattn.device import detect
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import family_of, short
from flexattn.measure.task import Task
from flexattn.measure.timing import Samples, paired_ratio, time_interleaved
from flexattn.mods import bind
from flexattn.report.page import write_page
from flexattn.report.rivals import BenchResults, from_verb, geometric_mean
from flexattn.tuning.tasks import mods_of, task_from
from flexattn.tuning.workload import Row
from flexattn.verify.gate import Verdict
from flexattn.verify.oracle import Judge, make_inputs, make_sinks, moved, oracle

OURS, DEFAULT, TORCH = "flexattn", "default", "torch"
# How torch's kernel is compiled, where it is timed at all.
RivalChoice = Literal["none", "compiled", "tuned"]
# What is timed where nothing is named: calls of two models, at most a minute.
_PRESETS = ["llama3-8b", "gemma2"]
_ONLY = r"8b (prefill B1 8192|decode B(8|64) \d{4}$)|9b local prefill"
TORCH_MODES = {"compiled": None, "tuned": "max-autotune-no-cudagraphs"}
_Call = Callable[..., Any]


@dataclass(frozen=True)
class Benched:
    """One row: medians in microseconds and the paired ratio of each rival to ours.

    how: which record served, as dispatch says it. error, budget: the largest of `out`, and what it
    may be. note: why something is missing.
    """

    title: str
    how: str
    config: str
    us: dict[str, float | None]
    ratio: dict[str, float | None]
    passed: bool
    error: float
    budget: float
    note: str = ""


def run(args: options.Bench) -> None:
    """Run `flexattn bench`."""
    words = re.sub(
        r" --(rounds|min-ms|out)[ =]('[^']*'|\S+)| --(no-)?torch| --json",
        "", shlex.join(sys.argv[1:]).replace("bench", "tune", 1),
    )  # fmt: skip
    rival: RivalChoice = "tuned" if args.rivals else "none"
    if not (args.problems or args.named):
        if args.sized:
            args, words = replace(args, problems=["noop"]), f"{words} noop"
        else:
            rival = "compiled" if args.rivals else "none"
            words += " --preset ".join(["", *_PRESETS])
            args = replace(args, preset=_PRESETS, only=args.only or _ONLY)
    rows = asked_rows(args, plans=False, backward=False)
    if not torch.cuda.is_available():
        print_would_time([row.title for row in rows], args.as_json, args.rivals)
        return
    if not args.as_json:
        writable(args.out)
    here = torch.device("cuda", torch.cuda.current_device())
    console, done = Console(stderr=True), []
    for number, row in enumerate(rows, 1):
        tell(console, f"{number}/{len(rows)} {row.title}")
        x = RowInputs.of(row, here)
        done.append(race_call(x, args.rounds, args.min_ms, rival, args.rivals))
    device = torch.cuda.get_device_name()
    if args.as_json:
        say_json({"device": device, "rows": [asdict(each) for each in done]})
    else:
        print_rows(done)
        results = results_of(done, device)
        for name in results.rivals:
            say(f"in the geometric mean {name}: {geometric_mean(results, name):.2f}")
        say(f"a page with a chart: {write_page((), args.out, [results]).page}")
        if lost := _lost(done):
            say(f"a rival is over 2 % faster in {len(lost)} of {len(done)} rows; tune these:")
            say(f"  flexattn {_for_rows(words, lost) if len(done) > 1 else words}")
    if not all(each.passed for each in done):
        raise typer.Exit(1)


def _lost(rows: list[Benched]) -> list[str]:
    """The titles of rows that lost by more than the noise of two runs of one kernel."""
    return [x.title for x in rows if any(r is not None and r < 0.98 for r in x.ratio.values())]


def _for_rows(words: str, titles: list[str]) -> str:
    """A command with --only these titles."""
    plain = re.sub(r" --only[ =]('[^']*'|\S+)", "", words)
    return f"{plain} --only {shlex.quote('|'.join(map(re.escape, titles)))}"


@dataclass(frozen=True)
class RowInputs:
    """A row's task with the tensors and mods of its call on a device."""

    task: Task
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    score_mod: Callable[..., Any] | None
    block_mask: BlockMask | None

    @classmethod
    def of(cls, row: Row, where: torch.device) -> RowInputs:
        """Normal random q, k and v, and a BlockMask as a user makes it."""
        with torch.device(where):
            score_mod, mask_mod = mods_of(row)  # what they capture is made on the device
        task = task_from(row, score_mod, mask_mod, detect(where), where)
        mask = None
        if mask_mod is not None and task.lists is not None:
            B, H = (None if size == 1 else size for size in task.lists.kv_num.shape[:2])
            lengths = row.shape.q_len, row.shape.kv_len
            mask = create_block_mask(mask_mod, B, H, *lengths, where, row.block_size)
        tensors = *make_inputs(task.problem, where), make_sinks(task.problem, where)
        return cls(task, *tensors, score_mod, mask)

    def judge(self) -> Judge:
        """The judge of its outputs, by the float64 oracle."""
        task, where = self.task, self.q.device
        score, mask = moved(task.score, where), moved(task.mask, where)
        lists = None if task.lists is None else task.lists.to(where)
        sparsity = task.problem.structure.sparsity
        given = self.q, self.k, self.v, task.scale, score, mask
        return oracle(*given, lists, sparsity, self.sinks)


def print_would_time(titles: Sequence[str], as_json: bool, others: bool) -> None:
    """Print what a GPU would time; others: also torch's kernel and other libraries."""
    names = [OURS, DEFAULT, *([TORCH, *importable()] if others else [])]
    if as_json:
        say_json({"device": None, "would_time": titles, "beside": names})
        return
    say("torch sees no GPU here, so nothing was timed. On a GPU this times:")
    for title in titles:
        say(f"  {title}")
    left_out = "; libraries that cannot be imported here are not in this list" if others else ""
    say(f"each by {', '.join(names)}{left_out}")


def race_call(
    x: RowInputs, rounds: int, min_ms: float, rival: RivalChoice, others: bool = False
) -> Benched:
    """One call's race on a GPU, or on the CPU's clock in the interpreter.

    others: other libraries join where the call has no mods, or is causal.
    """
    q, k, v, task, mask, sinks = x.q, x.k, x.v, x.task, x.block_mask, x.sinks
    score_mod = x.score_mod
    common: dict[str, Any] = {"score_mod": score_mod, "block_mask": mask, "scale": task.scale}
    choice = plan(
        make_call(q, k, v, score_mod, mask, task.scale, True, False, None, None, sinks)
    ).launch.choice
    static = family_of(start := default(choice.problem, choice.device)).options_of(start)
    ours: _Call = partial(flex_attention, q, k, v, **common, enable_gqa=True, sinks=sinks)
    calls: dict[str, _Call] = {OURS: ours, DEFAULT: partial(ours, kernel_options=static)}
    if rival != "none":
        calls[TORCH] = partial(_torchs(TORCH_MODES[rival]), q, k, v, **common, enable_gqa=True)
    structure = task.problem.structure
    mask_is = structure.mask and structure.mask.mod.fingerprint
    square = q.shape[2] == k.shape[2] and mask_is == _causal()
    if others and structure.score is None and sinks is None and (mask_is is None or square):
        calls |= rivals(q, k, v, mask_is is not None, task.scale)
    with torch.no_grad():
        verdict = x.judge()((ours(), None, None))
        policy = task.policy
        samples = time_interleaved(
            calls,
            rounds=rounds,
            min_ms=min_ms,
            flush_l2=policy.cold_l2,
            graph=policy.graph,
            clock="cuda" if q.is_cuda else "cpu",
        )
    failures = [f"{name}: {s.failure}" for name, s in samples.items() if s.failure is not None]
    if sinks is not None and rival != "none":
        failures.append(f"{TORCH} has no sinks: its time is without them")
    notes = failures if verdict.passed else [verdict.message(), *failures]
    return Benched(
        task.title,
        choice.how,
        short(choice.config),
        {name: _number(each.median) for name, each in samples.items()},
        {name: _ratio(samples[name], samples[OURS]) for name in samples if name != OURS},
        verdict.passed,
        *error_of(verdict),
        "; ".join(notes),
    )


def error_of(verdict: Verdict) -> tuple[float, float]:
    """The largest error of `out`, and what it may be; NaN where nothing was compared."""
    if not verdict.rows:
        return math.nan, math.nan
    return verdict.rows[0].error, verdict.rows[0].budget


def _causal() -> str:
    bound = bind(causal, "mask")
    assert bound is not None
    return bound.mod.fingerprint


def _torchs(mode: str | None) -> _Call:
    from torch.nn.attention.flex_attention import flex_attention as torchs

    torch.compiler.reset()  # else the limit of recompilations is reached after a few rows
    rival: _Call = torchs
    return torch.compile(rival, dynamic=False, mode=mode)


def _number(us: float) -> float | None:
    return us if math.isfinite(us) else None


def _ratio(theirs: Samples, ours: Samples) -> float | None:
    if theirs.failure is not None or ours.failure is not None:
        return None
    return _number(paired_ratio(theirs, ours).value)


def results_of(done: Sequence[Benched], device: str) -> BenchResults:
    """The races as the page of a report shows them."""
    return from_verb({"device": device, "rows": [asdict(each) for each in done]})


def print_rows(done: Sequence[Benched]) -> None:
    """Print each row's times and ratios, and what it has to note."""
    say("median microseconds, and the time over ours: above 1 flexattn is faster")
    for each in done:
        gate = "green" if each.passed else "RED"
        say(f"{each.title}: {each.how} {each.config}")
        say(f"  gate {gate}, error {each.error:.1e} of {each.budget:.1e}")
        for name, us in each.us.items():
            ratio, time = each.ratio.get(name), "-" if us is None else f"{us:.1f}"
            say(f"  {name:<17}{time:>9}" + ("" if ratio is None else f"{ratio:>7.2f}"))
        if each.note:
            say(f"  {each.note}")


SDPA, FLASHINFER = "SDPA", "FlashInfer"
_FUNCTIONS = {
    "FlashAttention 2": ("flash_attn", "flash_attn_func"),
    "FlashAttention 3": ("flash_attn_interface", "flash_attn_func"),
    "FlashAttention 4": ("flash_attn.cute.interface", "flash_attn_func"),
    FLASHINFER: ("flashinfer", "single_prefill_with_kv_cache"),
}


def importable() -> dict[str, Callable[..., Any]]:
    """The function of each library that is installed, SDPA first."""
    found = {SDPA: scaled_dot_product_attention}
    for name, (module, function) in _FUNCTIONS.items():
        try:
            found[name] = getattr(import_module(module), function)
        except Exception:  # one that is broken raises anything
            continue
    return found


def rivals(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> dict[str, Callable[[], Any]]:
    """A call of each library for attention without mods; q, k and v as flex_attention's."""
    rows = [each.transpose(1, 2).contiguous() for each in (q, k, v)]
    calls: dict[str, Callable[[], Any]] = {}
    for name, attend in importable().items():
        if name == SDPA:
            calls[name] = partial(attend, q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        elif name != FLASHINFER:
            calls[name] = partial(attend, *rows, causal=causal, softmax_scale=scale)
        elif q.shape[0] == 1:
            one = (each[0] for each in rows)
            calls[name] = partial(attend, *one, causal=causal, sm_scale=scale)
    return calls
