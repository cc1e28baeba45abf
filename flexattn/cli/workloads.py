"""The demo's workloads: attention of real models, small enough to interpret, and its verdicts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.create import create_block_mask
from flexattn.catalogue.masks import MaskMod, causal, sliding_window
from flexattn.catalogue.scores import ScoreMod, softcap
from flexattn.cli.offline import nearest, problem_of
from flexattn.cli.terminal import tell
from flexattn.errors import FlexAttnError
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.registry import family_of, short
from flexattn.problem import Kind, Problem, Shape
from flexattn.tune.workload import ModPath, Row
from flexattn.verify.oracle import Slices


@dataclass(frozen=True)
class Inputs:
    """Tensors and mods of one workload on one device."""

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | None


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

    @property
    def decodes(self) -> bool:
        """Whether one query token walks a cache of keys."""
        return self.q_len == 1

    def describe(self) -> str:
        """Heads, lengths and mods in a table's cell."""
        parts = [f"B{self.B} {self.Hq}:{self.Hkv} heads", f"{self.q_len}x{self.kv_len} D{self.D}"]
        if not self.decodes:
            parts.append(f"window {self.window}" if self.window else "causal")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        return ", ".join(parts)

    def score_mod(self) -> ScoreMod | None:
        """tanh softcapping where the model has it."""
        return softcap(self.softcap) if self.softcap else None

    def mask_mod(self) -> MaskMod | None:
        """Nothing for decode: the query sees its whole cache."""
        if self.decodes:
            return None
        return sliding_window(self.window) if self.window else causal

    def make(self, device: str, dtype: torch.dtype) -> Inputs:
        """Normal random q, k and v with the workload's mods."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.B, heads, length, self.D)
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        mask_mod = self.mask_mod()
        mask = None
        if mask_mod is not None:
            mask = create_block_mask(mask_mod, None, None, self.q_len, self.kv_len, device)
        q, k, v = (
            normal(heads, length)
            for heads, length in (
                (self.Hq, self.q_len),
                (self.Hkv, self.kv_len),
                (self.Hkv, self.kv_len),
            )
        )
        return Inputs(q, k, v, self.score_mod(), mask_mod, mask)

    def row(self) -> Row:
        """The call as a workload file would say it, in bfloat16."""
        scored = ModPath("flexattn.catalogue:softcap", (self.softcap,)) if self.softcap else None
        masked = None
        if not self.decodes:
            masked = ModPath("flexattn.catalogue:causal")
        if self.window:
            masked = ModPath("flexattn.catalogue:sliding_window", (self.window,))
        shape = Shape(self.B, self.Hq, self.Hkv, self.q_len, self.kv_len, self.D, self.D)
        return Row(self.name, None, "bfloat16", shape, scored, masked, (128, 128), None, ())

    def problem(self, dtype: str) -> Problem:
        """The key of the call, made without a tensor."""
        shape = Shape(self.B, self.Hq, self.Hkv, self.q_len, self.kv_len, self.D, self.D)
        kind: Kind = "decode" if self.decodes else "prefill"
        return problem_of(kind, dtype, shape, self.score_mod(), self.mask_mod())


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


@dataclass(frozen=True)
class DemoVariant:
    """One config of ours, and its gate's verdict; note: why it is red, or cannot run."""

    config: str
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class DemoTrial:
    """What one workload showed; the first variant is what a plain call runs.

    error, budget: the largest of `out` in the slice that uses most of its budget.
    """

    workload: str
    shape: str
    variants: tuple[DemoVariant, ...]
    error: float
    budget: float

    @property
    def passed(self) -> bool:
        """Whether the plain call's gate is green, and no variant's is red."""
        return bool(self.variants) and all(variant.passed for variant in self.variants)


def run_trial(
    workload: DemoWorkload, dtype: torch.dtype, configs: int, seconds: float
) -> DemoTrial:
    """Gate up to this many configs on CPU tensors; after that many seconds only the first.

    A config that is too large for the device is left out; only its note remains.
    """
    x = workload.make("cpu", dtype)

    def attend(options: dict[str, int | bool | str] | None) -> Tensor:
        out = flex_attention(
            x.q, x.k, x.v, score_mod=x.score_mod, block_mask=x.block_mask, enable_gqa=True,
            kernel_options=options,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    variants: list[DemoVariant] = []
    worst = (math.nan, math.nan)
    begin = time.perf_counter()
    with torch.no_grad():
        slices = Slices.of(x.q, x.k, x.v, x.score_mod, x.mask_mod)
        call = make_call(x.q, x.k, x.v, x.score_mod, x.block_mask, None, True, False, None, None)
        choice = plan(call).launch.choice
        for config in nearest(choice.problem, choice.device, choice.config, configs):
            if variants and time.perf_counter() - begin > seconds:
                break
            name = short(config)
            try:
                torch.full_like(x.q, math.nan)  # unwritten output then shows as NaN
                forced = family_of(config).options_of(config) if variants else None
                verdict = slices.judge(attend(forced))
            except FlexAttnError as error:
                # Only the plain call must run; a variant may be too large for this device.
                variants.append(DemoVariant(name, bool(variants), error.got))
                continue
            if not variants and verdict.rows:
                worst = verdict.rows[0].error, verdict.rows[0].budget
            note = "" if verdict.passed else verdict.message()
            variants.append(DemoVariant(name, verdict.passed, note))
    return DemoTrial(workload.name, workload.describe(), tuple(variants), *worst)


def verdict_table(title: str) -> Table:
    """A table whose first columns are those of `cells`."""
    found = Table(title=title)
    found.add_column("workload", no_wrap=True)
    found.add_column("shape")
    for name in ("max error", "budget"):
        found.add_column(name, justify="right")
    found.add_column("gate")
    return found


def verdict_cells(
    name: str, shape: str, error: float, budget: float, passed: bool
) -> tuple[str, ...]:
    """Name, shape, error, budget and verdict of a workload."""
    verdict = "[green]passed" if passed else "[red]FAILED"
    return name, shape, f"{error:.1e}", f"{budget:.1e}", verdict


def print_notes(console: Console, trials: Iterable[DemoTrial]) -> None:
    """Why a variant has no time: its gate's report, or what the device lacks."""
    for trial in trials:
        for variant in trial.variants:
            if variant.note:
                text = f"{trial.workload}, {variant.config}: {variant.note}"
                tell(console, text, "" if variant.passed else "red")
