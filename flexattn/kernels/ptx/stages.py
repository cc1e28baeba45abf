"""Stages: what a rendered kernel asks of its compile beyond what Triton does by itself."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.kernels.ptx.assembler import Ptxas

__all__ = ["OWN_STAGES", "Stages"]


@dataclass(frozen=True, slots=True)
class Stages:
    """passes: names of what is done to the PTX. ptxas: what makes machine code of it."""

    passes: tuple[str, ...] = ()
    ptxas: Ptxas = ""


# As Triton compiles by itself.
OWN_STAGES = Stages()
