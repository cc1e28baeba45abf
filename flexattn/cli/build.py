"""`flexattn build`: compile a whole space for any device, without one, and print what it takes."""

from __future__ import annotations

import typer

from flexattn.cli import options
from flexattn.cli.selection import device_of, effort_of, problem_called, say_assumed
from flexattn.cli.terminal import INTERRUPTED, say, say_text
from flexattn.errors import InputError
from flexattn.kernels.choose.defaults import survey
from flexattn.kernels.choose.registry import short
from flexattn.tuning.builds import BuiltConfig, build_all


def run(args: options.Build) -> None:
    """Run `flexattn build`: a line for each config as it ends, and what was not built by rule."""
    if args.jobs < 0 or args.deadline <= 0:
        got = f"--jobs {args.jobs} --deadline {args.deadline:g}"
        raise InputError(got, "neither is below 0")
    effort, device = effort_of(args.effort), device_of(args.device, compiled=True)
    problem = problem_called(args, args.kv_len)
    say_assumed(args.device, device)
    space = survey(problem, device, effort)
    count, done = len(space.configs), 0
    say(f"{problem.describe()} for {device.name} ({device.arch}), effort {effort}")

    def tell_of(built: BuiltConfig) -> None:
        nonlocal done
        done += 1
        say(f"{done}/{count} {built_line(built)}")

    try:
        found = build_all(
            problem, space.configs, device, args.jobs, deadline=args.deadline, say=tell_of
        )
    except KeyboardInterrupt:
        say(
            f"interrupted with {done} of {count} configs compiled; Triton's cache keeps those, "
            "and the same command goes on from there",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    broken = [each.failed for each in found if each.failed and each.failed.stage != "resources"]
    for failed in broken:
        say_text(failed.message, err=True)
    # A device cannot tell configs of one code apart.
    timed = len({each.code for each in found if each.failed is None})
    rejected = ", ".join(f"{number} {name}" for name, number in space.rejected) or "none"
    say(f"{count} configs, {timed} worth timing; rejected: {rejected}")
    if broken or not timed:
        raise typer.Exit(1)


def built_line(built: BuiltConfig) -> str:
    """One line: the resources of a config's kernel, or why it is not timed."""
    name, failed = short(built.config), built.failed
    if failed is not None:
        text = failed.message if failed.stage == "resources" else failed.error
        return f"{name}: {failed.stage}: {text}"
    return (
        f"{name}: {built.registers} registers, {built.spills} spills, {built.shared_memory} bytes "
        f"shared, {built.matrix_instructions} matrix instructions, {built.seconds:.1f} s"
    )
