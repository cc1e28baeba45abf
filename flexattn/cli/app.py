"""The typer app: its verbs, and errors shown as what was got, the rule, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, Protocol, cast, get_type_hints

import typer
from typer.core import TyperGroup

import flexattn
from flexattn.cli import options
from flexattn.cli.terminal import say, say_text
from flexattn.errors import FlexAttnError
from flexattn.settings import current

VERBS: dict[str, type] = {
    "tune": options.Tune,
    "build": options.Build,
    "show": options.Show,
    "why": options.Why,
    "merge": options.Merge,
    "export": options.Export,
    "report": options.Report,
    "replay-study": options.ReplayStudy,
    "bench": options.Bench,
    "doctor": options.Doctor,
    "render": options.Render,
    "devices": options.Devices,
    "demo": options.Demo,
}
COMPLETION = (
    "Words complete with TAB after `flexattn --install-completion` and a new shell; "
    "`--show-completion` prints the script instead. Verbs, options and their choices complete."
)


class Verb(Protocol):
    """What the module of a verb gives, `flexattn.cli.` and the verb's name."""

    def run(self, args: Any) -> None:
        """Run the verb; args is of its class of VERBS. Raises FlexAttnError for a bad request."""


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


def _front(verb: str, kind: type) -> Callable[..., None]:
    """A verb as a function that typer reads: options of its class; its module is imported late."""
    name = verb.replace("-", "_")

    def called(**given: Any) -> None:
        module = cast(Verb, import_module(f"flexattn.cli.{name}"))
        module.run(kind(**given))

    hints = get_type_hints(kind, include_extras=True)
    fields = inspect.signature(kind).parameters.values()
    spelled = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default,
                  annotation=hints[each.name])
        for each in fields
    ]  # fmt: skip
    called.__signature__ = Signature(spelled)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in spelled}
    return called


for _verb, _kind in VERBS.items():
    _paragraphs = [" ".join(p.split()) for p in (inspect.getdoc(_kind) or "").split("\n\n")]
    app.command(_verb, help="\n\n".join(_paragraphs), short_help=_paragraphs[0])(
        _front(_verb, _kind)
    )
