"""One record in numbers and in the words of the report's tables, without pictures."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from flexattn.device import PEAKS, Peaks
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.registry import short
from flexattn.measure.timing import NO_RATIO, Ratio, Samples, paired_ratio
from flexattn.problem import ITEMSIZE
from flexattn.problem.problem import PRODUCT_WORDS
from flexattn.problem.serving import SERVING_ITEMSIZE as SERVED
from flexattn.records.record import Key, Record, Trial, common_rounds, timed_for
from flexattn.report.rivals import BenchResults
from flexattn.serving.verified import batch_lengths

_Value = int | str  # of one field of a config; switches are False and True


@dataclass(frozen=True, slots=True)
class Timed:
    """One config's time in microseconds a call: the median of its rounds and their quartiles.

    trial: its index in the record.
    """

    trial: int
    config: Config
    us: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Effect:
    """One axis of the space: the best median each of its values reaches, other axes free.

    values: (value, best microseconds, configs timed). cost: how much slower the best becomes when
    the axis is held at its worst value, 0.1 for 10 %.
    """

    axis: str
    values: tuple[tuple[_Value, float, int], ...]
    cost: float


@dataclass(frozen=True, slots=True)
class Reason:
    """Configs without a time: the stage that stopped them, why, how many, and an example."""

    stage: str
    name: str
    count: int
    example: str = ""


def timed(record: Record) -> tuple[Timed, ...]:
    """Every config with a time, the fastest first."""
    found = []
    for index, trial in enumerate(record.trials):
        source = timed_for(record.trials, index)
        samples = source.finals or source.screening
        if trial.failed is None and source.failed is None and samples:
            low, middle, high = _quartiles(samples)
            found.append(Timed(index, trial.config, middle, low, high, len(samples)))
    return tuple(sorted(found, key=lambda each: each.us))


def comparable(record: Record) -> tuple[Timed, ...]:
    """As `timed`, of the winner's template alone: others have other numbers."""
    kind = type(record.config)
    return tuple(each for each in timed(record) if type(each.config) is kind)


def config_axes(record: Record) -> tuple[str, ...]:
    """The numbers in which comparable configs differ, in the config's order."""
    configs = [each.config for each in comparable(record)]
    names = [field.name for field in fields(record.config)]
    return tuple(n for n in names if len({getattr(c, n) for c in configs}) > 1)


def effects(record: Record) -> tuple[Effect, ...]:
    """The axes that vary, the dearest first."""
    found = []
    times = comparable(record)
    for axis in config_axes(record):
        by_value: dict[_Value, list[float]] = {}
        for each in times:
            by_value.setdefault(getattr(each.config, axis), []).append(each.us)
        found_values = _ordered(by_value)
        values = tuple((v, min(by_value[v]), len(by_value[v])) for v in found_values)
        best = [us for _, us, _ in values]
        found.append(Effect(axis, values, max(best) / min(best) - 1))
    return tuple(sorted(found, key=lambda effect: -effect.cost))


def gain(record: Record) -> Ratio:
    """Time of the static default over that of the winner, round by round, with its interval.

    Rounds of the race where both ran it, else of the screening; NaN where no round is common.
    """
    decision = record.decision
    pairs = common_rounds(record.trials, decision.winner, decision.default)
    if not pairs:
        return NO_RATIO
    winner, default = map(Samples, zip(*pairs, strict=True))
    return paired_ratio(default, winner)


def untimed_reasons(record: Record) -> tuple[Reason, ...]:
    """Why configs have no time: those not built by a rule or for want of time, then the others."""
    rejected = [
        Reason("not built", name, count)
        for name, count in sorted(record.rejected, key=lambda each: -each[1])
    ]
    failed: dict[tuple[str, str], list[Trial]] = {}
    for index, trial in enumerate(record.trials):
        stage = _stage(trial, timed_for(record.trials, index))
        if stage is not None:
            failed.setdefault(stage, []).append(trial)
    rest = [
        Reason(stage, name, len(trials), _example(trials[0]))
        for (stage, name), trials in sorted(failed.items(), key=lambda item: -len(item[1]))
    ]
    return (*rejected, *rest)


