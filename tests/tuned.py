"""A record that a quick search on this GPU made."""

from contextlib import contextmanager

from flexattn.records.environment import environment
from flexattn.records.record import Gated
from flexattn.records.store import Store
from flexattn.settings import override
from flexattn.tuning.builds import compilers
from flexattn.tuning.evaluator import SILENT, Method
from flexattn.tuning.tuner import GpuTuner


@contextmanager
def tuned(task, kind, device, folder):
    """The record of a task, whose winner is right; calls and plans inside find it."""
    method = Method("quick", budget_s=5.0, rounds=2)
    with (
        override(cache=(), cache_dir=folder, mode="replay"), compilers() as pool,
        GpuTuner(method, pool, SILENT) as tuner,
    ):  # fmt: skip
        record = tuner.tune(task)
        winner = record.trials[record.decision.winner]
        assert isinstance(winner.gate, Gated) and winner.gate.passed
        assert record.environment == environment(kind, device)
        Store(folder / "records").write(record)
        yield record
