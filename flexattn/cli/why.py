"""`flexattn why`: what a problem's config rests on, and how the closest records differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from flexattn.cli import options
from flexattn.cli.offline import asked_rows
from flexattn.cli.selection import device_of, say_assumed
from flexattn.cli.terminal import indented, say, say_json, say_text
from flexattn.device import Device
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.options import NONE
from flexattn.measure.task import Task
from flexattn.mods.expr import pretty
from flexattn.problem import Captures
from flexattn.records.layers import origin
from flexattn.records.record import Answer, Sizes
from flexattn.records.why import Closest, ConfigExplanation, Difference, why as explained
from flexattn.runtime.candidates import Attempt, candidates_of
from flexattn.runtime.dispatch import told
from flexattn.runtime.outcomes import memory
from flexattn.tuning.tasks import tasks


def run(args: options.Why) -> None:
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
        _print(answers)


def _tried(task: Task, device: Device) -> list[Attempt]:
    """The known outcomes of the configs that may serve a problem."""
    return told(candidates_of(task.problem, device, NONE), device, memory())


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


def _print(answers: Sequence[tuple[Task, ConfigExplanation, Sequence[Attempt]]]) -> None:
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