def label(value: _Value) -> str:
    """An axis' value in words: switches are on or off, and an empty one is none."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value) or "none"


def _stage(trial: Trial, source: Trial) -> tuple[str, str] | None:
    """Stage and reason of a trial without a time; None for a timed one. source: timed for it."""
    if (failed := trial.failed or source.failed) is not None:
        return failed.stage, failed.error
    if source.finals or source.screening:
        return None
    if trial.gate is not None and not trial.gate.passed:
        return "gate", "over budget"
    return "not run", "left out by the search or the budget"


def _example(trial: Trial) -> str:
    text = short(trial.config)
    if trial.failed is not None and trial.failed.message:
        first = trial.failed.message.strip().splitlines()[0]
        text += f": {first[:160]}"
    return text


def _ordered(values: Iterable[_Value]) -> tuple[_Value, ...]:
    """Each value once; numbers by size, words by the alphabet."""
    return tuple(sorted(set(values), key=lambda value: (isinstance(value, str), value)))


def _quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


Density = Literal["exact", "class", "unknown"]
# Cards that share a name with one of the table and do less: part of the name, as data sheets say.
_CARDS: tuple[tuple[str, Peaks], ...] = (
    # NVIDIA H200 data sheet: the NVL card has the SXM's memory and a lower power limit.
    ("h200-nvl", Peaks(835.5, 417.5, 60.0, 4.8)),
    # NVIDIA H100 data sheet: NVL, PCIe.
    ("h100-nvl", Peaks(835.5, 417.5, 60.0, 3.9)),
    ("h100-pcie", Peaks(756.5, 378.0, 51.0, 2.0)),
    # NVIDIA A100 data sheet: 40 GB.
    ("a100-sxm4-40gb", Peaks(312.0, 156.0, 19.5, 1.555)),
    ("a100-pcie-40gb", Peaks(312.0, 156.0, 19.5, 1.555)),
)


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a call: floating-point operations, and bytes of q, k, v and out, once.

    kept: the share of query and key pairs that the mask's listed blocks hold. density: "exact"
    without a mask; "class" where the mask's class says it, to a factor of about 1.4; "unknown"
    where nothing does and every pair is counted, so that rates are upper bounds.
    """

    flops: float
    bytes: float
    kept: float
    density: Density

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Reach:
    """A time as rates, in TFLOP/s and TB/s, and as a share of the limit that binds.

    bound: "compute" or "memory", the lower of the two roofs at this intensity. share and bound
    are None where the device's limits are not known.
    """

    tflops: float
    bandwidth: float
    share: float | None
    bound: Literal["compute", "memory"] | None


def work(record: Record) -> Work:
    """The work of one call of a record's problem, at the sizes that were measured.

    Two products of 2 x head dimension for each pair that is kept, as bench counts them, and five
    of a backward, which reads and writes a gradient beside each tensor. Keys that no block lists
    are not read; decode reads each key once for all heads of a group.
    """
    key = record.key
    B, q_len, kv_len = record.sizes
    if key.kind == "serving":
        return _of_plan(record)
    kept, density = _kept(key.mask_class)
    dims = key.head_dim_qk + key.head_dim_v
    backward = key.kind == "backward"
    products = 3 * key.head_dim_qk + 2 * key.head_dim_v if backward else dims
    flops = 2.0 * B * key.Hq * q_len * kv_len * products * kept
    # One query row reads the kept keys alone; many rows together read all of them.
    read = kept if key.kind == "decode" else 1.0
    queries, keys = ITEMSIZE[key.dtype], ITEMSIZE[_kv_dtype(key)]
    moved = B * dims * (key.Hq * q_len * queries + key.Hkv * kv_len * read * keys)
    return Work(flops, float(moved) * (2 if backward else 1), kept, density)


