"""Paged decode as a family: what a DecodePlan launches."""

from __future__ import annotations

from dataclasses import fields

from flexattn.device import Device
from flexattn.kernels.base.source import Source
from flexattn.kernels.paged_decode.config import ServingConfig, ServingForm
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine

# Told in a table's cell without their names.
_NAMELESS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "per_sm", "combine")


class _PagedDecode:
    name = "paged_decode"
    kind = "serving"

    def render(
        self, form: ServingForm, config: ServingConfig, device: Device, title: str
    ) -> Source:
        return render_serving(form, config, device, title)

    def combine(self, form: ServingForm, config: ServingConfig, device: Device) -> Source | None:
        """The second kernel that merges, where the config has one."""
        if not config.merges_apart or form.prefix:
            return None
        return render_serving_combine(form, config, device)

    def launch_key(self, config: ServingConfig) -> tuple[object, ...]:
        """The whole config: how many programs run and what merges them is not in the code."""
        return (config,)

    def short(self, config: ServingConfig) -> str:
        """16x64 w4 s3 p2 last has two programs on an SM, the last of which merges."""
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"]
        parts += [f"p{config.per_sm}", config.combine]
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name not in _NAMELESS and value != field.default:
                parts.append(f"{field.name}={value}")
        return " ".join(parts)


PAGED_DECODE = _PagedDecode()
