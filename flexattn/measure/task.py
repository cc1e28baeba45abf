"""Task: one problem to tune, as data. Workers receive this, never a callable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flexattn.device import Device
from flexattn.errors import UnsupportedError
from flexattn.mods import Bound
from flexattn.problem import Kind, Problem
from flexattn.problem.serving import ServingProblem
from flexattn.records.record import Policy
from flexattn.runtime.launch import Lists


@dataclass(frozen=True)
class Task:
    """A problem with the real mask and captured tensors, on the CPU, so that any process runs it.

    score, mask: the mods as expressions, with the values they capture. lists: the BlockMask's own.
    by_key: beside them, those that a backward reads. scale: of the softmax. title: what people
    call it ("llama3-8b decode B8 8k").
    """

    title: str
    problem: Problem
    device: Device
    policy: Policy
    scale: float
    score: Bound | None = None
    mask: Bound | None = None
    lists: Lists | None = None
    by_key: Lists | None = None

    @property
    def kind(self) -> Kind:
        """Of its record."""
        return self.problem.structure.kind


@dataclass(frozen=True, kw_only=True)
class ServingTask(Task):
    """A DecodePlan to tune, with a batch that stands for those it will run.

    q_lens, kv_lens: query positions and keys of each request; the queries are a request's last
    positions.
    """

    problem: ServingProblem
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


AnyTask: TypeAlias = Task


def call_of(task: Task) -> Task:
    """The task, of a call's forward; raises UnsupportedError for others, which GPUs alone have."""
    if task.kind in ("serving", "backward"):
        raise UnsupportedError(
            f"{task.title} for {task.device.name}",
            "serving plans and gradients run on GPUs",
            "leave rows with page_size, kind = 'serving' or backward = true out",
        )
    return task
