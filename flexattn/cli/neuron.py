"""What verbs do for AWS Neuron's devices: rank by the cost model, and render, with no device."""

from __future__ import annotations

from dataclasses import replace

from flexattn.cli.watch import Lane
from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.kernels.base.family import Effort
from flexattn.kernels.nki import space as nki
from flexattn.kernels.nki.config import NkiConfig
from flexattn.kernels.nki.source import NkiSource, render_nki, render_nki_combine
from flexattn.measure.task import AnyTask, call_of
from flexattn.neuron import feasible
from flexattn.neuron.instance import Instance, instance
from flexattn.neuron.lint import lint
from flexattn.neuron.measure import measured
from flexattn.neuron.tune import rank, ranking_environment
from flexattn.problem import Problem
from flexattn.records.record import Environment, Record
from flexattn.tune.campaign import TuneTask
from flexattn.tune.method import Method


def effort_there(effort: Effort) -> nki.NkiEffort:
    """An effort as NKI's space knows it; raises InputError for exhaustive."""
    if effort == "exhaustive":
        raise InputError(
            "--effort exhaustive for a Neuron device",
            "it is quick or full",
            "full leaves none out",
        )
    return effort


def measures(device: Device) -> Instance | None:
    """This machine, where it is an instance of this device that can build and run kernels."""
    here, _ = instance()
    return here if here is not None and here.target == device.name else None


def check_measuring(
    device: Device, effort: Effort, budget: float | None, storage: str | None
) -> None:
    """Raises InputError for what only a tuning that measures can take, where this one does not."""
    effort_there(effort)
    if storage is not None:
        raise InputError(f"--storage for {device.name}", "one instance tunes a problem by itself")
    if budget is not None and measures(device) is None:
        raise InputError(
            f"--budget for {device.name}",
            "it is of a tuning that measures; this one asks a model",
        )


def ranker(lane: Lane, effort: nki.NkiEffort, method: Method) -> TuneTask:
    """A tuner for `campaign`, which measures where this is an instance of the task's device.

    Elsewhere it ranks the task's space by the model; it tells a lane how far it is.
    """

    def tune(given: AnyTask) -> Record:
        task = call_of(given)
        lane.problem(task.title)
        here = measures(task.device)
        if here is not None:
            return measured(task, here, method, effort, lane)
        return rank(task, effort, progress=lane)

    return tune


def environment_there(given: AnyTask) -> Environment:
    """Where a record of `ranker` holds."""
    task = call_of(given)
    here = measures(task.device)
    found = ranking_environment(task)
    return found if here is None else replace(found, triton=here.compiler)


def kernels(problem: Problem, target: str) -> tuple[NkiConfig, NkiSource, NkiSource | None]:
    """The first config that fits, its kernel, and what merges the splits; both pass the lint."""
    config = feasible.default_config(problem, target)
    source = render_nki(problem, config, target, f"{problem.describe()} for {target}")
    combine = render_nki_combine(problem, target) if config.num_splits > 1 else None
    for each in filter(None, (source, combine)):
        lint(each.text)
    return config, source, combine
