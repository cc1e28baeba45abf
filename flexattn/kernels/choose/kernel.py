"""Structure, config -> Source: the template that a config is of renders it."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base import source
from flexattn.kernels.base.config import Config, GluonPrefillConfig
from flexattn.kernels.base.source import Source
from flexattn.kernels.hopper import source as gluon_source
from flexattn.kernels.triton.amd import hints
from flexattn.kernels.triton.hinted import hinted
from flexattn.problem import Structure

__all__ = ["render"]


def render(structure: Structure, config: Config, device: Device, title: str) -> Source:
    """The kernel of a structure with a config; title goes into its header."""
    if isinstance(config, GluonPrefillConfig):
        return gluon_source.render(structure, config, device, title)
    return hinted(source.render(structure, config, device, title), hints(config))
