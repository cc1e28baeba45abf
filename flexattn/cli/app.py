"""The typer app: its verbs, and errors shown as what was got, the rule, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pkgutil import resolve_name
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

import flexattn
from flexattn.cli import options
from flexattn.cli.terminal import say, say_text
from flexattn.errors import FlexAttnError
from flexattn.settings import current

# A verb's options, and the function below flexattn.cli that runs the verb with them. The function
# raises FlexAttnError if a request is bad.
VERBS: dict[str, tuple[type, str]] = {
    "tune": (options.Tune, "tune:run"),
    "build": (options.Build, "tune:build_space"),
    "show": (options.Show, "records:show_records"),
    "why": (options.Why, "explain:say_why"),
    "explain": (options.Why, "explain:say_why"),
    "merge": (options.Merge, "records:merge_records"),
    "export": (options.Export, "records:export_records"),
    "report": (options.Report, "records:report_records"),
    "replay-study": (options.ReplayStudy, "records:replay_records"),
    "bench": (options.Bench, "bench:run"),
    "doctor": (options.Doctor, "doctor:run"),
    "render": (options.Render, "explain:render_mods"),
    "devices": (options.Devices, "doctor:print_devices"),
    "demo": (options.Demo, "demo:run"),
}
COMPLETION = (
    "Words complete with TAB after `flexattn --install-completion` and a new shell; "
    "`--show-completion` prints the script instead. Verbs, options and their choices complete."
)


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
    epilog=COMPLETION,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than all else that help needs
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"flexattn {flexattn.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    pass


def _front(kind: type, where: str) -> Callable[..., None]:
    """A verb as a function that typer reads: options of its class; its module is imported late."""

    def called(**given: Any) -> None:
        resolve_name(f"flexattn.cli.{where}")(kind(**given))

    hints = get_type_hints(kind)
    spelled = [
        Parameter(
            each.name, Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is MISSING else each.default,
            annotation=Annotated[hints[each.name], each.metadata[options.TYPER]],
        )
        for each in fields(kind)
    ]  # fmt: skip
    called.__signature__ = Signature(spelled)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in spelled}
    return called


for _verb, (_kind, _where) in VERBS.items():
    _paragraphs = [" ".join(p.split()) for p in (inspect.getdoc(_kind) or "").split("\n\n")]
    app.command(_verb, help="\n\n".join(_paragraphs), short_help=_paragraphs[0])(
        _front(_kind, _where)
    )
