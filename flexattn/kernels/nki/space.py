"""The NKI templates' space: the configs worth a look for a problem, and why not the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from flexattn.device.neuroncore import NeuronCore
from flexattn.kernels.base.rule import Rule, able, worded
from flexattn.kernels.nki.config import (
    CHUNK,
    MaskSelect,
    NkiConfig,
    NkiDecodeConfig,
    NkiPrefillConfig,
    memory_of,
    shape_of,
)
from flexattn.kernels.nki.printed import RULES, RuleCase
from flexattn.problem import Problem

NkiEffort = Literal["quick", "full"]
FORMS: tuple[MaskSelect, ...] = ("range", "affine", "select")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a problem's mods ask of a kernel, with masks and scores in one form.

    tiles: of each pool. range_select: whether the mask uses it. refused: why they cannot be
    expressed, "" if they can.
    """

    tiles: tuple[tuple[str, int], ...] = ()
    range_select: bool = False
    refused: str = ""


NeedsOf = Callable[[NkiConfig], Needs]


@dataclass(frozen=True, slots=True)
class NkiSurvey:
    """A space, the default first, and how many other configs broke each rule first."""

    configs: tuple[NkiConfig, ...]
    rejected: tuple[tuple[str, int], ...]


def nki_reasons(config: NkiConfig, problem: Problem, core: NeuronCore, needs: Needs) -> list[str]:
    """Why a config cannot run for a problem on a core; an empty list when it can."""
    case = _case(config, core, needs)
    found = RULES.broken(case, partial(_estimate, config, problem, needs))
    return worded(found, case, {"core": core.name, "refusal": needs.refused}) if found else []


def violated_rules(
    config: NkiConfig, problem: Problem, core: NeuronCore, needs: Needs
) -> list[Rule[RuleCase]]:
    """The rules that a config breaks; with numbers that mean nothing, the others are not asked."""
    return RULES.broken(_case(config, core, needs), partial(_estimate, config, problem, needs))


def _case(config: NkiConfig, core: NeuronCore, needs: Needs) -> RuleCase:
    return RuleCase(
        config.BLOCK_M,
        config.BLOCK_N,
        config.num_splits,
        config.section,
        config.score_buffers,
        config.value_buffers,
        config.buffers,
        config.kv_buffers,
        config.transpose == "dma",
        config.form == "st",
        bool(needs.refused),
        needs.range_select,
        core.sbuf_bytes,
        core.has_dma_transpose,
        core.has_range_select,
        core.has_bf16_psum,
    )


def _estimate(config: NkiConfig, problem: Problem, needs: Needs, case: RuleCase) -> None:
    shape = shape_of(problem, config)
    case.itemsize, case.lanes = shape.itemsize, shape.lanes
    case.sbuf, case.banks = memory_of(problem, config, dict(needs.tiles), shape)


def nki_default(problem: Problem, core: NeuronCore, needs_of: NeedsOf) -> NkiConfig:
    """Where to start: the first of a few that fits; raises ConfigError with the reasons."""
    forms = _forms(problem)
    found = able(
        (replace(config, mask=form) for config in _preferences(problem) for form in forms),
        lambda config: nki_reasons(config, problem, core, needs_of(config)),
        f"no config of the NKI {problem.structure.kind} template fits {problem.describe()}",
        "use smaller head dimensions, or a shorter mod",
    )
    return next(found)


def nki_survey(
    problem: Problem, core: NeuronCore, needs_of: NeedsOf, effort: NkiEffort = "full"
) -> NkiSurvey:
    """Every config of an effort that fits, each once; raises ConfigError where none does."""
    first = nki_default(problem, core, needs_of)
    offered, rejected = [first], Counter[str]()
    for config in dict.fromkeys((*_grid(problem, effort), *_turned(problem, effort))):
        if config == first:
            continue
        broken = violated_rules(config, problem, core, needs_of(config))
        if broken:
            rejected[broken[0].name] += 1
        else:
            offered.append(config)
    return NkiSurvey(tuple(offered), tuple(rejected.items()))


