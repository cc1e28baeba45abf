"""The plug-in of AWS Neuron's devices: flexattn.tuning.tuner.Plugin as a module."""

from __future__ import annotations

from pathlib import Path

from flexattn.device import Device
from flexattn.measure.task import Task
from flexattn.neuron.call import attend as attend, cores_of, first_config
from flexattn.neuron.family import default_config
from flexattn.neuron.instance import rungs as rungs
from flexattn.neuron.run import lint, nki_path, prepare
from flexattn.neuron.source import render_nki, render_nki_combine
from flexattn.problem import Problem
from flexattn.tuning.tuner import PluginKernel


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
    target = task.device.name
    cores = cores_of(target, None)
    config = first_config(task.problem, target, cores)
    prepare(
        task.problem, config, target, scale=task.scale, score=task.score, mask=task.mask,
        lists=task.lists, cores=cores,
    ).write(folder)  # fmt: skip
