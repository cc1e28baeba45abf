"""transfer: what one problem's winner costs at the other sizes of its family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flexattn.kernels.base.config import Config
from flexattn.records.record import Record
from flexattn.tune.ledger import cost

__all__ = ["regret", "transfer_regret", "with_transfer"]


def regret(config: Config, record: Record) -> float | None:
    """How much slower than a record's winner a config was there: 0.03 is 3 %.

    None where the record did not time it. Times compare through the default of the same rounds;
    what was not sure enough to win may be faster by a little, which counts as 0.
    """
    trials, default = record.trials, record.decision.default
    index = next((i for i, trial in enumerate(trials) if trial.config == config), None)
    if index is None:
        return None
    own, best = cost(trials, index, default), cost(trials, record.decision.winner, default)
    if not (math.isfinite(own) and math.isfinite(best)):
        return None
    return round(max(0.0, own / best - 1), 4)


def transfer_regret(record: Record, others: Iterable[Record]) -> tuple[tuple[str, float], ...]:
    """The regret of a record's winner at other sizes of its family, by their name."""
    found = {}
    for other in others:
        same = other.key.family() == record.key.family() and other.key != record.key
        if same and other.environment == record.environment:
            measured = regret(record.config, other)
            if measured is not None:
                found[str(other.key.sizes)] = measured
    return tuple(sorted(found.items()))


def with_transfer(records: Sequence[Record]) -> list[Record]:
    """The records, each with the regret of its winner at the others."""
    return [replace(record, transfer=transfer_regret(record, records)) for record in records]
