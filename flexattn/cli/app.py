"""The typer app: its verbs, and errors shown as what was got, the rule, and what to do."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from flexattn.cli import demo, devices, render
from flexattn.errors import FlexAttnError


class _Group(TyperGroup):
    """Errors raised on purpose are shown without a traceback and end with status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlexAttnError as error:
            typer.secho(f"error: {error.got}", fg=typer.colors.RED, err=True)
            for word, text in (("rule", error.rule), ("do", error.do)):
                if text:
                    typer.echo(f"  {word + ':':<6}{text}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    help="Attention from two Python callables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(render.render)
app.command()(devices.devices)
