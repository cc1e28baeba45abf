"""A GPU's space: the configs of its templates worth trying, and why not the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from math import log2

from flexattn.device import Device
from flexattn.kernels.base.config import Config
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import families, family_of
from flexattn.problem import Problem

# How many configs of the quick effort are the static default's own alternatives.
ALTERNATIVES = 3
LEFT_OUT = "left out by quick"


@dataclass(frozen=True, slots=True)
class Survey:
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
    structure = problem.structure
    for family in families(structure.kind, device):
        violated = family.limits.violated
        known = family.defaults(problem, device)
        yield from islice((c for c in known if not violated(c, structure, device)), 1)


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
    """How far a field moved: doublings of a number, 1 for any other change."""
    one, other = getattr(first, name), getattr(config, name)
    if name == "num_splits":
        grids = (family_of(each).grid(problem, each, device) for each in (first, config))
        one, other = (each.num_splits for each in grids)
    if isinstance(one, bool) or not isinstance(one, int) or min(one, other) < 1:
        return 1.0
    return abs(log2(other / one))
