"""A problem's trials: screened beside the default, raced in paired rounds, and decided by a test.

The signed-rank test reads samples alone, so that records can be judged again.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from flexattn.kernels.base.config import Config
from flexattn.measure.task import Measurer
from flexattn.records.record import Decision, Failed, Gated, Record, Trial, is_time, kept_us

MARGIN = 1.02
CONFIDENCE = 0.95
# The race looks at its samples at most this often; each look may spend an equal part of the error.
LOOKS = 3
# Challengers this close to the best one tie with it, and the one that needs less wins.
TIE = 1.005


def alpha(challengers: int, confidence: float) -> float:
    """The p-value one challenger must show at one look, so that all of them err rarely enough.

    Bonferroni over looks and challengers: it holds for any stopping rule among LOOKS looks, and
    whatever the challengers have in common.
    """
    return (1 - confidence) / (LOOKS * max(1, challengers))


def speedups(default: Sequence[float], challenger: Sequence[float]) -> list[float]:
    """The default's time over the challenger's, round by round, as far as both were timed."""
    return [a / b for a, b in zip(default, challenger, strict=False)]


def decide(
    trials: Sequence[Trial], default: int, margin: float = MARGIN, confidence: float = CONFIDENCE
) -> Decision:
    """The winner of a race by its finals' samples alone.

    A challenger replaces the default only with a median paired speedup above the margin, and if
    the signed-rank test is sure of that. Among the challengers that pass, the best median
    wins. Those within 0.5 % of it tie, and the tie goes to less shared memory, then fewer
    registers. Without a time of the default, the fastest median wins.
    """
    incumbent = trials[default]
    raced = [
        index
        for index, trial in enumerate(trials)
        if index != default and trial.finals and trial.failed is None
    ]
    if incumbent.failed is not None or not incumbent.finals:
        return _without_default(trials, default, raced, margin, confidence)
    level = alpha(len(raced), confidence)
    medians, p_values = {}, {}
    for index in raced:
        ratios = speedups(incumbent.finals, trials[index].finals)
        medians[index] = statistics.median(ratios)
        p_values[index] = signed_rank([math.log(ratio / margin) for ratio in ratios])
    faster = [i for i in raced if medians[i] > margin and p_values[i] <= level]
    if not faster:
        return Decision(
            default, default, 1.0, min(p_values.values(), default=1.0), margin, confidence,
            _why_not(medians, p_values, margin, level),
        )  # fmt: skip
    best = max(medians[i] for i in faster)
    tied = [i for i in faster if medians[i] * TIE >= best]
    winner = min(tied, key=lambda i: (_needs(trials[i]), -medians[i], i))
    rounds = len(trials[winner].finals)
    why = (
        f"{medians[winner]:.3f}x the default in the median of {rounds} paired rounds, "
        f"above {margin:g}x at p = {p_values[winner]:.2g} (at most {level:.2g})"
    )
    if len(tied) > 1:
        why += f"; of {len(tied)} that tie it needs the least"
    return Decision(
        winner, default, medians[winner], p_values[winner], margin, confidence, why
    )  # fmt: skip


def replay_study(record: Record) -> Decision:
    """The decision made again from a record's own samples, with its margin and confidence."""
    made = record.decision
    return decide(record.trials, made.default, made.margin, made.confidence)


def _needs(trial: Trial) -> tuple[int, int]:
    """Shared memory of a block, and registers of all its threads; Neuron has no threads."""
    return trial.shared_memory, trial.registers * getattr(trial.config, "num_warps", 0)


def _why_not(
    medians: dict[int, float], p_values: dict[int, float], margin: float, level: float
) -> str:
    if not medians:
        return "nothing else reached the finals"
    closest = max(medians, key=lambda i: medians[i])
    text = f"the best of {len(medians)} challengers shows {medians[closest]:.3f}x in the median"
    if medians[closest] <= margin:
        return f"{text}, not above {margin:g}x"
    return f"{text}, but p = {p_values[closest]:.2g} is above {level:.2g}"


def _without_default(
    trials: Sequence[Trial], default: int, raced: list[int], margin: float, confidence: float
) -> Decision:
    """The fastest of the rest; its speedup is 0 because there is nothing to compare it with."""
    if not raced:
        return Decision(
            default, default, 1.0, 1.0, margin, confidence, "nothing reached the finals"
        )
    winner = min(raced, key=lambda i: (statistics.median(trials[i].finals), i))
    failed = trials[default].failed
    reason = "has no time" if failed is None else f"failed ({failed.stage}: {failed.error})"
    why = f"the static default {reason}; the fastest of {len(raced)} others"
    return Decision(winner, default, 0.0, 1.0, margin, confidence, why)


