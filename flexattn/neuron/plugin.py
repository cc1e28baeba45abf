"""The plug-in of AWS Neuron's devices, flexattn.tuning.tuner.Plugin as a module, and its measurer.

NeuronMeasurer has configs built by AWS's compiler and timed on a NeuronCore, out of process. It is
written from AWS's documentation and tested with stand-ins for nki and nrtpy; it has never run on a
Neuron instance.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import FlexAttnError, InputError, MeasureError, UnsupportedError
from flexattn.kernels.base.environment import template_hash
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import Survey
from flexattn.measure.process import Closing, Died, clipped
from flexattn.measure.runner import gated
from flexattn.measure.task import Task, call_of
from flexattn.neuron import nrt_bench
from flexattn.neuron.family import NkiEffort, default_config, target_survey
from flexattn.neuron.instance import Instance, Job, instance, rungs as rungs
from flexattn.neuron.run import attend as attend, cores_of, first_config, lint, nki_path, prepare
from flexattn.neuron.source import NkiSource, render_nki, render_nki_combine
from flexattn.problem import Problem
from flexattn.records.environment import NO_TEXT, closure
from flexattn.records.record import (
    SCHEMA,
    Environment,
    Failed,
    Gated,
    Record,
    Stage,
)
from flexattn.settings import neuron_environment, nrtpy_python
from flexattn.tuning.builds import BuiltConfig
from flexattn.tuning.evaluator import SILENT, Method, Progress, surveyed
from flexattn.tuning.tuner import PluginKernel, TuneTask, tune_subject
from flexattn.verify.oracle import Judge, make_inputs, oracle


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


# Seconds that a kernel may be compiled and run once for, and that one race may take.
BUILD_SECONDS, RACE_SECONDS = 1800.0, 1800.0
# So many configs are built: a compiler takes minutes for each.
_BUILT: dict[NkiEffort, int] = {"quick": 8, "full": 24}
_NOTE = "built by neuronx-cc, gated and timed on the device"

Program = tuple[Path, Path]  # kernel.neff, and its inputs by name


def measured(
    task: Task, here: Instance, method: Method, effort: NkiEffort, progress: Progress = SILENT
) -> Record:
    """The record of a task, measured on this instance: a search among the configs that fit.

    Raises MeasureError where no config runs, ConfigError where none fits, and UnsupportedError for
    what the target cannot express.
    """
    found = target_survey(task.problem, task.device.name, effort)
    subject = surveyed(task, environment_of_target(task, here.compiler), found)
    limit = _BUILT[effort]
    with tempfile.TemporaryDirectory() as folder, NeuronMeasurer(Path(folder)) as measurer:
        measurer.start()
        measurer.open(task)
        chosen = replace(method, all_up_to=limit, limit=limit, note=method.note or _NOTE)
        return tune_subject(subject, measurer, measurer.build, chosen, progress=progress)


def environment_of_target(task: Task, compiler: str) -> Environment:
    """The environment in which a record holds: templates, what fills them, target, compiler."""
    device, kind = task.device, task.problem.structure.kind
    names = ["prefill"] if kind == "prefill" else ["decode", "combine"]
    parts = [template_hash(f"nki/{name}.py.jinja") for name in names]
    parts += closure(["flexattn.neuron.source"], {f"flexattn.{each}" for each in NO_TEXT}).values()
    return Environment(
        schema=SCHEMA,
        template=hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
        triton=compiler,
        torch=str(torch.__version__),
        driver="",
        device=device.name,
        arch=device.arch,
        num_sms=device.num_sms,
        graph=False,
        cold_l2=False,
    )


class NeuronMeasurer(Closing):
    """The Measurer of a Neuron instance. folder: for kernels, inputs and results, while it lasts.

    Each kernel is compiled and run once in a process of its own, which the gate judges; races of
    compiled kernels run in one process each, in nrtpy's environment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task: Task | None = None
        self._judge: Judge | None = None
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None
        self._programs: dict[Any, list[Program]] = {}

    def start(self) -> None:
        """As Measurer.start: every process starts with its request."""

    def open(self, task: Task) -> None:
        """As Measurer.open."""
        task = call_of(task)
        structure = task.problem.structure
        self._task, self._programs = task, {}
        q, k, v = self._inputs = make_inputs(task.problem, torch.device("cpu"))
        self._judge = oracle(
            q, k, v, task.scale, task.score, task.mask, task.lists, structure.sparsity
        )

    def close(self) -> None:
        """As Measurer.close."""
        self._task = self._judge = self._inputs = None

    def build(self, configs: Sequence[Any]) -> list[BuiltConfig]:
        """Nothing is known before the gate builds a config and runs it."""
        return [BuiltConfig(config) for config in configs]

    def gate(self, config: Any) -> Gated | Failed:
        """As Measurer.gate: compile, run on the device, judge."""
        task, inputs = self._opened()
        assert self._judge is not None
        try:
            prepared = prepare(
                task.problem, config, task.device.name, scale=task.scale, score=task.score,
                mask=task.mask, lists=task.lists, cores=cores_of(task.device.name, None),
            )  # fmt: skip
        except FlexAttnError as error:
            return Failed("infeasible", type(error).__name__, clipped(error.got))
        programs = self._programs[config] = []

        def kernel(source: NkiSource, values: tuple[Any, ...]) -> Sequence[Tensor]:
            results, program = self._ran(source, values, prepared.target, prepared.cores)
            programs.append(program)
            return results

        try:
            outputs = prepared.run(*inputs, kernel)
        except Died as died:
            return died.failed
        return gated(self._judge((outputs.out, outputs.lse, outputs.max_scores)))

    def sample(
        self, configs: Sequence[Any], rounds: int, min_ms: float, limit_us: float = math.inf
    ) -> list[tuple[float, ...] | Failed]:
        """As Measurer.sample, of configs that the gate has compiled."""
        self._opened()
        plan = {
            "rounds": rounds,
            "min_ms": min_ms,
            "limit_us": limit_us if math.isfinite(limit_us) else None,
            "kernels": [[list(map(str, p)) for p in self._programs[each]] for each in configs],
        }
        path = self._folder / "plan.json"
        path.write_text(json.dumps(plan), encoding="utf-8")
        command = [nrtpy_python(), str(Path(nrt_bench.__file__)), str(path)]
        try:
            done = _called(command, None, RACE_SECONDS)
        except Died as died:
            raise MeasureError(
                f"no race on the device ({died.failed.error}): {died.failed.message}",
                "nrtpy loads and times compiled kernels",
                "install it from AWS's index in an environment of its own, and name its python "
                "in FLEXATTN_NRTPY_PYTHON",
            ) from died
        told = json.loads(done.splitlines()[-1])
        return [
            Failed("run", *map(clipped, told["errors"][str(index)]))
            if str(index) in told["errors"]
            else tuple(us)
            for index, us in enumerate(told["us"])
        ]

    def _opened(self) -> tuple[Task, tuple[Tensor, Tensor, Tensor]]:
        if self._task is None or self._inputs is None:
            raise MeasureError("no task is open", "open(task) comes first, and close() last")
        return self._task, self._inputs

    def _ran(
        self, source: NkiSource, values: tuple[Any, ...], target: str, cores: int
    ) -> tuple[Sequence[Tensor], Program]:
        """A kernel's results, and its program; raises Died with what failed."""
        place = Path(tempfile.mkdtemp(dir=self._folder))
        job = Job(nki_path(source), source.text, cores, source.arguments, values)
        torch.save(job, place / "job.pt")
        files = [str(place / name) for name in ("job.pt", "results.pt", "inputs.npz")]
        command = [sys.executable, "-m", "flexattn.neuron.instance", *files]
        failure: Failed | None = None
        try:
            _called(command, neuron_environment(place / "artifacts", target), BUILD_SECONDS)
        except Died as died:
            failure = died.failed
        neff = next(iter(sorted((place / "artifacts").rglob("*.neff"))), None)
        if failure is not None:
            raise Died(failure if neff is not None else replace(failure, stage="build"))
        if neff is None:
            text = "the compiler left no .neff in NKI_ARTIFACTS_DIR"
            raise Died(Failed("build", "NoNeff", text))
        return torch.load(place / "results.pt"), (neff, place / "inputs.npz")


def _called(command: list[str], environment: dict[str, str] | None, seconds: float) -> str:
    """The output of a process; raises Died for one that failed or did not end."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"no answer within {seconds:g} s, so it was killed"
        raise Died(Failed("hang", "Deadline", text)) from None
    except OSError as error:
        raise Died(Failed("run", type(error).__name__, str(error))) from error
    if done.returncode:
        stage: Stage = "crash" if done.returncode < 0 else "run"
        raise Died(Failed(stage, f"status {done.returncode}", clipped(done.stderr)))
    return done.stdout
