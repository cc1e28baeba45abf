"""The cost model: what a config would take on a NeuronCore, and the record of its ranking.

Two numbers of a config, and neither is a measurement. `bound` is the busiest engine's time: what
remains if everything else overlaps. `time` places each instruction when its engine, in the order
of the source, and the memory that it touches are free; the compiler may order them better. Configs
are ranked by `time`. Costs and their sources: flexattn/neuron/interpreter/costs.py; clocks:
flexattn/device/neuroncore.py. Nothing models the compiler, the allocator, power limits, or the
other cores' share of HBM.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from flexattn import __version__
from flexattn.errors import FlexAttnError
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.environment import template_hash
from flexattn.measure.task import Task
from flexattn.neuron.config import NkiConfig
from flexattn.neuron.family import NkiEffort, target_survey
from flexattn.neuron.interpreter import costs
from flexattn.neuron.interpreter.interpret import Interpreted
from flexattn.neuron.run import Prepared, prepare
from flexattn.neuron.schedule import Part
from flexattn.problem import DTYPES, Kind
from flexattn.records.environment import NO_TEXT, bare, closure
from flexattn.records.record import SCHEMA, Decision, Environment, Failed, Record, Trial, key_of
from flexattn.tuning.evaluator import SILENT, Progress

_TORCH = {name: dtype for dtype, name in DTYPES.items()}
# Of a longer schedule a sample is walked, and scaled.
MOST_TILES, MOST_SECTIONS = 160, 4


@dataclass(frozen=True, slots=True)
class NkiEstimate:
    """The model's estimate of one config, in microseconds of one core for the whole problem.

    busy: of each engine. sbuf_bytes: of a partition. counts: of the walked sample.
    """

    time: float
    bound: float
    busy: tuple[tuple[str, float], ...]
    sbuf_bytes: int
    psum_banks: int
    counts: tuple[tuple[str, int], ...]


def nki_estimate(task: Task, config: NkiConfig, target: str) -> NkiEstimate:
    """The model's estimate for a config; raises as `prepare` does.

    One batch and key head stands for all: the first of each.
    """
    problem = task.problem
    one = replace(problem, B=1, Hkv=1, Hq=problem.Hq // problem.Hkv)
    prepared = prepare(
        one, config, target, scale=task.scale, score=task.score, mask=task.mask, lists=task.lists
    )
    (schedule,) = prepared.extra[1]
    kept = _sampled(schedule)
    loads, *_ = _run(prepared, tuple(_with_visits(section, ()) for section in kept))
    walked, *merges = _run(prepared, kept)
    share = _chunks(schedule) / max(_chunks(kept), 1), _work(schedule) / max(_work(kept), 1)
    times = {
        name: _scaled(loads.busy.get(name, 0.0), walked.busy.get(name, 0.0), share)
        for name in {*loads.busy, *walked.busy}
    }
    total = _scaled(loads.nanoseconds, walked.nanoseconds, share)
    total += sum(merge.nanoseconds for merge in merges)
    units = problem.B * problem.Hkv / 1000
    return NkiEstimate(
        time=total * units,
        bound=max(times.values()) * units,
        busy=tuple(sorted((name, time * units) for name, time in times.items())),
        sbuf_bytes=walked.sbuf_bytes,
        psum_banks=walked.psum_banks,
        counts=tuple(sorted(walked.counts.items())),
    )


def _run(prepared: Prepared, schedule: Part) -> tuple[Interpreted, ...]:
    """What a schedule takes, and then what merges its splits, by shape alone."""
    p, s = prepared.problem, prepared.problem.structure
    scale, _, *rest = prepared.extra
    walking = replace(prepared, extra=(scale, (schedule,), *rest))
    sizes = ((p.Hq, p.q_len, s.head_dim_qk), (p.Hkv, p.kv_len, s.head_dim_qk),
             (p.Hkv, p.kv_len, s.head_dim_v))  # fmt: skip
    q, k, v = (torch.empty(p.B, *each, dtype=_TORCH[s.dtype]) for each in sizes)
    return walking.interpret(q, k, v, numerics=False).runs


def _scaled(loads: float, all_of_it: float, share: tuple[float, float]) -> float:
    """A sample's time for the whole: its loads by their chunks, the rest by rows times keys."""
    return loads * share[0] + (all_of_it - loads) * share[1]


