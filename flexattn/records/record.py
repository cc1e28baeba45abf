"""The result of tuning one problem: a Key, and a Record with all that is needed to judge it again.

A Key is a Problem as the cache names it, its sizes rounded by the one function that rounds.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple

from flexattn.kernels.base.config import Config
from flexattn.problem import Captures, Problem, rounded as rounded

# The fields that are rounded: two keys that differ in these alone are neighbours.
SIZES = ("B", "q_len", "kv_len")


class Sizes(NamedTuple):
    """The sizes of a problem, as measured or rounded; `str` is a record's file name."""

    B: int
    q_len: int
    kv_len: int

    def __str__(self) -> str:
        return f"b{self.B}-q{self.q_len}-k{self.kv_len}"

    def rounded(self) -> Sizes:
        """Each size as the cache sees it."""
        return Sizes(rounded(self.B), rounded(self.q_len), rounded(self.kv_len))


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a record: everything that decides the best config, rounded.

    score, mask: fingerprints of the simplified mods with what their code depends on; "" without
    one. blocks: "128x128 full" for a BlockMask of such blocks that lists full ones apart.
    mask_class: density, imbalance and contiguity of the BlockMask, "unknown", or "" without one.
    Of the kind "serving", blocks is the cache's page and mask_class how lengths are spread.
    """

    kind: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    Hq: int
    Hkv: int
    B: int
    q_len: int
    kv_len: int
    score: str
    mask: str
    blocks: str
    mask_class: str
    layout: str
    precision: str
    sinks: bool = False

    def digest(self) -> str:
        """24 hexadecimal digits of a sha256 over every field, equal in every process.

        A field that has a default counts where it differs, so older records keep their names.
        """
        return _digest(self, _FIELDS)

    def family(self) -> str:
        """The digest of all that is not a size: the keys of one family are neighbours."""
        return _digest(self, _OF_A_FAMILY)

    @property
    def sizes(self) -> Sizes:
        """B, q_len and kv_len, rounded."""
        return Sizes(self.B, self.q_len, self.kv_len)


_FIELDS = tuple(field.name for field in fields(Key))
_OF_A_FAMILY = tuple(name for name in _FIELDS if name not in SIZES)
_DEFAULTS = {field.name: field.default for field in fields(Key) if field.default is not MISSING}


def _digest(key: Key, names: tuple[str, ...]) -> str:
    values = {name: getattr(key, name) for name in names}
    parts = [
        f"{name}={value!r}"
        for name, value in values.items()
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def sizes_of(problem: Problem) -> Sizes:
    """The sizes of a problem as they are."""
    return Sizes(problem.B, problem.q_len, problem.kv_len)


def key_of(problem: Problem) -> Key:
    """The key of a problem. Statistics that are also written do not change it."""
    s, sizes = problem.structure, sizes_of(problem).rounded()
    return Key(
        kind=s.kind,
        dtype=s.dtype,
        head_dim_qk=s.head_dim_qk,
        head_dim_v=s.head_dim_v,
        Hq=problem.Hq,
        Hkv=problem.Hkv,
        B=sizes.B,
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        score=mod_name(s.score),
        mask=mod_name(s.mask),
        blocks=problem.blocks(),
        mask_class=problem.mask_class,
        layout=problem.layout(),
        precision=problem.precision(),
        sinks=s.sinks != "",
    )


def mod_name(captures: Captures | None) -> str:
    """A mod as a key has it: its fingerprint, and which of its tensors are contiguous."""
    if captures is None:
        return ""
    flags = "".join("c" if each else "s" for each in captures.contiguous)
    return captures.mod.fingerprint[:32] + (f":{flags}" if flags else "")


SCHEMA = 1

Provenance = Literal["measured", "untuned"]
Stage = Literal[
    "infeasible", "build", "resources", "gate", "prepare", "run", "hang", "crash", "memory"
]


@dataclass(frozen=True, slots=True)
class Policy:
    """The way times were taken: a record of one policy says nothing about another.

    graph: CUDA-graph replays instead of eager calls. cold_l2: the L2 cache is evicted before each
    call. rounds, min_ms: of the finalists' race.
    """

    graph: bool
    cold_l2: bool
    rounds: int
    min_ms: float


@dataclass(frozen=True)
class Environment:
    """The place where a record holds exactly; its hash names the directory of records made there.

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

    @cached_property
    def folder(self) -> str:
        """The directory of the records made here: the device, and a hash of every field."""
        parts = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return f"{slug(self.device)}-{digest[:12]}"

    def differing(self, other: Environment) -> tuple[str, ...]:
        """The names of the fields in which two environments differ."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


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
    """True if a number can be the microseconds of a call: finite, and above 0 as it is kept."""
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


def timed_for(trials: Sequence[Trial], index: int) -> Trial:
    """The trial whose samples stand for one: another where the machine code is the same."""
    twin = trials[index].same_code_as
    return trials[index if twin is None else twin]


def common_rounds(trials: Sequence[Trial], index: int, beside: int) -> list[tuple[float, float]]:
    """Times of two trials in the rounds that both ran: of the race, or else of the screening.

    beside: the trial that was screened with all others.
    """
    own, base = timed_for(trials, index), timed_for(trials, beside)
    raced = list(zip(own.finals, base.finals, strict=False))
    return raced or list(zip(own.screening, base.screening[own.start :], strict=False))


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
    """The part of a record that dispatch reads: the config for a key, and where it comes from."""

    key: Key
    environment: Environment
    policy: Policy
    provenance: Provenance
    sizes: tuple[int, int, int]
    config: Config
    decision: Decision
    made: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """The tuned answer for one key: trials[decision.winner].config is what dispatch runs.

    sizes: B, q_len, kv_len as they were measured, before rounding. rejected: configs that were
    never built, counted by reason.
    """

    key: Key
    environment: Environment
    policy: Policy
    provenance: Provenance
    sizes: tuple[int, int, int]
    trials: tuple[Trial, ...]
    decision: Decision
    rejected: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    made: str = ""
    tool: str = ""
    title: str = ""
    note: str = ""

    @property
    def config(self) -> Config:
        """The config that dispatch runs for this key."""
        return self.trials[self.decision.winner].config

    @property
    def answer(self) -> Answer:
        """The part that dispatch reads."""
        found = {
            field.name: getattr(self, field.name)
            for field in fields(Answer)
            if field.name != "config"
        }
        return Answer(config=self.config, **found)
