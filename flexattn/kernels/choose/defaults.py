"""The configs of a problem: static defaults, what to fall back to, and the space of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from math import log2
from typing import NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.config import Config, Language
from flexattn.kernels.base.family import Effort
from flexattn.kernels.base.limits import able
from flexattn.kernels.choose.registry import by_language, families, family_of, leading
from flexattn.problem import Problem, Structure


def reasons(config: Config, structure: Structure, device: Device) -> list[str]:
    """The reasons why a config cannot run for a structure on a device; empty when it can."""
    return family_of(config).limits.reasons(config, structure, device)


def candidates(
    problem: Problem, device: Device, language: Language | None = None
) -> Iterator[Config]:
    """The static default, then what to fall back to where it does not build or fit, or spills.

    Of Hopper's template all tiles come first, each in its variants; then Triton's, the smallest
    last. Before them is Triton's first one where it is faster, as it is for short prompts. Sizes
    decide little: a new length needs no new kernel, or one of a few of prefill's, or the other one
    of decode's two tile heights by q_len. language: its configs alone.
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
        only = by_language(problem.structure.kind, language, device)
        found = () if only is None else (only,)
    short = (family for family in found[1:] if family.goes_first(problem, device))
    first = next((next(family.able(problem, device), None) for family in short), None)
    yield from () if first is None else (first,)
    for family in found:
        for config in family.defaults(problem, device):
            yield from (each for each in family.variants(config) if each != first)


def default(problem: Problem, device: Device, language: Language | None = None) -> Config:
    """The static default: the first config of the device's that can run here."""
    return next(candidates(problem, device, language))


def refused(problem: Problem, device: Device, language: Language) -> str:
    """The reason why no config of a language's template can run for a problem; "" where one
    can.
    """
    family = by_language(problem.structure.kind, language, device)
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


# How many configs of the quick effort are the static default's own alternatives.
ALTERNATIVES = 3
LEFT_OUT = "left out by quick"


class Survey(NamedTuple):
    """A space with what it leaves out: each config of the grid is in `configs` or counted once.

    configs: the static default first. rejected: how many others broke each rule; a config that
    breaks several counts for the first one.
    """

    configs: tuple[Config, ...]
    rejected: tuple[tuple[str, int], ...]


def space(problem: Problem, device: Device, effort: Effort = "full") -> tuple[Config, ...]:
    """Every config worth trying that can run, each once, the static default first.

    quick: a few near the default. full: what seldom loses. exhaustive: all that can run,
    some of which spill. Raises ConfigError when nothing can run.
    """
    return survey(problem, device, effort).configs


def survey(problem: Problem, device: Device, effort: Effort = "full") -> Survey:
    """The space of an effort, and the rest of its grid counted by reason."""
    structure = problem.structure
    first = default(problem, device)
    begun = tuple(_starts(problem, device))
    starts = {_tile(first), *map(_tile, begun)}
    offered, rejected = [first], Counter[str]()
    every = (
        each for family in families(structure.kind, device)
        for each in family.axes(problem, device, effort)
    )  # fmt: skip
    for config in dict.fromkeys(every):
        if config == first:
            continue
        limits = family_of(config).limits
        broken = limits.violated(config, structure, device)
        if not broken and effort != "exhaustive" and _tile(config) not in starts:
            broken = limits.unpromising(config, structure, device)
        if broken:
            rejected[broken[0].name] += 1
        else:
            offered.append(config)
    # Where a family's own first choice is none of its axes, a search tries it all the same.
    offered += [config for config in begun if config not in offered]
    if effort == "quick":
        near = _nearest(problem, device, offered)
        if len(near) < len(offered):
            rejected[LEFT_OUT] = len(offered) - len(near)
        offered = near
    return Survey(tuple(offered), tuple(rejected.items()))


def _starts(problem: Problem, device: Device) -> Iterator[Config]:
    """The first config of each family that can run."""
    for family in families(problem.structure.kind, device):
        yield from islice(family.able(problem, device), 1)


def _tile(config: Config) -> Config:
    """The config without what changes neither its tiles nor what they take."""
    tile: Config = family_of(config).tile(config)
    return tile


def _nearest(problem: Problem, device: Device, offered: list[Config]) -> list[Config]:
    """The default, what else its table prefers, then what differs from it least."""
    first = offered[0]
    preferred: list[Config] = []
    own = family_of(first)
    every = families(problem.structure.kind, device)
    for family in sorted(every, key=lambda each: each is not own):
        known = [each for each in family.defaults(problem, device) if each in offered]
        preferred += known[: 1 + ALTERNATIVES]
        # Another template is far on many axes: where it starts is tried too.
        preferred += [x for x in known if family.template(x) != family.template(known[0])][:1]

    def distance(config: Config) -> tuple[int, float]:
        if family_of(config) is not own:
            return len(fields(first)), 0.0
        steps = [
            _step(problem, device, first, config, field.name)
            for field in fields(first)
            if getattr(first, field.name) != getattr(config, field.name)
        ]
        return len(steps), sum(steps)

    near = (*preferred, *sorted(offered, key=distance))
    return list(islice(dict.fromkeys(near), own.quick))


def _step(problem: Problem, device: Device, first: Config, config: Config, name: str) -> float:
    """The distance that a field moved: doublings of a number, 1 for any other change."""
    one, other = getattr(first, name), getattr(config, name)
    if name == "num_splits":
        grids = (family_of(each).grid(problem, each, device) for each in (first, config))
        one, other = (each.num_splits for each in grids)
    if isinstance(one, bool) or not isinstance(one, int) or min(one, other) < 1:
        return 1.0
    return abs(log2(other / one))
