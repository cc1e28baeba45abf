"""The plug-in of AWS Neuron's devices: flexattn.tuning.tuner.Plugin as a module."""

from __future__ import annotations

from pathlib import Path

from flexattn.device import Device
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import Survey
from flexattn.measure.task import Task, call_of
from flexattn.neuron.family import NkiEffort, default_config, target_survey
from flexattn.neuron.instance import instance, rungs as rungs
from flexattn.neuron.measure import environment_of_target, measured
from flexattn.neuron.run import attend as attend, cores_of, first_config, lint, nki_path, prepare
from flexattn.neuron.source import render_nki, render_nki_combine
from flexattn.problem import Problem
from flexattn.records.record import Environment, Record
from flexattn.tuning.campaign import TuneTask
from flexattn.tuning.evaluator import Method, Progress
from flexattn.tuning.tuner import PluginKernel


def check_tuning(device: Device, effort: Effort, storage: str | None) -> None:
    """Raise InputError for what a tuning for this device cannot be asked."""
    _effort(effort)
    if storage is not None:
        raise InputError(f"--storage for {device.name}", "one instance tunes a problem by itself")


def survey_of(task: Task, effort: Effort) -> Survey:
    """As Plugin.survey_of."""
    return target_survey(call_of(task).problem, task.device.name, _effort(effort))


def tuner(device: Device, progress: Progress, effort: Effort, method: Method) -> TuneTask:
    """A tuner that measures; raises UnsupportedError where this is no instance of the device."""
    here, why = instance()
    if here is None or here.target != device.name:
        raise UnsupportedError(
            f"tuning for {device.name}: {why or f'this instance has {here and here.target}'}",
            "times come from the device itself",
            "run it on an instance; here, --dry-run lists the configs that fit, and a call uses "
            "the first of them",
        )
    found = here

    def tune(given: Task) -> Record:
        task = call_of(given)
        progress.problem(task.title)
        return measured(task, found, method, _effort(effort), progress)

    return tune


def tuning_environment(given: Task) -> Environment:
    """As Plugin.tuning_environment."""
    here, _ = instance()
    return environment_of_target(call_of(given), here.compiler if here else "")


def render_kernel(problem: Problem, device: Device) -> PluginKernel:
    """As Plugin.render_kernel; both kernels pass the lint."""
    config = default_config(problem, device.name)
    source = render_nki(problem, config, device.name, f"{problem.describe()} for {device.name}")
    lint(source.text)
    combine = None
    if config.num_splits > 1:
        merging = render_nki_combine(problem, device.name)
        lint(merging.text)
        combine = nki_path(merging)
    return PluginKernel(config, source.text, nki_path(source), combine)


def write_kernel(task: Task, folder: Path) -> None:
    """As Plugin.write_kernel."""
    call_of(task)
    target = task.device.name
    cores = cores_of(target, None)
    config = first_config(task.problem, target, cores)
    prepare(
        task.problem, config, target, scale=task.scale, score=task.score, mask=task.mask,
        lists=task.lists, cores=cores,
    ).write(folder)  # fmt: skip


def _effort(effort: Effort) -> NkiEffort:
    if effort == "exhaustive":
        raise InputError(
            "--effort exhaustive for a Neuron device",
            "it is quick or full",
            "full leaves none out",
        )
    return effort
