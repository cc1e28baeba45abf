"""The manual's build: `make docs`. Warnings are errors, so every link and anchor is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import flexattn  # noqa: E402
from flexattn.cli.app import app as command_line  # noqa: E402

project = "flexattn"
version = release = flexattn.__version__
author = "the flexattn authors"
extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton",
]  # fmt: skip
default_role = "code"  # `name` in a docstring
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # they are stored with their results
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["manual.css"]
html_css_files = ["manual.css"]
html_title = f"flexattn {release}"
html_show_sphinx = html_show_copyright = html_copy_source = False
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("ScoreMod", "MaskMod")}
python_maximum_signature_line_length = 90
smartquotes = False
autodoc_preserve_defaults = True
toc_object_entries = False
# A diff is shown as it is, also where it shows half of a line.
suppress_warnings = ["misc.highlighting_failure"]


def as_rst(*event: Any) -> None:
    """A docstring is plain text: an indented part and `name` are code, and nothing is markup."""
    lines: list[str] = event[-1]
    if any(line.startswith((":param", ":returns")) for line in lines):
        return  # napoleon made it of Args, Returns, Raises and Example
    parts = "\n".join(lines).strip("\n").split("\n\n")
    shown = []
    for part in parts:
        if part.startswith("    "):
            shown.append("::\n\n" + part)
            continue
        plain = re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
        plain = re.sub(r"`([^`\n]+)`", lambda found: f"``{found[1].replace(chr(92), '')}``", plain)
        # "name: what it is" begins a line of its own.
        shown.append(
            re.sub(r"\n(?=(?:\w+(?: \[[^\]]*\])?, )*\w+(?: \[[^\]]*\])?: )", "\n\n", plain)
        )
    lines[:] = "\n\n".join(shown).split("\n")


def short(*event: Any) -> tuple[str, str] | None:
    """A signature whose types have the names that users import; a module has none."""
    arguments, returned = event[-2:]
    if arguments is None:
        return None
    return re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", arguments), returned


def commands() -> str:
    """Every verb of the command line with its arguments and options, from the line itself."""
    group = typer.main.get_command(command_line)
    context = typer.Context(group, info_name="flexattn")
    parts = []
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        own = typer.Context(command, info_name=verb, parent=context)
        usage = " ".join(command.collect_usage_pieces(own))
        text = re.sub(r"\n(?!\n)", " ", (command.help or "").split("\f")[0].strip())
        parts += [f"## {verb}", f"```text\nflexattn {verb} {usage}\n```", text]
        rows = [row(each, own) for each in command.params if not getattr(each, "hidden", False)]
        head = "| option | values | meaning |\n|---|---|---|"
        parts.append("\n".join([head, *filter(None, rows)]))
    return "\n\n".join(parts) + "\n"


def row(parameter: Any, context: Any) -> str:
    """One argument or option as a row of a table: its names, its values, what it is."""
    if parameter.name == "help":
        return ""
    shown, text = parameter.get_help_record(context)
    # "-o, --out PATH" has a value, "--torch / --no-torch" and an argument have none.
    split = re.fullmatch(r"(-.*?)(?: ([^-/].*))?", shown)
    names, values = split.groups() if split else (shown, None)
    cells = f"`{names}`", f"`{values}`" if values else "", re.sub(r"\s+", " ", text)
    return " | ".join(["", *(each.replace("|", "\\|") for each in cells), ""]).strip()


def setup(app: Any) -> None:
    """What this file adds to the build."""
    from sphinx.pycode import ModuleAnalyzer

    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-process-signature", short)
    for module in ("attention", "varlen"):
        # One signature is shown, with every argument, and not an overload for each result.
        found = ModuleAnalyzer.for_module(f"flexattn.frontend.{module}")
        found.analyze()
        found.overloads.clear()
    written = ROOT / "docs/_build/commands.md"
    written.parent.mkdir(exist_ok=True)
    written.write_text(commands(), encoding="utf-8")
