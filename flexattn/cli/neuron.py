"""What verbs do for AWS Neuron's devices: rank by the cost model, and render, with no device."""

from __future__ import annotations

from flexattn.cache.record import Record
from flexattn.cli.watch import Lane
from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.measure.task import Task
from flexattn.neuron import feasible
from flexattn.neuron.lint import lint
from flexattn.neuron.tune import rank
from flexattn.problem import Problem
from flexattn.render.nki.source import NkiSource, render_nki, render_nki_combine
from flexattn.space import nki
from flexattn.space.nki_config import NkiConfig, NkiDecodeConfig
from flexattn.space.triton import Effort
from flexattn.tune.campaign import Tune

__all__ = ["check_measuring", "effort_there", "kernels", "ranker"]


def effort_there(effort: Effort) -> nki.Effort:
    """An effort as NKI's space knows it; raises InputError for exhaustive."""
    if effort == "exhaustive":
        raise InputError(
            "--effort exhaustive for a Neuron device",
            "it is quick or full",
            "full leaves none out",
        )
    return effort


def check_measuring(
    device: Device, effort: Effort, budget: float | None, storage: str | None
) -> None:
    """Raises InputError for what only a tuning that measures can take."""
    effort_there(effort)
    if budget is not None or storage is not None:
        raise InputError(
            f"--budget or --storage for {device.name}",
            "they are of a tuning that measures; this one asks a model",
        )


def ranker(lane: Lane, effort: nki.Effort) -> Tune:
    """A tuner for `campaign` that ranks a task's space and tells a lane how far it is."""

    def tune(task: Task) -> Record:
        lane.problem(task.title)
        return rank(task, effort, progress=lane)

    return tune


def kernels(problem: Problem, target: str) -> tuple[NkiConfig, NkiSource, NkiSource | None]:
    """The first config that fits, its kernel, and what merges the splits; both pass the lint."""
    config = feasible.default(problem, target)
    source = render_nki(problem, config, target, f"{problem.describe()} for {target}")
    split = isinstance(config, NkiDecodeConfig) and config.num_splits > 1
    combine = render_nki_combine(problem, target) if split else None
    for each in filter(None, (source, combine)):
        lint(each.text)
    return config, source, combine