# The table of rank sums has n(n + 1) entries; above this the normal approximation is as good.
EXACT_UP_TO = 25


def signed_rank(differences: Sequence[float]) -> float:
    """The chance of rank sums this high, were the differences symmetric about zero or lower.

    Zeros are left out and ties share their mean rank, as in Wilcoxon (1945); the distribution is
    that of the ranks at hand, counted exactly for at most 25 differences, above that a normal one
    with the ties' variance and a continuity correction (Hollander and Wolfe, 1999, section 3.1).
    1.0 where nothing is left.
    """
    kept = [each for each in differences if each]
    if not kept:
        return 1.0
    doubled = _doubled_ranks([abs(each) for each in kept])
    positive = sum(rank for rank, each in zip(doubled, kept, strict=True) if each > 0)
    if len(kept) <= EXACT_UP_TO:
        return _exact(doubled, positive)
    mean = sum(doubled) / 2
    deviation = math.sqrt(sum(rank * rank for rank in doubled)) / 2
    return 0.5 * math.erfc((positive - mean - 1) / (deviation * math.sqrt(2)))


def _doubled_ranks(sizes: Sequence[float]) -> list[int]:
    """Twice the rank of each size, ties sharing their mean: doubled, they are integers."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    ranks = [0] * len(sizes)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and sizes[order[end]] == sizes[order[begin]]:
            end += 1
        for position in order[begin:end]:
            ranks[position] = begin + 1 + end
        begin = end
    return ranks


def _exact(doubled: Sequence[int], positive: int) -> float:
    """The share of all 2**n choices of signs whose positive ranks sum to at least this."""
    ways = [1] + [0] * sum(doubled)
    reached = 0
    for rank in doubled:
        reached += rank
        for total in range(reached, rank - 1, -1):
            ways[total] += ways[total - rank]
    share: float = sum(ways[positive:]) / 2 ** len(doubled)
    return share


Sampled = tuple[float, ...] | Failed
# Nobody asks for the spread of a trial that costs more than this times the best.
FAR = 1.25
# Characters of a failure's message that a record keeps.
SAID = 400
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s:]+/)+")


def cost(trials: Sequence[Trial], index: int, default: int) -> float:
    """Screened time over the default's in the same rounds, in the median; below 1 is faster.

    Infinite for a failure, NaN for what was not screened. Without a default, microseconds.
    """
    trial = trials[index]
    if trial.same_code_as is not None:
        return cost(trials, trial.same_code_as, default)
    if trial.failed is not None:
        return math.inf
    if not trial.screening:
        return math.nan
    base = trials[default]
    if base.failed is not None:
        return statistics.median(trial.screening)
    if index == default:
        return 1.0
    paired = base.screening[trial.start : trial.start + len(trial.screening)]
    return statistics.median(a / b for a, b in zip(trial.screening, paired, strict=False))


def thinned(trials: Sequence[Trial], default: int) -> tuple[Trial, ...]:
    """Trials as a record keeps them: of one far off, the round of its median cost alone."""
    costs = [cost(trials, index, default) for index in range(len(trials))]
    limit = FAR * min((each for each in costs if each > 0), default=math.inf)
    return tuple(
        trial if index == default or trial.finals or not costs[index] > limit
        else _median_round(trial, trials[default])
        for index, trial in enumerate(trials)
    )  # fmt: skip


def _median_round(trial: Trial, default: Trial) -> Trial:
    paired = zip(trial.screening, default.screening[trial.start :], strict=False)
    ratios = [a / b for a, b in paired]
    if len(ratios) < 2:
        return trial
    at = ratios.index(statistics.median_low(ratios))
    return replace(trial, screening=trial.screening[at : at + 1], start=trial.start + at)


def _kept(got: Sampled) -> Sampled:
    """Samples as a record keeps them, or the failure of a config whose samples are no times."""
    if isinstance(got, Failed):
        return got
    wrong = [us for us in got if not is_time(us)]
    if wrong:
        text = f"{len(wrong)} of {len(got)} samples, the first {wrong[0]:g} us: a time is above 0"
        return Failed("run", "NoTime", text)
    return tuple(map(kept_us, got))


class TrialTable:
    """Trials by index, the only thing of a tuning that changes."""

    def __init__(self, configs: Iterable[Config], default: int) -> None:
        self._trials = [Trial(config) for config in configs]
        self.default = default

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials, in the order of the configs."""
        return tuple(self._trials)

    def __getitem__(self, index: int) -> Trial:
        return self._trials[index]

    def __len__(self) -> int:
        return len(self._trials)

    @property
    def infeasible(self) -> int:
        """The number of configs that the compiler or a check refused for good."""
        failed = (trial.failed for trial in self._trials)
        return sum(each is not None and each.stage == "infeasible" for each in failed)

    def put(self, index: int, trial: Trial) -> None:
        """Replace a trial by one that knows more."""
        self._trials[index] = trial

    def fail(self, index: int, failed: Failed) -> None:
        """Say why this config has no time; files are named without this machine's folders."""
        short = replace(failed, message=FOLDERS.sub("", failed.message)[:SAID])
        self._trials[index] = replace(self._trials[index], failed=short)

    def gate(self, index: int, gated: Gated | Failed) -> None:
        """Note the accuracy gate's verdict; a red one is a failure."""
        if isinstance(gated, Failed):
            self.fail(index, gated)
            return
        self._trials[index] = replace(self._trials[index], gate=gated)
        if not gated.passed:
            text = f"{gated.name}: error {gated.error:.3g}, budget {gated.budget:.3g}"
            self.fail(index, Failed("gate", "Inaccurate", text))

    def healthy(self, index: int) -> bool:
        """True if the config may still be timed itself: no failure, no twin that was timed."""
        trial = self._trials[index]
        return trial.failed is None and trial.same_code_as is None

    def screened(self, indices: Sequence[int], samples: Sequence[Sampled], start: int) -> None:
        """Note a batch's samples; `start` is how many rounds of the default there were before."""
        for index, taken in self._kept(indices, samples):
            trial = self._trials[index]
            if index == self.default:
                taken, first = (*trial.screening, *taken), 0
            else:
                first = start
            self._trials[index] = replace(trial, screening=taken, start=first)

    def raced(self, indices: Sequence[int], samples: Sequence[Sampled]) -> None:
        """Append one look's samples of the finals."""
        for index, taken in self._kept(indices, samples):
            trial = self._trials[index]
            self._trials[index] = replace(trial, finals=(*trial.finals, *taken))

    def _kept(
        self, indices: Sequence[int], samples: Sequence[Sampled]
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        """The samples of each config; a config without usable ones is a failure."""
        for index, got in zip(indices, samples, strict=True):
            taken = _kept(got)
            if isinstance(taken, Failed):
                self.fail(index, taken)
            else:
                yield index, taken

    def cost(self, index: int) -> float:
        """The cost of a config, by the function of this name, for the trials as they stand."""
        return cost(self._trials, index, self.default)

    def ranked(self) -> list[int]:
        """Indices that were screened and did not fail, the cheapest first; no twins."""
        costs = {i: self.cost(i) for i in range(len(self)) if self.healthy(i)}
        known = [i for i, cost in costs.items() if not math.isnan(cost)]
        return sorted(known, key=lambda i: (costs[i], i))

    def us(self, index: int) -> float | None:
        """Median microseconds of a screening; None without one."""
        samples = self._trials[index].screening
        return statistics.median(samples) if samples else None

    def best_us(self) -> float | None:
        """Microseconds of the cheapest so far; None before anything was screened."""
        ranked = self.ranked()
        return self.us(ranked[0]) if ranked else None

    def compact(
        self, kept: Sequence[int], margin: float, confidence: float
    ) -> tuple[tuple[Trial, ...], Decision]:
        """The trials worth keeping, renumbered, with their decision."""
        place = {index: position for position, index in enumerate(kept)}
        trials = tuple(self._renumbered(self._trials[index], place) for index in kept)
        trials = thinned(trials, place[self.default])
        return trials, decide(trials, place[self.default], margin, confidence)

    @staticmethod
    def _renumbered(trial: Trial, place: dict[int, int]) -> Trial:
        if trial.same_code_as is None:
            return trial
        return replace(trial, same_code_as=place[trial.same_code_as])


# A candidate this many times slower than the best is not timed again.
HOPELESS = 3.0
# Beside the default.
FINALISTS = 4
# Screening takes few rounds: who costs more than this times the best stays out of the finals.
NEAR = 1.05
# Eight rounds that all agree are the fewest that can convince the test with four challengers.
FIRST_LOOK = 8


def screen(
    measurer: Measurer, table: TrialTable, batch: Sequence[int], rounds: int, min_ms: float
) -> None:
    """Time a batch and the default in the same rounds; the hopeless leave after one value."""
    default = table.default
    start = len(table[default].screening)
    group = [default] if table.healthy(default) else []
    group += [i for i in batch if i != default and table.healthy(i)]
    configs = [table[i].config for i in group]
    limit = math.inf
    if (best := table.best_us()) is not None:
        # The default stays in any case: what the others are compared with has all the rounds.
        limit = max(HOPELESS * best, HOPELESS * (table.us(default) or 0.0) / 2)
    samples = measurer.sample(configs, rounds, min_ms, limit)
    if group and group[0] == default and not isinstance(samples[0], Failed):
        # A value without the default's of its round compares with nothing.
        most = len(samples[0])
        samples = [s if isinstance(s, Failed) else s[:most] for s in samples]
    table.screened(group, samples, start)


def finalists(table: TrialTable) -> list[int]:
    """The default, then the best of the screening that are near the very best of it."""
    ranked = table.ranked()
    near = [i for i in ranked if table.cost(i) <= NEAR * table.cost(ranked[0])]
    challengers = [i for i in near if i != table.default][:FINALISTS]
    return [i for i in ranked if i == table.default] + challengers


def looks(rounds: int) -> list[int]:
    """After how many rounds the race stops to look: at most LOOKS times, the last at the end."""
    if rounds <= FIRST_LOOK:
        return [rounds]
    steps = LOOKS - 1
    return [FIRST_LOOK + (rounds - FIRST_LOOK) * step // steps for step in range(LOOKS)]


def race_trials(
    measurer: Measurer,
    table: TrialTable,
    rounds: int,
    min_ms: float,
    margin: float,
    confidence: float,
    expired: Callable[[], bool] = lambda: False,
    said: Callable[[str], None] = lambda text: None,
) -> Decision:
    """Race the finalists until the test is sure, the rounds are used up, or the time is.

    Fewer rounds than the first look needs could convince nobody: it has at least those.
    """
    running = finalists(table)
    default = table.default
    if running == [default]:
        # Nothing to compare it with; the rounds would tell nothing.
        return decide(table.trials, default, margin, confidence)
    decision, taken = None, 0
    for look in looks(max(rounds, FIRST_LOOK)):
        configs = [table[i].config for i in running]
        table.raced(running, measurer.sample(configs, look - taken, min_ms))
        taken = look
        decision = decide(table.trials, default, margin, confidence)
        running = [i for i in running if table[i].failed is None]
        running = _undecided(table, running, decision)
        said(f"{taken} rounds, {len(running)} left")
        if not running or expired():
            break
    assert decision is not None
    return decision


def _undecided(table: TrialTable, running: list[int], decision: Decision) -> list[int]:
    """The configs that must run on; none once it is settled.

    A challenger leaves when it is surely not above the margin, or surely slower than the winner;
    the winner has won when the others that are left tie with it.
    """
    default = decision.default
    finals = {i: table[i].finals for i in running}
    if default not in finals:
        return [] if len(running) < 2 else running
    level = alpha(sum(bool(t.finals) for t in table.trials) - 1, decision.confidence)
    base, winner = finals[default], decision.winner
    challengers = []
    for i in running:
        if i in (default, winner):
            continue
        ratios = speedups(base, finals[i])
        hopeless = signed_rank([math.log(decision.margin / ratio) for ratio in ratios]) <= level
        if winner != default and not hopeless:
            behind = speedups(finals[i], finals[winner])
            hopeless = signed_rank([math.log(ratio) for ratio in behind]) <= level
            hopeless = hopeless and statistics.median(behind) > TIE
        if not hopeless:
            challengers.append(i)
    if winner == default:
        return [default, *challengers] if challengers else []
    rivals = [i for i in challengers if not 1 / TIE <= _median(finals[i], finals[winner]) <= TIE]
    return [default, winner, *challengers] if rivals else []


def _median(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(speedups(ours, theirs))
