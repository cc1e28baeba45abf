"""explain(): what a call would run, and why, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.device import detect
from flexattn.frontend.attention import PLANLESS, Route, route_of, wants_grad
from flexattn.frontend.call import Call, admit
from flexattn.frontend.compiled.spec import breaks
from flexattn.frontend.gradients import check_gradients, choice_of, repeats_bits
from flexattn.frontend.plan import plan
from flexattn.frontend.selection import Selection
from flexattn.kernels.base.config import Config, Geometry, Language, describe
from flexattn.kernels.base.limits import Room, rooms
from flexattn.kernels.choose import options
from flexattn.kernels.choose.defaults import refused
from flexattn.kernels.choose.options import Options
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.printers.gradient_printer import grad_name
from flexattn.mods.derivative import derivatives
from flexattn.mods.expr import ScoreMod, in_a_line, pretty
from flexattn.problem import Captures, kind_for
from flexattn.runtime.build import path_of
from flexattn.runtime.candidates import Attempt, Choice
from flexattn.verify.first_use import LaunchedKernels, verification


@dataclass(frozen=True)
class Backward:
    """The kernel of a call's gradients, in fields as those of Explanation for its forward.

    language_why: as of the forward. score_gradient: what the gradient of the modified score is
    multiplied by; None without one.
    captured: the names of the captured tensors' gradients that are added up by atomic additions.
    """

    problem: str
    config: Config
    config_origin: str
    grid: Geometry
    source: Path
    language_why: str | None
    score_gradient: str | None
    captured: tuple[str, ...]
    candidates: tuple[Attempt, ...]

    def __str__(self) -> str:
        summed = f"; sums by atomic additions: {', '.join(self.captured)}" if self.captured else ""
        lines = [
            f"{describe(self.config)}{summed}",
            *([f"{self.config.language}: {self.language_why}"] if self.language_why else []),
            self.config_origin,
            f"{self.grid.programs} programs",
            str(self.source),
        ]
        if self.score_gradient is not None:
            lines.insert(-2, f"score_mod's derivative: {self.score_gradient}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The path of a call and its reason; the kernel's fields are None where no kernel runs.

    route: "kernel", "interpreter", "reference" (plain torch on the CPU), "torch" (mods that no
    kernel computes, gradients that an autograd Function of the score_mod decides, and devices that
    torch alone serves), "plugin" (devices that a plug-in serves) or "empty" (no query, no key).
    room: how far its stages and its tile of keys may go alone, by the family's limits.
    language: "triton" or "gluon", of the template. language_why: why not the other; both are None
    where there is no other. breaks: why the call breaks a graph of torch.compile, "" where it is a
    node of it. source, combine_source: paths of the rendered files. candidates: the
    configs that were tried, the one that serves last, each with what became of it. backward: of
    a call that wants gradients. verified: whether the kernel was held to plain torch.
    """

    route: Route
    why: str
    problem: str | None = None
    template: str | None = None
    template_why: str | None = None
    language: Language | None = None
    language_why: str | None = None
    config: Config | None = None
    config_origin: str | None = None
    room: tuple[Room, ...] = ()
    grid: Geometry | None = None
    source: Path | None = None
    combine_source: Path | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    candidates: tuple[Attempt, ...] = ()
    breaks: str = ""
    backward: Backward | None = None
    verified: str = ""

    def __str__(self) -> str:
        """One aligned line a fact, with the reason beside or below it."""
        facts = [
            ("problem", self.problem),
            ("template", self.template and f"{self.template}: {self.template_why}"),
            ("language", self.language and f"{self.language}: {self.language_why}"),
            ("config", self.config and f"{describe(self.config)}\n{self.config_origin}"),
            ("tried", "\n".join(map(str, self.candidates)) if len(self.candidates) > 1 else None),
            ("room", "\n".join(map(str, self.room))),
            ("grid", self.grid and _grid(self.grid)),
            ("verified", self.verified),
            ("score_mod", self.score_mod),
            ("mask_mod", self.mask_mod),
            ("source", self.source),
            ("combine", self.combine_source),
            ("compiled", self.breaks and f"breaks a graph of torch.compile: {self.breaks}"),
            ("backward", self.backward),
        ]
        lines = [f"{self.route}: {self.why}"]
        for name, value in facts:
            if value is not None and value != "":
                text = str(value).replace("\n", "\n" + " " * 13)
                lines.append(f"  {name:<11}{text}")
        return "\n".join(lines)


