"""`flexattn why`: what a problem's config rests on. `flexattn render`: what its mods become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from flexattn.cli import options as asking
from flexattn.cli.options import LENGTH, PARTS, choice
from flexattn.cli.selection import (
    asked_rows,
    compiled,
    device_of,
    problem_called,
    say_assumed,
    word_value,
)
from flexattn.cli.terminal import indented, say, say_json, say_text
from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.frontend.explain import mod_text
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.features import decays
from flexattn.kernels.choose import options
from flexattn.measure.task import Task
from flexattn.mods.expr import in_a_line, pretty
from flexattn.mods.rules import ONE, REWRITES
from flexattn.problem import Captures, Problem, Structure
from flexattn.records.layers import origin
from flexattn.records.record import Answer, Sizes
from flexattn.records.why import Closest, ConfigExplanation, Difference, why as explained
from flexattn.runtime import build
from flexattn.runtime.candidates import Attempt, Choice, candidates_of
from flexattn.runtime.codecache import text_file
from flexattn.runtime.dispatch import told
from flexattn.runtime.outcomes import memory
from flexattn.runtime.resources import resources
from flexattn.tuning.tasks import tasks
from flexattn.tuning.tuner import Plugin, plugin_of


def say_why(args: asking.Why) -> None:
    """Run `flexattn why`."""
    target = device_of(args.device)
    if not (args.problems or args.named):
        args = replace(args, problems=["noop"])
    found = list(tasks(asked_rows(args), target))
    say_assumed(args.device, target)
    kept = memory().entries(target)
    answers = [
        (task, explained(task.problem, target), _tried(task, target) if kept else [])
        for task in found
    ]
    if args.as_json:
        say_json({"problems": [_told(*each) for each in answers]})
    else:
        _print_answers(answers)


def _tried(task: Task, device: Device) -> list[Attempt]:
    """The known outcomes of the configs that may serve a problem."""
    return told(candidates_of(task.problem, device, options.NONE), device, memory())


def _told(task: Task, found: ConfigExplanation, tried: Sequence[Attempt]) -> dict[str, Any]:
    return {
        "title": task.title,
        "problem": found.problem,
        "key": asdict(found.key),
        "digest": found.key.digest(),
        "environment": asdict(found.environment),
        "how": found.how,
        "config": asdict(found.config),
        "origin": None if found.found is None else found.found.origin,
        "expected": [{"layer": layer, "path": str(path)} for layer, path in found.expected],
        "passed": [{"path": str(path), "reasons": [why]} for path, why in found.passed],
        "closest": [_compared(each) for each in found.closest],
        "broken": [{"path": str(path), "error": error} for path, error in found.broken],
        "candidates": [str(each) for each in tried],
    }


def _compared(closest: Closest) -> dict[str, Any]:
    return {
        "path": str(closest.path),
        "layer": closest.layer,
        "title": closest.answer.title,
        "config": asdict(closest.answer.config),
        "key": [asdict(each) for each in closest.key],
        "environment": [asdict(each) for each in closest.environment],
        "untaken": closest.untaken,
    }


def _print_answers(answers: Sequence[tuple[Task, ConfigExplanation, Sequence[Attempt]]]) -> None:
    for task, found, tried in answers:
        structure = task.problem.structure
        mods = {"score": structure.score, "mask": structure.mask}
        say(f"{task.title}: {found.how}")
        say(f"  problem   {found.problem}")
        for name, captures in mods.items():
            if captures is not None:
                say_text(indented(f"  {name}_mod".ljust(12), pretty(captures.mod.expr)))
        say(f"  config    {describe(found.config)}")
        if found.found is not None:
            stored = found.found.stored
            say(f"            {origin(stored, repr(stored.answer.title))}")
        for attempt in tried:
            say(f"  candidate {attempt}")
        looked = (f"{layer} ({path.parents[3]})" for layer, path in found.expected)
        say(f"  looked in {', '.join(looked)}")
        for path, reason in found.passed:
            say(f"  passed    {path}: {reason}")
        if not found.closest:
            say(f"  closest   none: no record of this kind was made on {found.environment.device}")
        for each in found.closest:
            _print_closest(each, mods)
        for path, error in found.broken:
            say(f"  no record {path}: {error}")


def _print_closest(each: Closest, mods: Mapping[str, Captures | None]) -> None:
    answer = each.answer
    made = f" of {answer.made[:10]}" if answer.made else ""
    say(f"  closest   {each.layer} record {answer.title!r}{made}, {Sizes(*answer.sizes)}")
    say(f"            {f'not taken: {each.untaken}' if each.untaken else 'taken'}")
    for difference in (*each.key, *each.environment):
        say_text(indented(" " * 12, _difference(difference, answer, mods)))


def _difference(each: Difference, answer: Answer, mods: Mapping[str, Captures | None]) -> str:
    """One field in which a record differs; a mod as the expression that was asked for."""
    if each.field in mods:
        mine = mods[each.field]
        ours = "none" if mine is None else pretty(mine.mod.expr)
        theirs = f"another, that of {answer.title!r}" if each.stored else "none"
        return f"{each.field}_mod is {ours}, the record's is {theirs}"
    if each.field == "template":
        return "the kernels' source is not what it was when the record was made"
    ours, theirs = (str(value) or "none" for value in (each.asked, each.stored))
    return f"{each.field} is {ours}, the record's {theirs}"


# What a term is called, and where it is computed.
_PLACES = {
    "core": "for each score",
    "inner": "times the score, inside: one number before the loop",
    "outer": "times that, outside: one number before the loop",
    "row": "for each row, after the loop",
    "row_slope": "for each row, after the loop, times q_idx - q_start",
    "column": "for each key of a tile, where q_idx is q_start, the tile's first row",
    "diagonal": "for each diagonal of a tile",
    "rest": "for each score",
    "keep": "a mask, in tiles that it cuts",
}

Rewrite = dict[str, str]


def render_mods(args: asking.Render) -> None:
    """Run `flexattn render`."""
    named = [each.partition("=") for each in args.kernel_option or ()]
    for name, sign, _ in named:
        if not sign:
            raise InputError(f"--option {name}", "it is NAME=VALUE", f"write {name}=64, say")
    chosen = options.parse({name: word_value(value) for name, _, value in named})
    found_q = None if args.kind == "decode" else args.q_len
    keys = next((n for n in (args.kv_len, found_q) if n is not None), LENGTH)
    problem = problem_called(args, keys)
    if problem.structure.score is not None:
        spelled = replace(problem.structure, rules_off=chosen.rules_off, tanh=chosen.tanh)
        problem = replace(problem, structure=spelled)
    shown = args.show or (("expr",) if args.explain else ("expr", "source"))
    wanted = {choice("--show", each, PARTS) for each in shown}
    target = device_of(args.device, neuron=True, compiled=True)
    say_assumed(args.device, target)
    structure, plugin = problem.structure, plugin_of(target.backend)
    if plugin is not None:
        forced = chosen != options.NONE or args.explain
        found = _rendered_nki(plugin, problem, target, forced, wanted)
    else:
        found = _rendered(problem, target, chosen, wanted)
    # What was not asked for is None.
    expr, source = "expr" in wanted, found.pop("source")
    found = {
        "problem": problem.describe(),
        "device": f"{target.name} ({target.arch if plugin is None else 'NKI'})",
        **found,
        "score_mod": mod_text(structure.score) if expr else None,
        "mask_mod": mod_text(structure.mask) if expr else None,
        "source": source if "source" in wanted else None,
        "ptx": found.get("ptx"),
        "resources": found.get("resources"),
        "rewrites": rewrites(structure) if args.explain else None,
    }
    if args.as_json:
        say_json(found)
    else:
        _print_rendered(found)


def _expected(problem: Problem, device: Device, chosen: options.Options) -> Choice:
    """The candidate that serves a call, as far as is known without compiling anything."""
    candidates = list(candidates_of(problem, device, chosen))
    for candidate in candidates:
        (attempt,) = told([candidate], device, memory())
        outcome = attempt.outcome
        if outcome is None or candidate.measured or (outcome.built and not outcome.starved):
            return candidate.choice()
    return candidates[0].choice()


def _rendered(
    problem: Problem, device: Device, chosen: options.Options, wanted: set[str]
) -> dict[str, Any]:
    """The config that a call uses, and its files; PTX and resources, if wanted, by compiling."""
    more: dict[str, Any] = {}
    if wanted & {"ptx", "resources"}:
        choice, kernel = compiled(problem, device, chosen)
        if "ptx" in wanted:
            more["ptx"] = _assembly(choice, kernel, device)
        if "resources" in wanted:
            more["resources"] = asdict(resources(kernel, device))
    else:
        choice = _expected(problem, device, chosen)
    return {
        "config": describe(choice.config),
        "origin": choice.origin,
        "path": str(build.path_of(choice.source)),
        "combine_path": choice.combine and str(build.path_of(choice.combine)),
        "source": choice.source.text,
        **more,
    }


def rewrites(structure: Structure) -> list[Rewrite]:
    """Rules, then terms: {"what": "rule" or "term", "name", "says", "to"}; none without a mod."""
    terms = structure.terms
    if terms is None:
        return []
    found = [
        {"what": "rule", "name": step.rule, "says": REWRITES[step.rule], "to": step.to}
        for step in terms.steps
    ]
    if terms.rise is not None and decays(structure):
        text = in_a_line(terms.rise.step)
        found.append(
            {"what": "rule", "name": "decay_skip", "says": REWRITES["decay_skip"], "to": text}
        )
    for name, place in _PLACES.items():
        expr = getattr(terms, name)
        if expr is not None and expr is not ONE:
            found.append({"what": "term", "name": name, "says": place, "to": in_a_line(expr)})
    return found


def _rendered_nki(
    plugin: Plugin, problem: Problem, device: Device, forced: bool, wanted: set[str]
) -> dict[str, Any]:
    if forced or wanted & {"ptx", "resources"}:
        raise InputError(
            f"kernel options, --explain, ptx or resources for {device.name}",
            "an NKI kernel has none of Triton's options, and no compiler of it is installed",
            "--show takes expr and source",
        )
    if problem.structure.kind == "backward":
        raise InputError(f"--kind backward for {device.name}", "gradients run on GPUs")
    kernel = plugin.render_kernel(problem, device)
    first = (
        f"the first that fits; flexattn tune --device {device.name} --dry-run counts the others"
    )
    return {
        "config": describe(kernel.config),
        "origin": first,
        "path": str(kernel.path),
        "combine_path": kernel.combine and str(kernel.combine),
        "source": kernel.text,
    }


def _assembly(choice: Choice, kernel: Any, device: Device) -> str:
    """Write the compiler's last text, PTX or AMD's assembly, beside the source; its path."""
    kind = "amdgcn" if device.backend == "hip" else "ptx"
    stem = build.path_of(choice.source).stem
    return str(text_file(f"{stem}.{device.arch}.{kind}", kernel.asm[kind]))


def _print_rendered(found: Mapping[str, Any]) -> None:
    console = Console()
    for name in ("score_mod", "mask_mod"):
        if (expression := found[name]) is not None:
            say_text(indented(f"{name:<10}", expression))
    lines = {
        "problem": found["problem"], "device": found["device"], "config": found["config"],
        "": found["origin"], "source": found["path"], "combine": found["combine_path"],
        "assembly": found["ptx"],
    }  # fmt: skip
    if found["resources"] is not None:
        pairs = found["resources"].items()
        lines["resources"] = " ".join(f"{name}={value}" for name, value in pairs)
    for name, text in lines.items():
        if text is not None:
            say(f"{name:<10}{text}")
    for row in found["rewrites"] or ():
        say(f"{row['what']:<10}{row['name']}: {row['says']}")
        say(f"{'':<12}{row['to']}")
    if (source := found["source"]) is not None:
        say("")
        if console.is_terminal:
            console.print(Syntax(source, "python", background_color="default"))
        else:
            say_text(source, nl=False)
