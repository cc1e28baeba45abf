"""Runner: where a worker's child runs candidates, with the launches that serve users.

`serve_runner` is the life of such a child: it answers requests and ends with its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

import torch

from flexattn.device import detect
from flexattn.errors import FlexAttnError, InputError, UnsupportedError
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.options import Options
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.measure.process import (
    Begun,
    ErrorReply,
    Reply,
    Request,
    clipped,
    failed,
    is_sticky,
    pipe_of_child,
    receive,
    send,
)
from flexattn.measure.task import Task
from flexattn.measure.timing import CpuClock, CudaClock, Dropped, Event, TimedCall, race
from flexattn.problem.serving import ServingProblem
from flexattn.records.record import Failed, Gated, Policy, kept_error
from flexattn.runtime.backward import Gradients
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import Outputs, prepare_launch
from flexattn.serving.plan import DecodePlan
from flexattn.serving.verified import Batch, batch_run, make_batch, serving_judge
from flexattn.settings import current
from flexattn.verify.gate import Verdict
from flexattn.verify.made_up import Saved, judge_of, judged_heads, make_saved
from flexattn.verify.oracle import (
    make_inputs,
    make_sinks,
    moved,
    oracle,
)


class DeviceRunner:
    """The process's first GPU; with FLEXATTN_INTERPRET=1 Triton's interpreter, on the CPU.

    All methods may raise. A test may have another Runner with these methods and `device`.
    """

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
                "run this where a GPU is, or set FLEXATTN_INTERPRET=1 before flexattn is imported",
            )
        self._calls: dict[Config, Callable[[], Any]] = {}
        self._clock: CpuClock | None = None
        self._opened: Opened | None = None

    @property
    def device(self) -> str:
        """A name of the accelerator that every process of the host has for it.

        The GPU's own identity, whatever CUDA_VISIBLE_DEVICES calls it.
        """
        if self._where.type == "cpu":
            return "cpu"
        properties = torch.cuda.get_device_properties(self._where)
        return f"gpu-{getattr(properties, 'uuid', properties.name)}"

    def open(self, task: Task) -> None:
        """As Measurer.open."""
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
        """As Measurer.gate."""
        call = self._call(config)
        assert self._opened is not None
        with _poisoned_memory(), self._opened.while_judged():
            outputs = call()
        self._synchronize()
        return gated(self._opened.judge(outputs))

    def race(
        self, configs: Sequence[Config], rounds: int, min_ms: float, limit_us: float
    ) -> Iterator[Event]:
        """As timing.race."""
        assert self._clock is not None
        calls = _Calls(configs, self._call)
        return race(calls, rounds=rounds, min_ms=min_ms, clock=self._clock, limit_us=limit_us)

    def recover(self) -> bool:
        """Free what a failed candidate left behind; whether the device still answers."""
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


def _clock(policy: Policy, where: torch.device) -> CpuClock:
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


def serve_runner(handle: int, where: str) -> None:
    """Serve the pipe with this handle until it closes; `where` is "package.module:RunnerClass"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.enable()
    pipe = pipe_of_child(handle)
    try:
        runner: DeviceRunner = resolve_name(where)()
        send(pipe, Reply(runner.device))
    except Exception as error:
        send(pipe, _trouble(error))
        return
    while True:
        try:
            request = receive(pipe)
        except (EOFError, OSError):
            return
        send(pipe, Begun())
        answer = _served(runner, request, pipe)
        send(pipe, answer)
        if isinstance(answer, ErrorReply) and answer.lost:
            # Not a normal exit: that would clean up in a CUDA context that is lost.
            os._exit(1)


def _served(
    runner: DeviceRunner, request: Request, pipe: Connection[Any, Any]
) -> Reply | ErrorReply:
    try:
        if request.method == "race":
            return _race(runner, request, pipe)
        return Reply(getattr(runner, request.method)(*request.args))
    except Exception as error:
        trouble = _trouble(error)
    # What holds the tensors of a failed run is the exception's traceback, which has ended here.
    lost = is_sticky(trouble.failed) or not runner.recover()
    return ErrorReply(
        _crashed(trouble.failed) if lost else trouble.failed, lost, error=trouble.error
    )