def _preferences(problem: Problem) -> Iterator[NkiConfig]:
    most = 2 * max(problem.kv_len, CHUNK)
    widths = tuple(each for each in ((512, 2), (256, 2), (128, 2), (128, 1)) if each[0] < most)
    for (width, score_buffers), section in product(widths, (4096, 1024, 256, 128)):
        for buffers in (2, 1):
            if problem.structure.kind == "prefill":
                yield NkiPrefillConfig(128, width, section, score_buffers, buffers=buffers)
            else:
                yield NkiDecodeConfig(
                    128, width, 1, section, score_buffers, buffers=buffers, kv_buffers=buffers
                )
    if problem.structure.kind == "prefill":
        yield NkiPrefillConfig(32, 128, 128, 1, buffers=1)


def _grid(problem: Problem, effort: NkiEffort) -> Iterator[NkiConfig]:
    full = effort == "full"
    heights = (64, 128) if full else (128,)
    widths, sections, values = _sizes(problem, full)
    moves = (("tensor", "vector"), ("tensor", "scalar"), ("dma", "vector"))
    axes = (heights, widths, sections, (1, 2), values, moves, _forms(problem))
    for rows, width, section, scores, value, (transpose, evict), form in product(*axes):
        chosen = {
            "section": section, "score_buffers": scores, "value_buffers": value,
            "transpose": transpose, "evict": evict, "mask": form,
        }  # fmt: skip
        ahead = (1, 2) if full and problem.kv_len > section else (1,)
        yield from _of_kind(problem, full, rows, width, ahead, chosen)


def _turned(problem: Problem, effort: NkiEffort) -> Iterator[NkiConfig]:
    """Configs that compute S^T: rows that fit tiles of many chunks, and no engine to turn P."""
    full = effort == "full"
    prefill = problem.structure.kind == "prefill"
    heights = ((64, 128) if full else (128,)) if prefill else (32, 128)
    widths, sections, values = _sizes(problem, full)
    exact = problem.structure.lse and problem.structure.itemsize == 2
    evicts = ("vector", "scalar") if exact else ("vector",)
    masks = FORMS[1:] if problem.structure.mask is not None else FORMS[:1]
    axes = (heights, widths, sections, (1, 2), values, evicts, masks)
    for rows, width, section, scores, value, evict, mask in product(*axes):
        chosen = {
            "section": section, "score_buffers": scores, "value_buffers": value, "evict": evict,
            "mask": mask, "form": "st",
        }  # fmt: skip
        yield from _of_kind(problem, full, rows, width, (1,), chosen)


def _of_kind(
    problem: Problem, full: bool, rows: int, width: int, ahead: Sequence[int], chosen: Any
) -> Iterator[NkiConfig]:
    """A choice for prefill, with as many sections in SBUF, or for decode, with its splits."""
    if problem.structure.kind == "prefill":
        for buffers in ahead:
            yield NkiPrefillConfig(rows, width, kv_buffers=buffers, **chosen)
        return
    for splits in (1, 2, 4, 8) if full else (1, 2):
        if splits * CHUNK <= max(problem.kv_len, CHUNK):
            yield NkiDecodeConfig(rows, width, splits, **chosen)


def _sizes(problem: Problem, full: bool) -> tuple[tuple[int, ...], ...]:
    """Widths of tiles, sections, and buffers of values."""
    # Beyond the keys that there are, a wider tile or section is the same one.
    most = 2 * max(problem.kv_len, CHUNK)
    widths = tuple(width for width in (128, 256, 512, 1024, 2048) if width < most)
    depths = (1024, 4096, 8192) if full else (4096,)
    sections = tuple(depth for depth in depths if depth < most) or depths[:1]
    return widths, sections, (1, 2) if full else (1,)


def _forms(problem: Problem) -> tuple[MaskSelect, ...]:
    return FORMS if problem.structure.mask is not None else FORMS[:1]
