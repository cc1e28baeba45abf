"""The way of all that verbs print: the text of records and files shows and does nothing."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import typer

from flexattn.util.text import one_line, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# The status of a verb that Ctrl-C ended, as shells have it.
INTERRUPTED = 130
# Columns of a table that goes into a file or a pipe, where no screen is too narrow for it.
PIPED = 160


def say(line: str, *, err: bool = False) -> None:
    """Print one line; line breaks in it are shown escaped."""
    typer.echo(one_line(line), err=err)


def say_text(text: str, *, err: bool = False, color: str | None = None, nl: bool = True) -> None:
    """Print text of several lines, which is our own or the caller's."""
    typer.secho(printable(text), fg=color, err=err, nl=nl)


def indented(name: str, text: str) -> str:
    """Text behind a name, its further lines below its first one."""
    return name + text.replace("\n", "\n" + " " * len(name))


def say_json(data: Any) -> None:
    """Print JSON, whose strings escape all that is not ASCII."""
    typer.echo(json.dumps(data, indent=1))


def wide_console() -> Console:
    """A console as wide as COLUMNS or the screen; in a pipe so wide that no cell is cut."""
    from rich.console import Console

    return Console(width=shutil.get_terminal_size((PIPED, 0)).columns)


def table_of(*headings: str, **about: Any) -> Table:
    """An empty table: its first column is not wrapped, and ">heading" is one of numbers."""
    from rich.table import Table

    made = Table(**about)
    for place, heading in enumerate(headings):
        number = heading.startswith(">")
        justify: Any = "right" if number else "left"
        made.add_column(heading.removeprefix(">"), justify=justify, no_wrap=number or not place)
    return made


def tell(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, on a console that may have bars below: no markup, and not wrapped."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def cell(text: str) -> Text:
    """Text for a cell of a table, as it is: brackets in it are no markup."""
    from rich.text import Text

    return Text(one_line(text))
