"""Runner: where a worker's child runs candidates, with the launches that serve users."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from flexattn.device import detect
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.options import Options
from flexattn.measure.backward import backward_call, make_saved
from flexattn.measure.clock import Clock, CpuClock, CudaClock, TimedCall
from flexattn.measure.failures import clipped
from flexattn.measure.serving import plan_call
from flexattn.measure.task import AnyTask, ServingTask, Task
from flexattn.measure.timing import Event, race
from flexattn.records.record import Failed, Gated, Policy, kept_error
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import Outputs, prepare_launch
from flexattn.serving.batch import make_batch, serving_judge
from flexattn.settings import current
from flexattn.verify.gate import Verdict
from flexattn.verify.gradients import judge_of as judge_gradients
from flexattn.verify.oracle import make_inputs, make_sinks, moved, oracle


class Runner(Protocol):
    """What a worker's child needs of the place where it measures; all methods may raise."""

    @property
    def device(self) -> str:
        """A name of the accelerator that every process of the host has for it."""

    def open(self, task: AnyTask) -> None:
        """As Measurer.open."""

    def gate(self, config: Config) -> Gated | Failed:
        """As Measurer.gate."""

    def race(
        self, configs: Sequence[Config], rounds: int, min_ms: float, limit_us: float
    ) -> Iterator[Event]:
        """As timing.race."""

    def recover(self) -> bool:
        """Free what a failed candidate left behind; whether the device still answers."""


class DeviceRunner:
    """The process's first GPU; with FLEXATTN_INTERPRET=1 Triton's interpreter, on the CPU."""

    def __init__(self) -> None:
        if current().interpret:
            self._where = torch.device("cpu")
        elif torch.cuda.is_available():
            self._where = torch.device("cuda", 0)
            torch.cuda.set_device(self._where)
            # Here, while kernels are compiled elsewhere: the first gate would wait for it.
            importlib.import_module("triton")
            # A GPU may be listed and answer nothing: that is found now, and is no config's fault.
            torch.ones(8, device=self._where).sum().item()
        else:
            raise UnsupportedError(
                "torch sees no GPU here",
                "times come from a GPU, or from Triton's interpreter for tests of tiny problems",
                "run this where a GPU is, or set FLEXATTN_INTERPRET=1",
            )
        self._calls: dict[Config, Callable[[], Any]] = {}
        self._clock: Clock | None = None
        self._judge: Callable[[Any], Verdict] | None = None
        self._build: Callable[[Config], Callable[[], Any]] | None = None
        self._while_judged: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def device(self) -> str:
        """As Runner.device: the GPU's own identity, whatever CUDA_VISIBLE_DEVICES calls it."""
        if self._where.type == "cpu":
            return "cpu"
        properties = torch.cuda.get_device_properties(self._where)
        return f"gpu-{getattr(properties, 'uuid', properties.name)}"

    def open(self, task: AnyTask) -> None:
        """As Runner.open."""
        self._calls.clear()
        self._clock = self._judge = self._build = None
        self._while_judged = nullcontext
        self._free()
        here = detect(self._where)
        if here.arch != task.device.arch:
            raise InputError(
                f"{task.title} is for {task.device.name}, this is {here.name}",
                "a task is measured on the device that it names",
            )
        if isinstance(task, ServingTask):
            self._open_serving(task)
        elif task.kind == "backward":
            self._open_backward(task)
        else:
            self._open_call(task)
        self._clock = _clock(task.policy, self._where)

    def _open_serving(self, task: ServingTask) -> None:
        batch = make_batch(task.problem, task.q_lens, task.kv_lens, self._where)
        self._judge = serving_judge(batch, task.scale, task.score, task.mask)

        def build(config: Any) -> Callable[[], Outputs]:
            return plan_call(task, batch, config, self._where)

        self._build = build

    def _open_backward(self, task: Task) -> None:
        self._round_as(task)
        saved = make_saved(task, self._where)
        self._judge = judge_gradients(saved.call)
        self._while_judged = saved.call.judged_alone
        self._build = lambda config: backward_call(task, saved, config, self._where)

    def _round_as(self, task: Task) -> None:
        if self._where.type == "cuda":
            # What the reference run of float32 inputs looks at.
            allowed = task.problem.structure.fp32_products == "tf32x3"
            torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "none"

    def _open_call(self, task: Task) -> None:
        self._round_as(task)
        structure = task.problem.structure
        q, k, v = make_inputs(task.problem, self._where)
        sinks = make_sinks(task.problem, self._where)
        score, mask = moved(task.score, self._where), moved(task.mask, self._where)
        lists = None if task.lists is None else task.lists.to(self._where)
        self._judge = oracle(q, k, v, task.scale, score, mask, lists, structure.sparsity, sinks)

        def build(config: Config) -> Callable[[], Outputs]:
            launch = prepare_launch(
                task.problem,
                task.device,
                self._where,
                dispatcher(),
                Options(exact=config),
                q,
                k,
                v,
                lists,
            )
            rest = launch.rest_of(lists, score, mask)
            return partial(launch.run, q, k, v, task.scale, rest, sinks)

        self._build = build

    def gate(self, config: Config) -> Gated | Failed:
        """As Runner.gate."""
        assert self._judge is not None
        call = self._call(config)
        with _poisoned_memory(), self._while_judged():
            outputs = call()
        self._synchronize()
        return gated(self._judge(outputs))

    def race(
        self, configs: Sequence[Config], rounds: int, min_ms: float, limit_us: float
    ) -> Iterator[Event]:
        """As Runner.race."""
        assert self._clock is not None
        calls = _Calls(configs, self._call)
        return race(calls, rounds=rounds, min_ms=min_ms, clock=self._clock, limit_us=limit_us)

    def recover(self) -> bool:
        """As Runner.recover."""
        try:
            self._synchronize()
            self._free()
        except RuntimeError:
            return False
        return True

    def _call(self, config: Config) -> Callable[[], Any]:
        assert self._build is not None
        call = self._calls.get(config)
        if call is None:
            call = self._calls[config] = self._build(config)
        return call

    def _synchronize(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        gc.collect()
        if self._where.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Calls(Sequence[TimedCall]):
    """The calls of configs, each built when the race comes to it: what breaks then is its own."""

    configs: Sequence[Config]
    build: Callable[[Config], TimedCall]

    def __getitem__(self, index: Any) -> Any:
        return self.build(self.configs[index])

    def __len__(self) -> int:
        return len(self.configs)


def _clock(policy: Policy, where: torch.device) -> Clock:
    if where.type == "cuda":
        return CudaClock(policy.cold_l2, policy.graph)
    if policy.graph or policy.cold_l2:
        raise UnsupportedError(
            f"{policy} in the interpreter",
            "it has neither CUDA graphs nor an L2 cache",
            "measure with graph=False and cold_l2=False",
        )
    return CpuClock()


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """torch.empty and its kin give NaN, so that an output that nobody wrote is seen.

    torch's own `torch.utils.deterministic.fill_uninitialized_memory`, which is on unless switched
    off, does so while deterministic algorithms are asked for.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def gated(verdict: Verdict) -> Gated | Failed:
    """A verdict as a record keeps it: the row that uses most of its budget, or the faults."""
    if verdict.faults:
        return Failed("gate", "Fault", clipped(verdict.message()))
    row = max(verdict.rows, key=lambda row: row.error / row.budget if row.budget else row.error)
    error, budget, reference = map(kept_error, (row.error, row.budget, row.reference))
    return Gated(row.name, error, budget, reference, verdict.passed)
