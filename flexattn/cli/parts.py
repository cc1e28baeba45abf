"""The demo without a GPU: one child process interprets the kernels, another compiles them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from flexattn.cli.offline import compiled, nearest
from flexattn.cli.workloads import (
    FULL_WORKLOADS,
    SMALL_WORKLOADS,
    DemoTrial,
    DemoVariant,
    run_trial,
)
from flexattn.device import Device, named
from flexattn.errors import BuildError, ConfigError
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose import options
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import family_of, short
from flexattn.problem import Problem
from flexattn.runtime.resources import resources
from flexattn.settings import child_environment

_Part = Literal["interpret", "compile"]

DEMO_DEVICE = "nvidia-h200"
INTERPRETED = 2
CONFIGS = 3
PATIENCE = 20.0  # seconds after which a workload gets its first config alone
_DEADLINE = 300


@dataclass(frozen=True)
class CompiledWorkload:
    """What one config of a workload takes of its device, as Resources has it; or why it cannot."""

    workload: str
    config: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    matrix_instructions: int = 0
    note: str = ""


@dataclass(frozen=True)
class Parts:
    """What both children found; `failures` are the last words of a child that did not end well."""

    trials: tuple[DemoTrial, ...]
    compiled: tuple[CompiledWorkload, ...]
    failures: tuple[str, ...]


def interpret_workloads() -> str:
    """Run the rendered kernels in Triton's interpreter and judge them; a line of JSON."""
    trials = [run_trial(w, torch.float16, INTERPRETED, PATIENCE) for w in SMALL_WORKLOADS]
    return json.dumps([asdict(trial) for trial in trials])


def compile_all() -> str:
    """Compile a small space of each workload for a device that need not be here; JSON again."""
    device = named(DEMO_DEVICE)
    begin = time.perf_counter()
    found = []
    for workload in FULL_WORKLOADS:
        problem = workload.problem("bfloat16")
        first = default(problem, device)
        for config in nearest(problem, device, first, CONFIGS):
            if config != first and time.perf_counter() - begin > PATIENCE:
                break
            found.append(asdict(_compiled(workload.name, problem, device, config)))
    return json.dumps(found)


def _compiled(name: str, problem: Problem, device: Device, config: Config) -> CompiledWorkload:
    try:
        forced = options.parse(family_of(config).options_of(config))
        kernel = compiled(problem, device, forced)[1]
    except (BuildError, ConfigError) as error:
        return CompiledWorkload(name, short(config), note=error.got)
    taken = resources(kernel, device)
    return CompiledWorkload(
        name,
        short(config),
        taken.registers,
        taken.spills,
        taken.shared,
        taken.matrix_instructions,
    )


def run_both() -> Parts:
    """Both parts at once, each in a process of its own."""
    parts: tuple[_Part, ...] = ("interpret", "compile")
    with ThreadPoolExecutor(len(parts)) as pool:
        (trials, first), (built, second) = pool.map(_child, parts)
    return Parts(
        tuple(_trial(each) for each in trials),
        tuple(CompiledWorkload(**each) for each in built),
        tuple(text for text in (first, second) if text),
    )


def _child(part: _Part) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-m", "flexattn", "demo", "--part", part]
    environment = child_environment(interpret=part == "interpret")
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"{part}: no answer within {_DEADLINE} s"
    if done.returncode:
        words = done.stderr.strip().splitlines()[-8:]
        return [], f"{part}: status {done.returncode}\n" + "\n".join(words)
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found, ""


def _trial(fields: dict[str, Any]) -> DemoTrial:
    variants = tuple(DemoVariant(**each) for each in fields["variants"])
    return DemoTrial(**{**fields, "variants": variants})
