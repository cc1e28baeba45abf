"""Measurer: what a tuner talks to, a device's worker or a replay of stored results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from flexattn.kernels.base.config import Config
from flexattn.measure.task import AnyTask
from flexattn.records.record import Failed, Gated


class Measurer(Protocol):
    """Judges and times the configs of one task at a time; a config that fails is a value.

    Only `open` raises for what the task is. Every method raises MeasureError where nothing of a
    task can be measured, and DeviceError where nothing of any: the device is gone.
    """

    def start(self) -> None:
        """Bring up what measuring needs, so that no task pays for it."""

    def open(self, task: AnyTask) -> None:
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
