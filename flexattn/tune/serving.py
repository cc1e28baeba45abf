"""Serving kernels as the tuner sees them: configs at an effort, sources to build, tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import log2
from typing import Any

from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.kernels.base.family import Effort
from flexattn.kernels.base.source import Source
from flexattn.kernels.paged_decode.config import ServingConfig, ServingForm
from flexattn.kernels.paged_decode.family import PAGED_DECODE
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.kernels.paged_decode.space import serving_candidates, serving_space
from flexattn.measure.task import ServingTask
from flexattn.mods import Bound
from flexattn.problem import DTYPES, Shape
from flexattn.records.record import Policy
from flexattn.serving.cache import asked_scales
from flexattn.serving.request import KV_DTYPES, Maxima, form_of
from flexattn.serving.tuned import Lengths, ServingProblem, batch_lengths

# Configs of the quick effort: the default and those beside it on one axis, the nearest first.
_QUICK = 32
_LEFT_OUT = "left out by quick"


def serving_configs(
    problem: ServingProblem, device: Device, effort: Effort, seeds: Sequence[Any] = ()
) -> tuple[tuple[Any, ...], tuple[tuple[str, int], ...]]:
    """Configs to choose from, the static default first, and how many others were left out.

    quick: 32 near the defaults. full and exhaustive: all that can run. seeds that can run join.
    """
    every = serving_space(problem.form, device)
    chosen: Sequence[ServingConfig] = every
    if effort == "quick":
        first = every[0]
        near = sorted(every, key=lambda each: _distance(first, each))
        # The other kind of kernel is far on many axes: where it starts is raced too.
        defaults = serving_candidates(problem.form, device)
        others = [each for each in defaults if each.template != first.template][:1]
        chosen = [*near[: _QUICK - len(others)], *others]
    fitting = (
        each for each in seeds if not serving_reasons(each, problem.form, device)
    )  # fmt: skip
    left = len(every) - len(chosen)
    return tuple(dict.fromkeys((*chosen, *fitting))), ((_LEFT_OUT, left),) * (left > 0)


def _distance(first: ServingConfig, other: ServingConfig) -> tuple[int, float]:
    """On how many axes a config differs, then by how much: doublings of a number, else 1."""
    steps = []
    for field in fields(first):
        a, b = getattr(first, field.name), getattr(other, field.name)
        if a == b:
            continue
        numbers = type(a) is int and type(b) is int and min(a, b) > 0
        steps.append(abs(log2(a / b)) if numbers else 1.0)
    return len(steps), sum(steps)


def serving_sources(
    form: ServingForm, configs: Sequence[Any], device: Device
) -> Iterator[tuple[ServingConfig, Source, Source | None]]:
    """Each config with its kernel, and the second one that merges where the config has it."""
    title = f"serving {form.dtype} keys {form.kv_dtype} page={form.page} for {device.arch}"
    for config in configs:
        source = PAGED_DECODE.render(form, config, device, title)
        yield config, source, PAGED_DECODE.combine(form, config, device)


def serving_task(
    title: str,
    shape: Shape,
    dtype: str,
    device: Device,
    policy: Policy,
    scale: float,
    score: Bound | None,
    mask: Bound | None,
    *,
    page: int,
    lengths: Lengths = "uniform",
    layout: str = "NHD",
    kv_dtype: str = "",
    scaled: str = "",
    sinks: bool = False,
    shared_kv: bool = False,
    batch_invariant: bool = False,
) -> ServingTask:
    """A plan whose maxima are the sizes of a shape, with a batch of this class.

    kv_dtype: "" for dtype; a cache of eight bits has scales, of what `scaled` says. Raises
    InputError for what no plan is made for.
    """
    named = {name: each for each, name in KV_DTYPES.items()}
    kv = named.get(kv_dtype or dtype)
    if kv is None:
        raise InputError(f"kv_dtype {kv_dtype!r}", f"it is one of {', '.join(named)}")
    q_lens, kv_lens = batch_lengths(lengths, shape.B, shape.q_len, shape.kv_len)
    widths = {name: each for each, name in DTYPES.items()}
    if dtype not in widths:
        rule = f"queries of a plan are {', '.join(widths)}"
        raise InputError(f"dtype {dtype!r}", rule, "say float8_e4m3fn in kv_dtype, for the cache")
    wide = widths[dtype]
    maxima = Maxima(
        shape.B, shape.q_len, sum(q_lens) if lengths == "mixed" else 0, shape.kv_len, shape.Hq,
        shape.Hkv, shape.D, shape.Dv, wide, kv, page, layout,
    )  # fmt: skip
    if lengths == "mixed":
        maxima = replace(maxima, q_len=1)
    maxima.check()
    form = form_of(
        maxima, score, mask, **asked_scales(scaled or kv.itemsize == 1, page)._asdict(),
        shared_kv=shared_kv, sinks=sinks, positive_scale=scale > 0,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    problem = ServingProblem(form, maxima, lengths)
    return ServingTask(title, problem, device, policy, scale, q_lens, kv_lens, score, mask)
