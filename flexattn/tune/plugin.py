"""Plugin: what tuning and the command line ask of a backend whose kernels are no GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from flexattn.device import Device
from flexattn.kernels.base.config import Fields
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose import registry
from flexattn.measure.task import AnyTask
from flexattn.problem import Problem
from flexattn.records.record import Environment
from flexattn.tune.campaign import TuneTask
from flexattn.tune.method import Method
from flexattn.tune.tuner import ProblemProgress


class PluginKernel(NamedTuple):
    """A rendered kernel: its config, its text and file, the file of what merges its splits."""

    config: Fields
    text: str
    path: Path
    combine: Path | None


class PluginSurvey(Protocol):
    """The configs that fit, the default first, and how many others each rule rejects."""

    @property
    def configs(self) -> Sequence[Fields]: ...
    @property
    def rejected(self) -> Sequence[tuple[str, int]]: ...


class Plugin(Protocol):
    """A module of these functions, flexattn.<backend>.plugin; they raise FlexAttnError."""

    def check_tuning(
        self, device: Device, effort: Effort, budget: float | None, storage: str | None
    ) -> None:
        """Refuse what a tuning for the device cannot be asked."""

    def survey_of(self, task: AnyTask, effort: Effort) -> PluginSurvey:
        """The space of a task."""

    def tuner(self, progress: ProblemProgress, effort: Effort, method: Method) -> TuneTask:
        """A tuner for `campaign`."""

    def tuning_environment(self, task: AnyTask) -> Environment:
        """The environment in which a record of `tuner` holds."""

    def render_kernel(self, problem: Problem, device: Device) -> PluginKernel:
        """The kernel of the first config that fits."""

    def rungs(self) -> Sequence[Any]:
        """The verifications of this machine: rows with name, proves, available and why."""


def plugin_of(backend: str) -> Plugin | None:
    """The plug-in of a device's backend, imported at its first use; None for a GPU."""
    return cast("Plugin | None", registry.plugin_module(backend))
