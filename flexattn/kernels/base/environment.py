"""The Jinja environment, and the one rule that finds the templates."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path

import jinja2

from flexattn.errors import RenderError
from flexattn.kernels.base.base_2 import finite, natural, sink_in_base_2
from flexattn.kernels.base.outline import outline


@lru_cache(maxsize=1)
def templates_folder() -> Path:
    """The packaged folder where there is one (a wheel), else the repository's `templates/`."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "_templates", package.parent / "templates"):
        if folder.is_dir():
            return folder
    raise RenderError(
        f"no templates beside {package}",
        "they are installed with the package",
        "reinstall flexattn",
    )


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """StrictUndefined: a name that a template misspells is an error, never an empty string."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # What is constant in a template is little: looking for it costs more than it saves.
        optimized=False,
    )
    environment.filters["block"] = block
    environment.filters["outline"] = outline
    environment.filters["finite"] = finite
    environment.filters["natural"] = natural
    environment.filters["sink_in_base_2"] = sink_in_base_2
    return environment


def block(text: str, width: int) -> str:
    """A macro's lines at the depth where it is called: the first line is there already."""
    return text.strip("\n").replace("\n", "\n" + " " * width)


@lru_cache(maxsize=64)
def _template(name: str) -> tuple[str, tuple[str, ...]]:
    """A template's text without its comments, and the names of those that it includes."""
    text = _environment().loader.get_source(_environment(), name)[0]  # type: ignore[union-attr]
    included = re.findall(r'{%-? *(?:import|include|from) "([^"]+)"', text)
    bare = re.sub(r"{#.*?#}", "", text, flags=re.DOTALL)
    bare = "\n".join(line for line in bare.splitlines() if not line.lstrip().startswith("# "))
    return bare, tuple(included)


@lru_cache(maxsize=64)
def template_hash(name: str) -> str:
    """A hash of one template and all that it includes, comments stripped."""
    bare, included = _template(name)
    parts = [bare, *(template_hash(each) for each in included)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def template_text(name: str) -> str:
    """One template and all that it includes, comments stripped."""
    bare, included = _template(name)
    return "\n".join([bare, *map(template_text, included)])


def render_template(name: str, context: dict[str, object]) -> str:
    """Fill one template.

    Raises RenderError naming the template and what it lacks.
    """
    try:
        return _environment().get_template(name).render(context)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        place = f"{name}:{line}" if line else name
        raise RenderError(f"{place}: {error}", "a template and its context must agree") from error