def _grid(grid: Geometry) -> str:
    tiles = f"{grid.num_tiles} tile{'s' * (grid.num_tiles > 1)} of query rows"
    splits = f", {grid.num_splits} splits of the keys" if grid.num_splits > 1 else ""
    return f"{grid.programs} programs: {tiles}{splits}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Selection | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Explanation:
    """The path and kernel of `flex_attention` for these arguments; compiles, but launches nothing.

    Args:
        query: as for `flex_attention`, and so are all the others.

    Returns:
        An `Explanation`, whose text has a line for each fact.

    Raises:
        FlexAttnError: what flex_attention would raise.

    Example::

        print(explain(q, k, v, block_mask=mask))
    """
    if isinstance(block_mask, Selection):
        beside = (
            score_mod, kernel_options, sinks, q_descale, k_descale, v_descale, dropout_p or None,
        )  # fmt: skip
        apart = block_mask.apart(query, key, value, enable_gqa, beside)
        if apart is None:
            block_mask = block_mask.for_call(query, key)
        else:
            query, key, value, block_mask, _ = apart
    given = Call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux, sinks, q_descale, k_descale, v_descale, dropout_p,
    )  # fmt: skip
    call = admit(given)
    route, why = route_of(call)
    if route != "torch" and options.asks_flash(kernel_options):
        why = f"{why}; {options.FLASH}"
    found = Explanation(route, why) if route in PLANLESS else _kernel(call, route, why)
    return replace(found, breaks=breaks(given))


def _kernel(call: Call, route: Route, why: str) -> Explanation:
    launch = plan(call).launch
    choice, problem = launch.choice, launch.problem
    structure = problem.structure
    asked = call.options
    template_why = "forced by kernel_options"
    if structure.dropout:
        template_why = "prefill alone drops weights"
    elif structure.batch_invariant:
        template_why = "prefill alone is batch-invariant"
    elif asked.kind is None:
        device = detect(torch.device(call.q.device))
        told = kind_for(
            problem, device.num_sms, structure.fp8, device.has_wgmma, structure.sparsity
        )
        template_why = told[1]
    language_why = _why_this_language(choice, asked)
    family = family_of(choice.config)
    return Explanation(
        route=route,
        why=why,
        problem=problem.describe(),
        template=structure.kind,
        template_why=template_why,
        language=choice.config.language if language_why else None,
        language_why=language_why,
        config=choice.config,
        config_origin=choice.origin,
        room=rooms(family.limits, choice.config, structure, choice.device),
        grid=launch.geometry,
        source=path_of(choice.source),
        combine_source=path_of(choice.combine) if choice.combine is not None else None,
        score_mod=mod_text(structure.score),
        mask_mod=mod_text(structure.mask),
        candidates=choice.attempts,
        backward=_backward(call) if wants_grad(call) else None,
        verified=verification(LaunchedKernels.of(choice, launch.merges)),
    )


def _backward(call: Call) -> Backward:
    check_gradients(call)
    problem, choice = choice_of(call)
    structure = problem.structure
    factor, summed = None, structure.grads
    if structure.score is not None:
        found = derivatives(structure.score.mod, structure.grads)
        factor = "0" if found.score is None else in_a_line(found.score)
        summed = found.summed(structure.grads)
    grid = family_of(choice.config).grid(problem, choice.config, choice.device)
    return Backward(
        problem=problem.describe(),
        config=choice.config,
        config_origin=choice.origin,
        grid=grid,
        source=path_of(choice.source),
        language_why=_why_this_language(choice, call.options),
        score_gradient=factor,
        captured=tuple(map(grad_name, summed)),
        candidates=choice.attempts,
    )


def _why_this_language(choice: Choice, asked: Options) -> str | None:
    """The reason for one of Hopper's two templates of a prefill or a backward; None elsewhere."""
    problem, device = choice.problem, choice.device
    backward = problem.structure.kind == "backward"
    if not device.has_wgmma or problem.structure.kind == "decode":
        return None
    if asked.language == choice.config.language or (asked.language and not backward):
        return "forced by kernel_options"
    if choice.config.language == "gluon":
        return "warp-specialised, for Hopper"
    if why := refused(problem, device, "gluon"):
        return f"gluon cannot run: {why}"
    if backward and repeats_bits(asked):
        return "the same bits in every run are asked for, which gluon has at 64 and 128 columns"
    if choice.how == "forced":
        return "kernel_options' numbers are of the Triton template without BACKEND"
    gave_way = [each for each in choice.attempts if each.candidate.startswith("gluon ")]
    if gave_way:
        return f"gluon gave way: {gave_way[0].outcome}"
    if choice.how == "default":
        return "the static default; gluon can run"
    return "the record's; gluon can run"


def mod_text(captures: Captures | None) -> str | None:
    """A mod's expression; None without one."""
    return None if captures is None else pretty(captures.mod.expr)
