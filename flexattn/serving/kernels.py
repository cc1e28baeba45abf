"""The kernels of a plan: chosen and built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flexattn.device import Device, detect
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.kernels.base.source import Source
from flexattn.kernels.paged_decode.config import ServingConfig, ServingForm
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.kernels.paged_decode.merge_shape import merge_shape
from flexattn.kernels.paged_decode.source import (
    render_serving,
    render_serving_combine,
)
from flexattn.kernels.paged_decode.space import serving_candidates
from flexattn.runtime.build import Kernel, builder
from flexattn.runtime.fallback import Attempt, serve
from flexattn.runtime.outcomes import COMPILER_FIELDS, memory
from flexattn.serving.request import Maxima
from flexattn.serving.tuned import tuned
from flexattn.settings import current

# What 32 bits count beyond a batch's tiles: kernels add their number of programs.
_UNCOUNTED = 2**16


class Kernels(NamedTuple):
    """What a plan launches. programs: of the serving kernel; merges: of the one that merges.

    combine: None also for a shared prefix, whose parts the last kernel of its cascade merges.
    gpu: its index, -1 where there is none. attempts: what was tried, what serves last. tuned: the
    config is a record's of this environment.
    """

    config: ServingConfig
    target: Device
    gpu: int
    attend: Kernel
    combine: Kernel | None
    programs: int
    merges: int
    origin: str = ""
    attempts: tuple[Attempt, ...] = ()
    tuned: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A config that may serve a form; see flexattn.runtime.fallback."""

    problem: ServingForm
    target: Device
    config: ServingConfig
    origin: str
    measured: bool
    form: str
    tuned: bool = False

    @property
    def tiles(self) -> ServingConfig:
        return self.config

    def describe(self) -> str:
        return f"{self.config} ({self.origin})"

    def sources(self) -> tuple[Source, ...]:
        form, target = self.problem, self.target
        title = (
            f"serving {form.dtype} keys {form.kv_dtype} D={form.head_dim_qk}/{form.head_dim_v} "
            f"group={form.group} page={form.page} for {target.arch}"
        )
        attend = render_serving(form, self.config, target, title)
        if not self.config.merges_apart or form.prefix:
            return (attend,)
        return attend, render_serving_combine(form, self.config, target)


def build(
    form: ServingForm,
    maxima: Maxima,
    device: torch.device,
    config: ServingConfig | None,
    lengths: str = "",
) -> Kernels:
    """Compile a form's kernels with a config, a tuned one, or the first default that serves.

    Raises ConfigError or BuildError where none does, with what became of each, and InputError for
    a batch of too many tiles.
    """
    if device.type == "cpu" and not current().interpret:
        raise UnsupportedError(
            "a DecodePlan for tensors on the CPU",
            "its kernels run on a GPU, or in Triton's interpreter",
            "set FLEXATTN_INTERPRET=1",
        )
    target = detect(device)
    index = device.index if device.type == "cuda" else -1
    found = list(_candidates(form, maxima, target, config, lengths))
    _check_tiles(maxima, found[0].config)

    def compiled(source: Source) -> Kernel:
        return builder().kernel(source, target, index)

    title = f"serving {form.dtype} D={form.head_dim_qk}/{form.head_dim_v} page={form.page}"
    served = serve(found, compiled, target, title, memory())
    chosen = served.candidate.config
    _check_tiles(maxima, chosen)
    attend, combine = (*served.kernels, None)[:2]
    assert attend is not None
    programs = chosen.programs(target)
    merges = merge_shape(form, chosen, target).grid(programs)
    return Kernels(
        chosen, target, index, attend, combine, programs, merges, served.candidate.origin,
        served.attempts, served.candidate.tuned,
    )  # fmt: skip


def _check_tiles(maxima: Maxima, config: ServingConfig) -> None:
    if maxima.tiles(config) >= 2**31 - _UNCOUNTED:
        raise InputError(
            f"{maxima} makes {maxima.tiles(config)} tiles",
            "the tiles of a batch are counted in 32 bits",
            "plan for fewer requests or keys",
        )


def _candidates(
    form: ServingForm, maxima: Maxima, target: Device, config: ServingConfig | None, lengths: str
) -> Iterator[_Candidate]:
    """What to try in turn: the caller's config alone, or a record's, then the static defaults."""
    if config is not None:
        found = serving_reasons(config, form, target)
        if found:
            raise ConfigError(f"{config}", "; ".join(found), "leave config None for the default")
        yield _Candidate(form, target, config, "config=", True, "config=")
        return
    known = tuned(form, maxima, target, lengths)
    if known is not None:
        measured = not COMPILER_FIELDS.intersection(known.stored.differing)
        yield _Candidate(
            form,
            target,
            known.config,
            known.origin,
            measured,
            "record",
            not known.stored.differing,
        )
    for each in serving_candidates(form, target):
        yield _Candidate(form, target, each, "static default", False, each.template)
