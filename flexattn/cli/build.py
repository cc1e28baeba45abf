"""`flexattn build`: compile a whole space for any device, without one, and show what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import typer

from flexattn.cli import options
from flexattn.cli.offline import problem_called
from flexattn.cli.selection import device_of, effort_of, say_assumed
from flexattn.cli.terminal import INTERRUPTED, cell, table_of, tell, wide_console
from flexattn.cli.watch import Watch
from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import survey
from flexattn.kernels.choose.registry import short
from flexattn.problem import Problem
from flexattn.tuning.builds import DEADLINE, BuiltConfig, build_all, twins


@dataclass(frozen=True)
class BuildReport:
    """A space that was built. twins: for each config, the earlier one with the same code.

    rejected: how many configs of the grid broke each rule, and were not built.
    """

    problem: str
    device: str
    effort: Effort
    built: tuple[BuiltConfig, ...]
    twins: tuple[int | None, ...]
    rejected: tuple[tuple[str, int], ...]

    @property
    def timed(self) -> int:
        """The number of configs that a tuner would time."""
        pairs = zip(self.built, self.twins, strict=True)
        return sum(each.failed is None and twin is None for each, twin in pairs)

    @property
    def sound(self) -> bool:
        """True where the compiler ended well on all, and something is left to time."""
        ends = {each.failed.stage for each in self.built if each.failed is not None}
        return self.timed > 0 and ends <= {"resources"}


def run(args: options.Build) -> None:
    """Run `flexattn build`."""
    if args.jobs < 0 or args.deadline <= 0:
        got = f"--jobs {args.jobs} --deadline {args.deadline:g}"
        raise InputError(got, "neither is below 0")
    effort, device = effort_of(args.effort), device_of(args.device, compiled=True)
    problem, counted, done = problem_called(args, args.kv_len), 0, 0
    say_assumed(args.device, device)
    with Watch(1) as watch:
        lane = watch.lane()
        lane.problem(problem.describe())

        def begin(count: int) -> None:
            nonlocal counted
            counted = count
            lane.stage("build", count)

        def tell_of(built: BuiltConfig) -> None:
            nonlocal done
            done += 1
            lane.step(short(built.config))
            if not watch.bars:
                watch.say(f"{done}/{counted} {built_line(built)}")

        try:
            found = report_of(
                problem, device, effort, args.jobs, args.deadline, begin=begin, say=tell_of
            )
        except KeyboardInterrupt:
            watch.say(
                f"interrupted with {done} of {counted} configs compiled; Triton's cache keeps "
                "those, and the same command goes on from there"
            )
            raise typer.Exit(INTERRUPTED) from None
    print_report(found)
    raise typer.Exit(0 if found.sound else 1)


def report_of(
    problem: Problem,
    device: Device,
    effort: Effort,
    jobs: int = 0,
    deadline: float = DEADLINE,
    *,
    begin: Callable[[int], None] = lambda count: None,
    say: Callable[[BuiltConfig], None] = lambda built: None,
) -> BuildReport:
    """Survey a problem's space and build it; begin: called with the number of configs."""
    space = survey(problem, device, effort)
    begin(len(space.configs))
    found = build_all(problem, space.configs, device, jobs, deadline=deadline, say=say)
    title = f"{device.name} ({device.arch})"
    return BuildReport(
        problem.describe(), title, effort, tuple(found), tuple(twins(found)), space.rejected
    )


def built_line(built: BuiltConfig) -> str:
    """One config in a line, where nobody watches a table."""
    if built.failed is not None:
        return f"{short(built.config)}: {built.failed.stage}: {built.failed.error}"
    return (
        f"{short(built.config)}: {built.registers} registers, {built.spills} spills, "
        f"{built.shared_memory} bytes shared, {built.seconds:.1f} s"
    )


def print_report(report: BuildReport) -> None:
    """The table of configs with what each takes, and below it what was not built, by rule."""
    console = wide_console()
    title = f"{report.problem}\n{report.device}, effort {report.effort}"
    headings = ">regs", ">spills", ">shared", ">matrix", ">s"
    table = table_of("config", *headings, "note", title=title)
    for built, twin in zip(report.built, report.twins, strict=True):
        numbers = (
            built.registers,
            built.spills,
            built.shared_memory,
            built.matrix_instructions,
        )
        shown = map(str, numbers) if built.code else ("", "", "", "")
        table.add_row(
            short(built.config), *shown, f"{built.seconds:.1f}", cell(_note(report, built, twin))
        )
    console.print(table)
    for built in report.built:
        if built.failed is not None and built.failed.stage != "resources":
            text = f"{short(built.config)}: {built.failed.message}"
            tell(console, text)
    rejected = ", ".join(f"{count} {name}" for name, count in report.rejected) or "none"
    text = f"{len(report.built)} configs, {report.timed} worth timing; rejected: {rejected}"
    tell(console, text)


def _note(report: BuildReport, built: BuiltConfig, twin: int | None) -> str:
    if built.failed is not None:
        text = built.failed.message if built.failed.stage == "resources" else built.failed.error
        return f"{built.failed.stage}: {text}"
    return "" if twin is None else f"same code as {short(report.built[twin].config)}"
