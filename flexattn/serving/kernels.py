"""The kernels of a plan: chosen and built."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexattn.build import Kernel, builder
from flexattn.device import Device, detect
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.render.serving import combine_rows, render_serving, render_serving_combine
from flexattn.serving.request import Maxima
from flexattn.serving.tuned import tuned
from flexattn.settings import current
from flexattn.space.serving import ServingConfig, ServingForm, reasons, serving_candidates

__all__ = ["Kernels", "build"]


class Kernels(NamedTuple):
    """What a plan launches. programs: of the serving kernel; merges: of the one that merges.

    combine: None also for a shared prefix, whose parts the last kernel of its cascade merges.
    gpu: its index, -1 where there is none.
    """

    config: ServingConfig
    target: Device
    gpu: int
    attend: Kernel
    combine: Kernel | None
    programs: int
    merges: int
    origin: str = ""


def build(
    form: ServingForm,
    maxima: Maxima,
    device: torch.device,
    config: ServingConfig | None,
    lengths: str = "",
) -> Kernels:
    """Compile a form's kernels with a config, a tuned one, or the first default that fits.

    Raises ConfigError where none does, and InputError for a batch of too many tiles.
    """
    if device.type == "cpu" and not current().interpret:
        raise UnsupportedError(
            "a DecodePlan for tensors on the CPU",
            "its kernels run on a GPU, or in Triton's interpreter",
            "set FLEXATTN_INTERPRET=1",
        )
    target = detect(device)
    index = device.index if device.type == "cuda" else -1
    for chosen, origin in _configs(form, maxima, target, config, lengths):
        if maxima.tiles(chosen) >= 2**31:
            raise InputError(
                f"{maxima} makes {maxima.tiles(chosen)} tiles",
                "the tiles of a batch are counted in 32 bits",
                "plan for fewer requests or keys",
            )
        title = (
            f"serving {form.dtype} keys {form.kv_dtype} D={form.head_dim_qk}/{form.head_dim_v} "
            f"group={form.group} page={form.page} for {target.arch}"
        )
        attend = builder().kernel(render_serving(form, chosen, target, title), target, index)
        if attend.shared_memory > target.shared_memory:
            continue
        combine, programs = None, chosen.programs(target)
        if chosen.combine == "launch" and not form.prefix:
            source = render_serving_combine(form, chosen, target)
            combine = builder().kernel(source, target, index)
        merges = programs * chosen.BLOCK_M // combine_rows(form, chosen)
        return Kernels(chosen, target, index, attend, combine, programs, merges, origin)
    raise ConfigError(
        f"no config fits {form}",
        f"a kernel has {target.shared_memory} bytes of shared memory",
        "use smaller BLOCK_N, or num_stages=1",
    )


def _configs(
    form: ServingForm, maxima: Maxima, target: Device, config: ServingConfig | None, lengths: str
) -> list[tuple[ServingConfig, str]]:
    """What to try in turn, each with where it comes from."""
    if config is None:
        known = tuned(form, maxima, target, lengths)
        defaults = ((each, "static default") for each in serving_candidates(form, target))
        return [*([known[:2]] if known is not None else []), *defaults]
    found = reasons(config, form, target)
    if found:
        raise ConfigError(f"{config}", "; ".join(found), "leave config None for the default")
    return [(config, "config=")]
