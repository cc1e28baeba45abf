"""The demo's workloads, attention of real models small enough to interpret; its pictures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flexattn.block_mask.visual import Picture, visualize
from flexattn.cli.bench import RowInputs
from flexattn.cli.offline import nearest
from flexattn.cli.terminal import table_of, tell
from flexattn.errors import FlexAttnError
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.registry import family_of, short
from flexattn.problem import Shape
from flexattn.tuning.tasks import mods_of
from flexattn.tuning.workload import ModPath, Row


@dataclass(frozen=True)
class DemoWorkload:
    """One call. window: keys before the query's own, 0 for all; softcap: 0 where there is none."""

    name: str
    B: int
    Hq: int
    Hkv: int
    q_len: int
    kv_len: int
    D: int
    window: int = 0
    softcap: float = 0.0

    def describe(self) -> str:
        """Heads, lengths and mods in a table's cell."""
        parts = [f"B{self.B} {self.Hq}:{self.Hkv} heads", f"{self.q_len}x{self.kv_len} D{self.D}"]
        if self.q_len > 1:
            parts.append(f"window {self.window}" if self.window else "causal")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        return ", ".join(parts)

    def row(self, dtype: str = "bfloat16") -> Row:
        """The call as a workload file would say it; a decode's query sees its whole cache."""
        scored = ModPath("flexattn.catalogue:softcap", (self.softcap,)) if self.softcap else None
        masked = None
        if self.window:
            masked = ModPath("flexattn.catalogue:sliding_window", (self.window,))
        elif self.q_len > 1:
            masked = ModPath("flexattn.catalogue:causal")
        shape = Shape(self.B, self.Hq, self.Hkv, self.q_len, self.kv_len, self.D, self.D)
        return Row(self.name, None, dtype, shape, scored, masked, (128, 128), None, ())


FULL_WORKLOADS = (
    DemoWorkload("llama-3 prefill", 1, 32, 8, 8192, 8192, 128),
    DemoWorkload("gemma-2 prefill", 1, 16, 8, 8192, 8192, 256, window=4096, softcap=50.0),
    DemoWorkload("llama-3 decode", 8, 32, 8, 1, 8192, 128),
)
# Odd lengths: they end where no tile does.
SMALL_WORKLOADS = (
    DemoWorkload("llama-3 prefill", 1, 4, 1, 301, 301, 128),
    DemoWorkload("gemma-2 prefill", 1, 4, 2, 333, 333, 256, window=160, softcap=50.0),
    DemoWorkload("llama-3 decode", 1, 32, 8, 1, 777, 128),
)


# Configs of a workload that are interpreted, and seconds after which it gets its first one alone.
_INTERPRETED, PATIENCE = 2, 20.0


@dataclass(frozen=True)
class DemoVariant:
    """One config of ours, and its gate's verdict; note: why it is red, or cannot run."""

    config: str
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class DemoTrial:
    """The results of one workload; the first variant is the one that a plain call runs.

    error, budget: the largest of `out` in the slice that uses most of its budget.
    """

    workload: str
    shape: str
    variants: tuple[DemoVariant, ...]
    error: float
    budget: float

    @property
    def passed(self) -> bool:
        """True where the plain call's gate is green, and no variant's is red."""
        return bool(self.variants) and all(variant.passed for variant in self.variants)


def run_trial(workload: DemoWorkload) -> DemoTrial:
    """Run a workload's rendered kernels on CPU tensors and judge them, of a few configs.

    After 20 s only the first one. A config that is too large for the device is left out; only its
    note remains.
    """
    x = RowInputs.of(workload.row("float16"), torch.device("cpu"))

    def attend(options: dict[str, int | bool | str] | None) -> Tensor:
        return flex_attention(
            x.q, x.k, x.v, score_mod=x.score_mod, block_mask=x.block_mask, enable_gqa=True,
            kernel_options=options,
        )  # fmt: skip

    variants: list[DemoVariant] = []
    worst = (math.nan, math.nan)
    begin = time.perf_counter()
    with torch.no_grad():
        judge = x.judge()
        call = make_call(x.q, x.k, x.v, x.score_mod, x.block_mask, None, True, False, None, None)
        choice = plan(call).launch.choice
        for config in nearest(choice.problem, choice.device, choice.config, _INTERPRETED):
            if variants and time.perf_counter() - begin > PATIENCE:
                break
            name = short(config)
            try:
                torch.full_like(x.q, math.nan)  # unwritten output then shows as NaN
                forced = family_of(config).options_of(config) if variants else None
                verdict = judge((attend(forced), None, None))
            except FlexAttnError as error:
                # Only the plain call must run; a variant may be too large for this device.
                variants.append(DemoVariant(name, bool(variants), error.got))
                continue
            if not variants and verdict.rows:
                worst = verdict.rows[0].error, verdict.rows[0].budget
            note = "" if verdict.passed else verdict.message()
            variants.append(DemoVariant(name, verdict.passed, note))
    return DemoTrial(workload.name, workload.describe(), tuple(variants), *worst)


def verdict_table(trials: Iterable[DemoTrial], title: str) -> Table:
    """The error, budget and verdict of each workload."""
    table = table_of("workload", "shape", ">max error", ">budget", "gate", title=title)
    for each in trials:
        verdict = "[green]passed" if each.passed else "[red]FAILED"
        numbers = f"{each.error:.1e}", f"{each.budget:.1e}"
        table.add_row(each.workload, each.shape, *numbers, verdict)
    return table


def print_notes(console: Console, trials: Iterable[DemoTrial]) -> None:
    """Why a variant has no time: its gate's report, or what the device lacks."""
    for trial in trials:
        for variant in trial.variants:
            if variant.note:
                text = f"{trial.workload}, {variant.config}: {variant.note}"
                tell(console, text, "" if variant.passed else "red")


# Cells of a mask on a terminal.
CELLS = 64


def window(workloads: Sequence[DemoWorkload]) -> Picture:
    """The blocks of the first sliding window among the workloads."""
    workload = next(each for each in workloads if each.window)
    mask = mods_of(workload.row())[1]
    assert mask is not None
    return visualize(mask, workload.q_len, workload.kv_len, cells=CELLS)
