"""Stages: what a rendered kernel asks of its compile beyond what Triton does by itself."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flexattn.kernels.ptx.assembler import Ptxas


@dataclass(frozen=True, slots=True)
class Stages:
    """passes: over the PTX, in order, each by its module in kernels/. ptxas: what assembles it.

    A pass's module has `merged(ptx)`, and `block_warps(text)` for the warps that a block of a
    kernel starts after it, None where the text does not ask for the pass.
    """

    passes: tuple[str, ...] = ()
    ptxas: Ptxas = ""


# As Triton compiles by itself.
OWN_STAGES = Stages()


def module_of(name: str) -> Any:
    """The module of a pass."""
    return import_module(f"flexattn.kernels.{name}")


def block_warps(stages: Stages, text: str) -> int | None:
    """The warps that a block starts after the passes; None where they do not change that."""
    found = (module_of(name).block_warps(text) for name in stages.passes)
    return next((warps for warps in found if warps is not None), None)
