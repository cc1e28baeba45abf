"""The static defaults: where to start, and what to fall back to, with nothing tuned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import Config, Language
from flexattn.kernels.base.estimate import Estimate, best_first
from flexattn.kernels.base.family import KernelFamily
from flexattn.kernels.base.limits import able
from flexattn.kernels.choose.registry import by_language, family_of, leading
from flexattn.problem import Problem, Structure


def reasons(config: Config, structure: Structure, device: Device) -> list[str]:
    """Why a config cannot run for a structure on a device; an empty list when it can."""
    return family_of(config).limits.reasons(config, structure, device)


def candidates(
    problem: Problem, device: Device, language: Language | None = None
) -> Iterator[Config]:
    """The static default, then what to fall back to where it does not build or fit, or spills.

    Of Hopper's template all tiles come first, each in its variants; then Triton's, the smallest
    last. Before them is Triton's first one where models expect it to be faster, as it is for short
    prompts. Sizes decide little: a new length needs no new kernel, or one of a few of prefill's,
    or the other one of decode's two tile heights by q_len. language: its configs alone.
    Raises ConfigError with the reasons when nothing can run.
    """
    template, do = problem.unserved()
    if language == "gluon":
        template, do = f"Gluon {template}", "leave the choice of the backend open"
    return able(
        _wanted(problem.bucketed(), device, language),
        lambda config: reasons(config, problem.structure, device),
        f"no config of the {template} template fits {problem.describe()}",
        do,
    )


def _wanted(problem: Problem, device: Device, language: Language | None) -> Iterator[Config]:
    if language is None:
        found = tuple(leading(problem.structure, device))
    else:
        only = by_language(problem.structure.kind, language)
        found = () if only is None else (only,)
    every: dict[KernelFamily[Any], Iterable[Any]]
    every, faster = {family: family.defaults(problem, device) for family in found}, None
    if len(found) > 1:
        every = {family: tuple(configs) for family, configs in every.items()}
        faster = _expected_faster(every, problem, device)
        yield from () if faster is None else (faster,)
    for family, configs in every.items():
        for config in configs:
            yield from (each for each in family.variants(config) if each != faster)


def _expected_faster(
    every: Mapping[KernelFamily[Any], Iterable[Any]], problem: Problem, device: Device
) -> Config | None:
    """The first config of a family that models expect to gain over that of the first family."""
    firsts = []
    for family, configs in every.items():
        violated = family.limits.violated
        able = (each for each in configs if not violated(each, problem.structure, device))
        firsts.append((family, next(able, None)))

    def expected(first: tuple[KernelFamily[Any], Any]) -> Estimate | None:
        family, config = first
        return None if config is None else family.expected(problem, config, device)

    best = next(best_first(firsts[:1], firsts[1:], expected))
    return None if best is firsts[0] else best[1]


def default(problem: Problem, device: Device, language: Language | None = None) -> Config:
    """The static default: the first config of the device's that can run here."""
    return next(candidates(problem, device, language))


def refused(problem: Problem, device: Device, language: Language) -> str:
    """Why no config of a language's template can run for a problem; "" where one can."""
    family = by_language(problem.structure.kind, language)
    if family is None:
        return f"no {problem.structure.kind} template is written in it"
    if not family.offered(device) and not problem.structure.fp8:
        return f"the Triton that is installed has no {language.title()} for Hopper"
    first = ""
    for config in family.defaults(problem, device):
        found = reasons(config, problem.structure, device)
        if not found:
            return ""
        first = first or "; ".join(found)
    structure = problem.structure
    dims = f"{structure.head_dim_qk} and {structure.head_dim_v}"
    return first or f"it takes no head dimensions of {dims}"
