"""One workload of the demo without a GPU: a few configs of its space through the gate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from flexattn.cli.offline import nearest
from flexattn.cli.workloads import DemoWorkload
from flexattn.errors import FlexAttnError
from flexattn.frontend.admission import make_call
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.registry import family_of, short
from flexattn.verify.oracle import Slices


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
