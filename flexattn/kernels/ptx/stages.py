"""Stages: what a rendered kernel asks of its compile beyond what Triton does by itself."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from flexattn.kernels.ptx.assembler import Ptxas


class Pass(Protocol):
    """What the module of a pass gives."""

    def merged(self, ptx: str) -> str:
        """The PTX after the pass; raises RenderError where it is not as the pass knows it."""

    def block_warps(self, text: str) -> int | None:
        """The warps that a block of a kernel starts after it; None where they stay."""


@dataclass(frozen=True, slots=True)
class Stages:
    """passes: over the PTX, in order, each by its module in kernels/. ptxas: what assembles it."""

    passes: tuple[str, ...] = ()
    ptxas: Ptxas = ""


# As Triton compiles by itself.
OWN_STAGES = Stages()


def pass_of(name: str) -> Pass:
    """The module of a pass."""
    return cast(Pass, import_module(f"flexattn.kernels.{name}"))


def block_warps(stages: Stages, text: str) -> int | None:
    """The warps that a block starts after the passes; None where they do not change that."""
    found = (pass_of(name).block_warps(text) for name in stages.passes)
    return next((warps for warps in found if warps is not None), None)
