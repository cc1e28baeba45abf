"""Feasibility on a named target, with what the problem's mods ask of a kernel there."""

from __future__ import annotations

from functools import lru_cache

from flexattn.device.neuroncore import CORES
from flexattn.errors import UnsupportedError
from flexattn.kernels.nki import space as nki
from flexattn.kernels.nki.config import (
    MaskSelect,
    NkiConfig,
    NkiDecodeConfig,
    NkiForm,
    NkiPrefillConfig,
)
from flexattn.kernels.nki.source import print_mods
from flexattn.problem import Problem


@lru_cache(maxsize=256)
def needs(problem: Problem, target: str, mask: MaskSelect, form: NkiForm = "s") -> nki.Needs:
    """What the mods need in one form of masks and of scores.

    `refused` says why they cannot be expressed.
    """
    try:
        mods = print_mods(problem, _plain(problem, mask, form), target)
    except UnsupportedError as error:
        return nki.Needs(refused=str(error))
    ranged = mods.mask is not None and mods.mask.reduces
    return nki.Needs(tuple(sorted(mods.tiles.items())), ranged)


def target_reasons(config: NkiConfig, problem: Problem, target: str) -> list[str]:
    """Why a config cannot run for a problem on a target such as "trn2"."""
    known = needs(problem, target, config.mask, config.form)
    return nki.nki_reasons(config, problem, CORES[target], known)


def default_config(problem: Problem, target: str) -> NkiConfig:
    """The config to start from; raises as `survey` does."""
    _check_mods(problem, target)
    return nki.nki_default(problem, CORES[target], _needs_of(problem, target))


def target_survey(problem: Problem, target: str, effort: nki.NkiEffort = "full") -> nki.NkiSurvey:
    """The configs that fit, and the others counted by reason.

    Raises UnsupportedError naming the operation and the target for mods that cannot be expressed,
    ConfigError with the reasons where no config fits.
    """
    _check_mods(problem, target)
    return nki.nki_survey(problem, CORES[target], _needs_of(problem, target), effort)


def _needs_of(problem: Problem, target: str) -> nki.NeedsOf:
    return lambda config: needs(problem, target, config.mask, config.form)


def _check_mods(problem: Problem, target: str) -> None:
    """One error about a mod, instead of the same reason against every config."""
    if all(needs(problem, target, form).refused for form in nki.FORMS):
        print_mods(problem, _plain(problem, nki.FORMS[-1]), target)


def _plain(problem: Problem, mask: MaskSelect, form: NkiForm = "s") -> NkiConfig:
    if problem.structure.kind == "decode":
        return NkiDecodeConfig(128, 128, mask=mask, form=form)
    return NkiPrefillConfig(128, 128, mask=mask, form=form)
