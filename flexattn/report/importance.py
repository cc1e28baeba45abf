"""What mattered: how much of the spread of times each axis of the space explains, by Optuna."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.records.record import Record
from flexattn.report.numbers import Timed, comparable, config_axes, on_axis

# PED-ANOVA sets the best quarter beside all. A smaller group would be a handful of configs, which
# agree in much by chance; with fewer configs than this, so would the quarter.
_BEST, FEWEST = 0.25, 16


@dataclass(frozen=True, slots=True)
class Importance:
    """Share of each axis, all of them 1, the largest first; empty with the reason in `note`."""

    shares: tuple[tuple[str, float], ...]
    note: str


def importance(record: Record) -> Importance:
    """Optuna's PED-ANOVA importances over the timed configs of one record.

    It asks which axes set the best quarter of the configs apart from the rest, so it is about the
    winners and not about how bad the worst are. Empty without Optuna or with too few configs.
    """
    times, names = comparable(record), config_axes(record)
    if len(names) < 2 or len(times) < FEWEST:
        return Importance(
            (),
            f"How much each number matters is ranked from {FEWEST} timed configs and two numbers "
            f"that vary on; here are {len(times)} and {len(names)}, so what the worst value of "
            "each costs stands alone.",
        )
    try:
        shares = _shares(times, names)
    except ModuleNotFoundError as error:
        return Importance((), f"Importances need {error.name}: pip install 'flexattn[tune]'.")
    total = sum(shares.values())
    if not total > 0:
        return Importance((), "No number sets the best quarter of configs apart from the rest.")
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return Importance(tuple((name, share / total) for name, share in ranked), "")


def _shares(times: tuple[Timed, ...], names: tuple[str, ...]) -> dict[str, float]:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="minimize")
        distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(sorted({_choice(each, name) for each in times}))
            for name in names
        }
        study.add_trials([
            optuna.trial.create_trial(
                params={name: _choice(each, name) for name in names},
                distributions=distributions,
                value=each.us,
            )
            for each in times
        ])  # fmt: skip
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BEST)
        return optuna.importance.get_param_importances(study, evaluator=evaluator)
    finally:
        optuna.logging.set_verbosity(before)


def _choice(each: Timed, name: str) -> str:
    """A value as a category: True would be equal to 1."""
    return str(on_axis(each.config, name))