def _race(
    runner: DeviceRunner, request: Request, pipe: Connection[Any, Any]
) -> Reply | ErrorReply:
    for event in runner.race(*request.args):
        found = event.failure if isinstance(event, Dropped) else None
        if found is not None and (is_sticky(found) or not runner.recover()):
            return ErrorReply(_crashed(found), lost=True, index=event.index)
        send(pipe, event)
    return Reply()


def _trouble(error: Exception) -> ErrorReply:
    told = error if isinstance(error, FlexAttnError) else None
    return ErrorReply(failed(type(error).__name__, str(error), "run"), error=told)


def _crashed(found: Failed) -> Failed:
    return Failed("crash", found.error, found.message)


@dataclass(frozen=True)
class Opened:
    """A task on a device. build: a config's launches, as a call that allocates its outputs.

    while_judged: a block for the call whose outputs are judged.
    """

    judge: Callable[[Any], Verdict]
    build: Callable[[Any], Callable[[], Any]]
    while_judged: Callable[[], AbstractContextManager[None]] = nullcontext


def opened(task: Task, where: torch.device) -> Opened:
    """Make a task's inputs on a device, and what its outputs are judged by."""
    if isinstance(task.problem, ServingProblem):
        batch = make_batch(task.problem, task.q_lens, task.kv_lens, where)
        of_plans = partial(plan_call, task, batch, where=where)
        return Opened(serving_judge(batch, task.scale, task.score, task.mask), of_plans)
    if where.type == "cuda":
        # What the reference run of float32 inputs looks at.
        allowed = task.problem.structure.fp32_products == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "none"
    if task.kind == "backward":
        saved = saved_of(task, where)

        def of_gradients(config: Config) -> Callable[[], Gradients]:
            return saved.prepare(task.problem, task.device, dispatcher(), Options(exact=config))

        return Opened(judge_of(saved.call), of_gradients, saved.call.judged_alone)
    return _forward(task, where)


def saved_of(task: Task, where: torch.device) -> Saved:
    """A differentiated call of a task on a device, with what its forward saved."""
    p, lists = task.problem, None
    if task.lists is not None and task.by_key is not None:
        lists = BothLists(task.lists.to(where), task.by_key.to(where))
    heads = judged_heads(p.B, p.Hq, p.Hkv, p.q_len, p.kv_len)
    return make_saved(p, where, task.scale, task.score, task.mask, lists, heads)


def _forward(task: Task, where: torch.device) -> Opened:
    q, k, v = make_inputs(task.problem, where)
    sinks = make_sinks(task.problem, where)
    score, mask = moved(task.score, where), moved(task.mask, where)
    lists = None if task.lists is None else task.lists.to(where)

    def build(config: Config) -> Callable[[], Outputs]:
        launch = prepare_launch(
            task.problem, task.device, where, dispatcher(), Options(exact=config), q, k, v, lists
        )
        rest = launch.rest_of(lists, score, mask)
        return partial(launch.run, q, k, v, task.scale, rest, sinks)

    sparsity = task.problem.structure.sparsity
    return Opened(oracle(q, k, v, task.scale, score, mask, lists, sparsity, sinks), build)


def plan_call(
    task: Task, batch: Batch, config: ServingConfig, where: torch.device
) -> Callable[[], Outputs]:
    """A plan with this config, and a call that runs it on the batch; see `batch_run`."""
    m, form = batch.problem, batch.problem.structure
    plan = DecodePlan(
        batch=m.B,
        kv_len=m.kv_len,
        heads=(m.Hq, m.Hkv),
        head_dim=(m.head_dim_qk, m.head_dim_v),
        q_len=1 if m.total_q else m.q_len,
        total_q=m.total_q,
        dtype=m.dtype,
        device=where,
        page_size=m.page,
        layout=m.cache_layout,
        kv_dtype=m.kv_dtype,
        score_mod=moved(task.score, where),
        mask_mod=moved(task.mask, where),
        scale=task.scale,
        sinks=form.sinks != "",
        scaled=form.scales or form.scaled,
        shared_kv=form.shared_kv,
        lse=form.lse,
        batch_invariant=form.split_keys > 0,
        selection=(form.chosen, form.unit) if form.unit else None,
        config=config,
    )
    return batch_run(plan, batch)