def _kv_dtype(key: Key) -> str:
    """The dtype of K and V, which a key tells where it is not q's."""
    told = re.search(r"kv=(\w+)", key.precision)
    return told.group(1) if told else key.dtype


def _of_plan(record: Record) -> Work:
    """As `work`: the keys of each request are those of its class; a window's are all counted."""
    key = record.key
    B, rows, kv_len = record.sizes
    q_len = 1 if key.mask_class == "mixed" else rows
    kv_lens = batch_lengths(key.mask_class, B, q_len, kv_len)[1]
    queries = rows if key.mask_class == "mixed" else B * rows
    dims = key.head_dim_qk + key.head_dim_v
    # A tied V is read with its K.
    width = key.head_dim_qk if "shared_kv" in key.layout else dims
    itemsize = SERVED[_kv_dtype(key)]
    pairs = queries * sum(kv_lens) / B
    moved = key.Hq * queries * dims * SERVED[key.dtype] + key.Hkv * sum(kv_lens) * width * itemsize
    kept = sum(kv_lens) / (B * kv_len)
    return Work(
        2.0 * key.Hq * pairs * dims, float(moved), kept, "unknown" if key.mask else "exact"
    )


def reach(record: Record, us: float) -> Reach:
    """The share of its device's limits that a call of `us` microseconds reaches."""
    done = work(record)
    tflops, bandwidth = done.flops / us / 1e6, done.bytes / us / 1e6
    found = limits_of(record.environment.device)
    if found is None:
        return Reach(tflops, bandwidth, None, None)
    roof = min(found.peak(record.key.dtype, products_of(record)), found.bandwidth * done.intensity)
    bound: Literal["compute", "memory"] = (
        "memory"
        if done.intensity < found.ridge(record.key.dtype, products_of(record))
        else "compute"
    )
    return Reach(tflops, bandwidth, tflops / roof, bound)


def products_of(record: Record) -> str:
    """The way in which float32 is multiplied in this record's problem."""
    words = set(record.key.precision.split())
    return next((products for products, word in PRODUCT_WORDS.items() if word in words), "ieee")


def _kept(mask_class: str) -> tuple[float, Density]:
    """The share of pairs that a mask's class names ("d1/8 i2 runs"), and how well it is known."""
    if not mask_class:
        return 1.0, "exact"
    found = re.match(r"d1(?:/(\d+))?\b", mask_class)
    return (1 / int(found.group(1) or 1), "class") if found else (1.0, "unknown")


def limits_of(device: str) -> Peaks | None:
    """The limits of a device by its name ("nvidia-h200", "nvidia-h100-80gb-hbm3"), if known."""
    name = device.lower().replace(" ", "-")
    # Drivers leave the maker out; the longer name comes before one that is a part of it.
    models = ((each.partition("-")[2].removesuffix("-graphics"), each) for each in PEAKS)
    known = ((model, PEAKS[each]) for model, each in sorted(models, key=lambda m: -len(m[0])))
    return next((limits for part, limits in (*_CARDS, *known) if part in name), None)


@dataclass(frozen=True, slots=True)
class Side:
    """The default or the winner: its trial, its time and its share of the device's limits.

    time, reach: None where it has no time.
    """

    trial: Trial
    time: Timed | None
    reach: Reach | None

    @property
    def config(self) -> str:
        """The config in short."""
        return short(self.trial.config)

    @property
    def us(self) -> float | None:
        """The median in microseconds."""
        return self.time.us if self.time else None


