"""Task: one problem to tune, as data; and Measurer, which judges and times its configs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flexattn.device import Device
from flexattn.errors import UnsupportedError
from flexattn.kernels.base.config import Config
from flexattn.mods import Bound
from flexattn.problem import Kind, Problem
from flexattn.records.record import Failed, Gated, Policy
from flexattn.runtime.launch import Lists


@dataclass(frozen=True)
class Task:
    """A problem with the real mask and captured tensors, on the CPU, so that any process runs it.

    Workers receive it pickled, so it holds no callable.

    score, mask: the mods as expressions, with the values they capture. lists: the BlockMask's own.
    by_key: beside them, those that a backward reads. scale: of the softmax. title: what people
    call it ("llama3-8b decode B8 8k"). q_lens, kv_lens: of the batch that stands for those that a
    DecodePlan will run, query positions and keys of each request; the queries are a request's last
    positions.
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
    q_lens: tuple[int, ...] = ()
    kv_lens: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """The kind of its record."""
        return self.problem.structure.kind


def call_of(task: Task) -> Task:
    """The task, of a call's forward; raises UnsupportedError for others, which GPUs alone have."""
    if task.kind in ("serving", "backward"):
        raise UnsupportedError(
            f"{task.title} for {task.device.name}",
            "serving plans and gradients run on GPUs",
            "leave rows with page_size, kind = 'serving' or backward = true out",
        )
    return task


class Measurer(Protocol):
    """Judges and times the configs of one task at a time; a config that fails is a value.

    Only `open` raises for what the task is. Every method raises MeasureError where nothing of a
    task can be measured, and DeviceError where nothing of any: the device is gone.
    """

    def start(self) -> None:
        """Bring up what measuring needs, so that no task pays for it."""

    def open(self, task: Task) -> None:
        """Make the inputs of a task and what its outputs are judged by; ends the task before.

        Raises UnsupportedError or InputError for a task that this device cannot run.
        """

    def gate(self, config: Config) -> Gated | Failed:
        """Run a config once into poisoned outputs and judge them.

        Gated, also for an error over its budget; Failed for what has no error to compare, such as
        a kernel that does not build or leaves NaN.
        """

    def sample(
        self, configs: Sequence[Config], rounds: int, min_ms: float, limit_us: float = math.inf
    ) -> list[tuple[float, ...] | Failed]:
        """Microseconds per call of each config, one value a round, in one interleaved race.

        Values with one index were taken in the same round. A config that is slower than
        `limit_us` at its first estimate leaves with that one value, so does nobody else.
        min_ms: each value is the mean of as many calls as fill it.
        """

    def close(self) -> None:
        """Give the device back; nothing may be asked afterwards."""