def _sampled(schedule: Part) -> Part:
    """A few sections, evenly spaced, and of each as many visits, so as to walk few tiles."""
    step = max(1, -(-len(schedule) // MOST_SECTIONS))
    sections = schedule[step // 2 :: step]
    tiles = sum(len(visit[6]) for visit in _visits(sections))
    thin = max(1, tiles // MOST_TILES)
    return tuple(
        _with_visits(section, _spaced(section[5], thin))  # type: ignore[arg-type]
        for section in sections
    )


def _spaced(visits: tuple[Any, ...], step: int) -> tuple[Any, ...]:
    """Every step-th visit, and one at least."""
    return visits[min(step // 2, len(visits) // 2) :: step]


def _chunks(schedule: Part) -> int:
    """Chunks of keys that are loaded."""
    loads: list[Any] = [section[4] for section in schedule]
    return sum(len(each) for each in loads)


def _work(schedule: Part) -> int:
    """Rows times keys of all tiles."""
    return sum(visit[2] * tile[1] for visit in _visits(schedule) for tile in visit[6])


def _visits(schedule: Part) -> list[Any]:
    visits: list[Any] = []
    for section in schedule:
        visits += section[5]  # type: ignore[arg-type]
    return visits


def _with_visits(section: tuple[object, ...], visits: object) -> tuple[object, ...]:
    return (*section[:5], visits, *section[6:])


_NOTE = "ranked by a model of the engines, not measured: flexattn/neuron/model.py"


def rank(
    task: Task, effort: NkiEffort = "quick", *, best: int = 64, progress: Progress = SILENT
) -> Record:
    """Order the configs that fit the task's device by the model; no device is needed or used.

    trials: the default first, then the others by their estimate, at most `best`; `screening` holds
    the estimate in microseconds, and no gate ran. Raises ConfigError where no config fits, and
    whatever the default's estimate raises: UnsupportedError for what the target cannot express.
    """
    target, begin = task.device.name, time.monotonic()
    found = target_survey(task.problem, target, effort)
    trials: list[Trial] = []
    least: float | None = None
    progress.stage("rank", len(found.configs))
    for config in found.configs:
        try:
            guess = nki_estimate(task, config, target)  # type: ignore[arg-type]
        except FlexAttnError as error:
            if not trials:
                raise
            failed = Failed("infeasible", type(error).__name__, error.got[:400])
            trials.append(Trial(config, failed=failed))
            progress.step(f"{failed.error}: {describe(config)}")
            continue
        used = 128 * guess.sbuf_bytes
        trials.append(Trial(config, shared_memory=used, screening=(guess.time,)))
        least = guess.time if least is None else min(least, guess.time)
        progress.step(describe(config), least)
    timed = sorted((t for t in trials[1:] if t.screening), key=lambda t: t.screening[0])
    first = trials[0]
    kept = (first, *timed[: best - 1])
    winner = min(range(len(kept)), key=lambda i: kept[i].screening[0])
    speedup = first.screening[0] / kept[winner].screening[0]
    fallen = sum(1 for t in trials if t.failed is not None)
    why = f"least of {len(trials) - fallen} estimates for {target}; {speedup:.3f} of the default's"
    return Record(
        key=key_of(task.problem),
        environment=ranking_environment(task),
        policy=task.policy,
        provenance="model",
        sizes=(task.problem.B, task.problem.q_len, task.problem.kv_len),
        trials=kept,
        decision=Decision(winner, 0, speedup, 1.0, 0.0, 0.0, why),
        rejected=found.rejected,
        seconds=time.monotonic() - begin,
        made=datetime.now(timezone.utc).date().isoformat(),
        tool=f"flexattn {__version__}",
        title=task.title,
        note=_NOTE,
    )


def ranking_environment(task: Task) -> Environment:
    """The environment in which a ranking holds: templates, the model's sources, the target."""
    device = task.device
    return Environment(
        schema=SCHEMA,
        template=_template(task.problem.structure.kind),
        triton="",
        torch=str(torch.__version__),
        driver="",
        device=device.name,
        arch=device.arch,
        num_sms=device.num_sms,
        graph=False,
        cold_l2=False,
    )


def _template(kind: Kind) -> str:
    names = ["prefill"] if kind == "prefill" else ["decode", "combine"]
    parts = [template_hash(f"nki/{name}.py.jinja") for name in names]
    # What turns a problem into a kernel, and a kernel into an estimate.
    parts += closure(["flexattn.neuron.source"], {f"flexattn.{each}" for each in NO_TEXT}).values()
    files = (path for path in (costs.__file__, __file__) if path)
    parts += [bare(Path(path).read_text(encoding="utf-8")) for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
