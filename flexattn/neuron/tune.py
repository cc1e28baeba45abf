"""rank(): the space of a problem, ordered by the cost model, as a record of provenance "model"."""

from __future__ import annotations

import hashlib
import time
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path

import torch

from flexattn import __version__
from flexattn.errors import FlexAttnError
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.environment import template_hash
from flexattn.kernels.nki.space import NkiEffort
from flexattn.measure.task import Task
from flexattn.neuron import feasible, model
from flexattn.neuron.model import nki_estimate
from flexattn.neuron.nki import costs
from flexattn.problem import Kind
from flexattn.records.closure import bare
from flexattn.records.key import key_of
from flexattn.records.record import SCHEMA, Decision, Environment, Failed, Record, Trial
from flexattn.records.renderers import rendering
from flexattn.tune.progress import SILENT, Progress

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
    found = feasible.target_survey(task.problem, target, effort)
    trials: list[Trial] = []
    least: float | None = None
    progress.stage("rank", len(found.configs))
    for config in found.configs:
        try:
            guess = nki_estimate(task, config, target)
        except FlexAttnError as error:
            if not trials:
                raise
            failed = Failed("infeasible", type(error).__name__, error.got[:400])
            trials.append(Trial(config, failed=failed))  # type: ignore[arg-type]
            progress.step(f"{failed.error}: {describe(config)}")
            continue
        used = 128 * guess.sbuf_bytes
        trials.append(Trial(config, shared_memory=used, screening=(guess.time,)))  # type: ignore[arg-type]
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
    """Where a ranking holds: the templates, the model's sources and the target."""
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


@lru_cache(maxsize=2)
def _template(kind: Kind) -> str:
    names = ["prefill"] if kind == "prefill" else ["decode", "combine"]
    parts = [template_hash(f"nki/{name}.py.jinja") for name in names]
    # What turns a problem into a kernel, and a kernel into an estimate.
    parts += rendering("nki").values()
    files = (path for each in (costs, model) if (path := each.__file__))
    parts += [bare(Path(path).read_text(encoding="utf-8")) for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