@dataclass(frozen=True, slots=True)
class Summary:
    """A record with what the page says of it.

    gain: the default's time over the winner's, paired. torch: the best rival of the bench whose
    name starts with torch, and its time over ours. missing: sentences about what could not be
    computed.
    """

    record: Record
    problem: str
    default: Side
    winner: Side
    gain: Ratio
    timed: int
    reasons: tuple[Reason, ...]
    torch: tuple[str, float] | None
    missing: tuple[str, ...]

    @property
    def title(self) -> str:
        """The record's title, or the digest of its key."""
        return self.record.title or self.record.key.digest()

    @property
    def device(self) -> str:
        """The device's name."""
        return self.record.environment.device

    @property
    def model(self) -> str:
        """The workload's name, with which its titles begin."""
        return (self.title.split() or [self.title])[0]

    @property
    def changed(self) -> bool:
        """True if the winner is not the static default."""
        return self.record.decision.winner != self.record.decision.default

    @property
    def speedup(self) -> float | None:
        """The gain; None where the default has no time in the winner's rounds."""
        return None if math.isnan(self.gain.value) else self.gain.value

    @property
    def untimed(self) -> int:
        """The number of configs without a time."""
        return sum(reason.count for reason in self.reasons)


def summarize(record: Record, benches: tuple[BenchResults, ...] = ()) -> Summary:
    """Everything the page says about a record, without the pictures."""
    decision, ratio = record.decision, gain(record)
    return Summary(
        record,
        _problem(record),
        _side(record, decision.default),
        _side(record, decision.winner),
        ratio,
        len(timed(record)),
        untimed_reasons(record),
        _best_torch(record, benches),
        tuple(_missing(record, math.isnan(ratio.value))),
    )


def _missing(record: Record, unpaired: bool) -> Iterator[str]:
    """Sentences on what could not be computed, and why."""
    device, times, same = record.environment.device, timed(record), comparable(record)
    if not times:
        yield "No config has a time, so there is nothing to draw."
        return
    if unpaired:
        yield "The default and the winner share no round, so there is no speedup."
    if len(times) == 1:
        yield "One config was timed, so there is nothing to compare it with."
    if others := len(times) - len(same):
        which = f"{others} configs are" if others > 1 else "One config is"
        yield (
            f"{which} of another template than the winner's, which has other numbers: only the "
            "list of all configs and the roofline show them."
        )
    if limits_of(device) is None:
        yield f"The limits of {device} are not in the table of known devices, so no share of them."
    if not record.trials[record.decision.winner].registers:
        yield "The compiler's registers and shared memory were not recorded."


def _problem(record: Record) -> str:
    """Kind, dtype, heads and sizes as they were measured, and what the mods are, in one line."""
    key, (B, q_len, kv_len) = record.key, record.sizes
    dims = str(key.head_dim_qk)
    if key.head_dim_v != key.head_dim_qk:
        dims += f"/{key.head_dim_v}"
    sizes = f"B={B} Hq={key.Hq} Hkv={key.Hkv} q_len={q_len} kv_len={kv_len} D={dims}"
    parts = [f"{key.kind} {key.dtype} {sizes}"]
    parts += ["score_mod"] * bool(key.score) + ["mask_mod"] * bool(key.mask)
    if key.blocks:
        parts.append(f"blocks {key.blocks}")
    if key.mask_class:
        parts.append(f"mask class {key.mask_class}")
    if key.precision:
        parts.append(key.precision)
    return ", ".join(parts)


def _side(record: Record, index: int) -> Side:
    found = next((each for each in timed(record) if each.trial == index), None)
    return Side(record.trials[index], found, reach(record, found.us) if found else None)


def _best_torch(record: Record, benches: tuple[BenchResults, ...]) -> tuple[str, float] | None:
    """torch's own best on the bench's row of this title, with its time over ours."""
    found = [
        (rival.name, rival.ratio.value)
        for bench in benches
        if record.title and (row := bench.row(record.title)) is not None
        for rival in row.rivals
        if rival.name.startswith("torch") and not math.isnan(rival.ratio.value)
    ]
    return min(found, key=lambda each: each[1], default=None)
