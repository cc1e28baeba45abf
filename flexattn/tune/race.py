"""race: screening in batches beside the default, then the finalists in paired rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from flexattn.measure.protocol import Measurer
from flexattn.records.record import Decision, Failed
from flexattn.tune.decide import LOOKS, TIE, alpha, decide, speedups
from flexattn.tune.signed_rank import signed_rank
from flexattn.tune.trial_table import TrialTable

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
    """Who must run on; nobody once it is settled.

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
