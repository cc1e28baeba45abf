"""Record: what tuning one problem found, with everything needed to judge it again."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

from flexattn.kernels.base.config import Config
from flexattn.records.key import Key, Sizes

SCHEMA = 1

Provenance = Literal["measured", "replay", "model", "untuned"]
Stage = Literal[
    "infeasible", "build", "resources", "gate", "prepare", "run", "hang", "crash", "memory"
]


@dataclass(frozen=True, slots=True)
class Policy:
    """How times were taken: a record of one policy says nothing about another.

    graph: CUDA-graph replays instead of eager calls. cold_l2: the L2 cache is evicted before each
    call. rounds, min_ms: of the finalists' race.
    """

    graph: bool
    cold_l2: bool
    rounds: int
    min_ms: float


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a record holds exactly; its hash names the directory of the records made there.

    template: hash of the kind's template with all it includes and of the renderer. device: the
    name as flexattn.device says it.
    """

    schema: int
    template: str
    triton: str
    torch: str
    driver: str
    device: str
    arch: str
    num_sms: int
    graph: bool
    cold_l2: bool

    @property
    def folder(self) -> str:
        """The directory of the records made here: the device, and a hash of every field."""
        return _folder(self)

    def differing(self, other: Environment) -> tuple[str, ...]:
        """The names of the fields in which two environments differ."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


@lru_cache(maxsize=256)
def _folder(environment: Environment) -> str:
    names = (field.name for field in fields(environment))
    parts = [f"{name}={getattr(environment, name)!r}" for name in names]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{slug(environment.device)}-{digest[:12]}"


def slug(device: str) -> str:
    """A device's name as a file's: lower case, and nothing that means something in a path."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:64] or "unnamed"


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a config has no time: the stage it broke in, a short name of the error, its text."""

    stage: Stage
    error: str
    message: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.error}: {self.message}"


def kept_us(us: float) -> float:
    """Microseconds as a record keeps them: five significant digits, and none below 0.1 ns."""
    return round(float(f"{us:.5g}"), 4)


def kept_error(error: float) -> float:
    """An error or a budget as a record keeps it: four significant digits."""
    return float(f"{error:.4g}")


def is_time(us: float) -> bool:
    """Whether a number can be the microseconds of a call: finite, and above 0 as it is kept."""
    return math.isfinite(us) and kept_us(us) > 0


@dataclass(frozen=True, slots=True)
class Gated:
    """The accuracy gate's worst row for one config: error, what it may be, the reference's."""

    name: str
    error: float
    budget: float
    reference: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """One config's whole story: its samples, or why there are none.

    screening, finals: microseconds a call, one value a round; finals of two trials with the same
    index were taken in the same round. Candidates are screened in batches, each with the default:
    a screening pairs with the default's from its index `start` on; one stopped early has fewer.
    same_code_as: index of the trial whose machine code is identical, which was timed for both.
    """

    config: Config
    registers: int = 0
    spills: int = 0
    shared_memory: int = 0
    gate: Gated | None = None
    screening: tuple[float, ...] = ()
    start: int = 0
    finals: tuple[float, ...] = ()
    failed: Failed | None = None
    same_code_as: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Why the winner won: its paired median speedup over the static default, and how sure.

    margin: the speedup a challenger must show; confidence: the one it must be shown with;
    p_value: of the signed-rank test that the challenger is not faster by the margin.
    """

    winner: int
    default: int
    speedup: float
    p_value: float
    margin: float
    confidence: float
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What dispatch reads of a record: the config for a key, and where it comes from."""

    key: Key
    environment: Environment
    policy: Policy
    provenance: Provenance
    sizes: tuple[int, int, int]
    config: Config
    decision: Decision
    transfer: tuple[tuple[str, float], ...] = ()
    made: str = ""
    title: str = ""

    def regret(self, sizes: Sizes) -> float | None:
        """The measured regret of this config at other sizes of its family, if it was measured."""
        return dict(self.transfer).get(str(sizes.rounded()))


@dataclass(frozen=True, slots=True)
class Record:
    """The tuned answer for one key: trials[decision.winner].config is what dispatch runs.

    sizes: B, q_len, kv_len as they were measured, before rounding. rejected: configs that were
    never built, counted by reason. transfer: measured regret of this winner at other sizes of its
    family, by their name ("b8-q1-k4096"): 0.03 is 3 % slower than the best there.
    """

    key: Key
    environment: Environment
    policy: Policy
    provenance: Provenance
    sizes: tuple[int, int, int]
    trials: tuple[Trial, ...]
    decision: Decision
    rejected: tuple[tuple[str, int], ...] = ()
    transfer: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    made: str = ""
    tool: str = ""
    title: str = ""
    note: str = ""

    @property
    def config(self) -> Config:
        """What dispatch runs for this key."""
        return self.trials[self.decision.winner].config

    @property
    def answer(self) -> Answer:
        """What dispatch reads of it."""
        found = {
            field.name: getattr(self, field.name)
            for field in fields(Answer)
            if field.name != "config"
        }
        return Answer(config=self.config, **found)
