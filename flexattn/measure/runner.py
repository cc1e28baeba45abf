"""Runner: where a worker's child runs candidates, with the launches that serve users."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flexattn.device import detect
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.base.config import Config
from flexattn.measure.calls import Opened, opened
from flexattn.measure.clock import Clock, CpuClock, CudaClock, TimedCall
from flexattn.measure.process import clipped
from flexattn.measure.task import AnyTask
from flexattn.measure.timing import Event, race
from flexattn.records.record import Failed, Gated, Policy, kept_error
from flexattn.settings import current
from flexattn.verify.gate import Verdict


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
        self._opened: Opened | None = None

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
        self._clock = self._opened = None
        self._free()
        here = detect(self._where)
        if here.arch != task.device.arch:
            raise InputError(
                f"{task.title} is for {task.device.name}, this is {here.name}",
                "a task is measured on the device that it names",
            )
        self._opened = opened(task, self._where)
        self._clock = _clock(task.policy, self._where)

    def gate(self, config: Config) -> Gated | Failed:
        """As Runner.gate."""
        call = self._call(config)
        assert self._opened is not None
        with _poisoned_memory(), self._opened.while_judged():
            outputs = call()
        self._synchronize()
        return gated(self._opened.judge(outputs))

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
        assert self._opened is not None
        if config not in self._calls:
            self._calls[config] = self._opened.build(config)
        return self._calls[config]

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
