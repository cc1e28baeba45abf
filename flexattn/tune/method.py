"""Method: how much work goes into a problem; Progress: who is told how far it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from flexattn.kernels.base.family import Effort
from flexattn.records.record import Provenance
from flexattn.tune.decide import CONFIDENCE, MARGIN
from flexattn.tune.search import ALL_UP_TO, Sampler

# The part of a time budget after which no more are screened: the rest is for the finals.
FOR_SCREENING = 0.8
# Screening tells far apart from near; the finals take the policy's own, longer samples.
SCREENING_MS = 2.0


@dataclass(frozen=True)
class Method:
    """How a problem is tuned. budget_s: of measuring; building and the first run are not.

    rounds: of the screening. batch: configs that are screened in one race, each of which holds its
    outputs and maybe a CUDA graph. all_up_to: spaces up to this size are measured whole, larger
    ones as far as the search asks for them, at most `limit` configs (None: a fifth).
    """

    effort: Effort = "full"
    budget_s: float = math.inf
    margin: float = MARGIN
    confidence: float = CONFIDENCE
    rounds: int = 5
    batch: int = 15
    all_up_to: int = ALL_UP_TO
    limit: int | None = None
    sampler: Sampler = "tpe"
    seed: int = 0
    provenance: Provenance = "measured"
    note: str = ""


USUAL = Method()


def method_for(effort: Effort, budget_s: float | None = None) -> Method:
    """The usual method of an effort: quick ends within ten seconds, exhaustive leaves none out."""
    if effort == "quick":
        return Method(effort, 8.0 if budget_s is None else budget_s, rounds=3)
    limitless = math.inf if budget_s is None else budget_s
    if effort == "exhaustive":
        return Method(effort, limitless, all_up_to=2**31)
    return Method(effort, limitless)


class Progress(Protocol):
    """A listener; the command line draws it."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins that takes `total` steps; 0 where nobody knows."""

    def step(self, text: str, best_us: float | None = None) -> None:
        """One step is done; best_us is the best time so far, in microseconds."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


class _Silent:
    def stage(self, name: str, total: int) -> None:
        """Says nothing."""

    def step(self, text: str, best_us: float | None = None) -> None:
        """Says nothing."""

    def note(self, text: str) -> None:
        """Says nothing."""


SILENT: Progress = _Silent()
