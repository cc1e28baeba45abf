"""The typer app: its verbs, and errors shown as what was got, the rule, and what to do."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from flexattn.cli import (
    bench,
    build,
    demo,
    devices,
    doctor,
    export,
    merge,
    render,
    replay_study,
    report,
    show,
    tune,
    why,
)
from flexattn.cli.terminal import say_text
from flexattn.errors import FlexAttnError
from flexattn.settings import current


class _Group(TyperGroup):
    """Errors raised on purpose, and what files refuse, end with status 2 and no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            current()  # an environment variable may be wrong
            return super().invoke(ctx)
        except FlexAttnError as error:
            say_text(f"error: {error.got}", err=True, color=typer.colors.RED)
            for word, text in (("rule", error.rule), ("do", error.do)):
                if text:
                    say_text(f"  {word + ':':<6}{text}", err=True)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.filename is None:  # no file of the user's: a broken pipe, or a bug
                raise
            text = f"error: {error.filename}: {error.strerror}"
            say_text(text, err=True, color=typer.colors.RED)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    help="Attention from two Python callables, tuned for the device at hand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (
    tune.tune,
    build.build,
    show.show,
    why.why,
    merge.merge,
    export.export,
    report.report,
    replay_study.replay_study,
    bench.bench,
    doctor.doctor,
    render.render,
    devices.devices,
    demo.demo,
):
    app.command()(verb)
