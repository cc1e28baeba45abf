"""A worker process of the fleet tests: a replay that takes its time and writes down what it timed.

python -m tests.fleet_worker URL LOG NAME STUDY HELD
"""

import json
import os
import sys
import time

from bench.studies import load_study
from flexattn.tuning.evaluator import SILENT, Evaluator, Method
from flexattn.tuning.fleet import HELD, Heartbeat, SharedTuning
from tests.replayed import ReplayMeasurer

HEARTBEAT = Heartbeat(beat_s=1, grace_s=8)
METHOD = Method(rounds=3)
DELAY = 0.03


def tune_shared_subject(
    subject,
    measurer,
    url,
    method=METHOD,
    *,
    seeds=(),
    heartbeat=HEARTBEAT,
    held=HELD,
):
    """As `tune` with a storage, for a subject whose task the measurer has open already."""
    bench = Evaluator(subject, measurer, measurer.build, method, SILENT)
    first = subject.index(seeds)
    return SharedTuning(bench, url, heartbeat, first).run(held)


class Slow(ReplayMeasurer):
    """Takes DELAY seconds a config; each one that is gated, screened or raced is a line."""

    def __init__(self, study, log, name):
        super().__init__(study, os.getpid())
        self._log, self._name = log, name

    def _say(self, what, config):
        line = json.dumps([self._name, what, repr(config)]) + "\n"
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def gate(self, config):
        self._say("gate", config)
        time.sleep(DELAY)
        return super().gate(config)

    def sample(self, configs, rounds, min_ms, limit_us=float("inf")):
        final = rounds != METHOD.rounds
        for config in configs:
            self._say("final" if final else "screen", config)
            time.sleep(DELAY)
        return super().sample(configs, rounds, min_ms, limit_us)


def main(url, log, name, study, held):
    stored = load_study(study)
    measurer = Slow(stored, log, name)
    record = tune_shared_subject(stored.subject, measurer, url, held=held)
    print(json.dumps([name, repr(record.config), len(record.trials)]), flush=True)


if __name__ == "__main__":
    from pathlib import Path

    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
