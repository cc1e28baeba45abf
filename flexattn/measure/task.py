"""Task: one problem to tune, as data. Workers receive this, never a callable."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.cache.record import Policy
from flexattn.device import Device
from flexattn.launch import Lists
from flexattn.mods import Bound
from flexattn.problem import Problem

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """A problem with the real mask and captured tensors, on the CPU, so that any process runs it.

    score, mask: the mods as expressions, with the values they capture. lists: the BlockMask's own.
    scale: of the softmax. title: what people call it ("llama3-8b decode B8 8k").
    """

    title: str
    problem: Problem
    device: Device
    policy: Policy
    scale: float
    score: Bound | None = None
    mask: Bound | None = None
    lists: Lists | None = None
