"""What verbs print passes here, so that the text of records and files shows and does nothing."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from flexattn.util.printable import one_line, printable


def say(line: str, *, err: bool = False) -> None:
    """Print one line; line breaks in it are shown escaped."""
    typer.echo(one_line(line), err=err)


def say_text(text: str, *, err: bool = False, color: str | None = None, nl: bool = True) -> None:
    """Print text of several lines, which is our own or the caller's."""
    typer.secho(printable(text), fg=color, err=err, nl=nl)


def say_json(data: Any) -> None:
    """Print JSON, whose strings escape all that is not ASCII."""
    typer.echo(json.dumps(data, indent=1))


def tell(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, on a console that may have bars below: no markup, and not wrapped."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def cell(text: str) -> Text:
    """Text for a cell of a table, as it is: brackets in it are no markup."""
    return Text(one_line(text))
