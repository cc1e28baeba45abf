"""The Jinja environment: the one rule that finds the templates, and the filters that they call."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
import jinja2.ext

from flexattn.errors import RenderError
from flexattn.kernels.printers.spelling import finite, natural, sink_in_base_2


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


_CLAUSE = re.compile(r"^(.*?) *\{\? ((?:if|for) .*?) \?\}$", re.MULTILINE)


class _Clauses(jinja2.ext.Extension):
    """Lines with a clause at their end, as in a comprehension.

    `line  {? if c ?}` is there where c holds, and `line  {? for x in xs ?}` once for each x;
    several clauses nest, the first outermost.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """A template's text with such a line as a block on one line."""
        return _CLAUSE.sub(_block_of, source)


def _block_of(found: re.Match[str]) -> str:
    line, clauses = found[1], re.split(r" (?=for )", found[2])
    # A macro's last line has its own end; an import is no line.
    end = "" if line.endswith("-}}") or line.startswith("{% import ") else "{{ '\\n' }}"
    begins = "".join(f"{{% {each} %}}" for each in clauses)
    ends = "".join(f"{{% end{each.split()[0]} %}}" for each in reversed(clauses))
    return f"{begins}{line}{end}{ends}"


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
        # Else Jinja reads the time of a template's file from disk at every import. After each
        # read, a thread that compiles beside others waits for Python's lock.
        auto_reload=False,
        extensions=[_Clauses],
    )
    for each in (block, outline, finite, natural, sink_in_base_2):
        environment.filters[each.__name__] = each
    return environment


def block(text: str, width: int) -> str:
    """A macro's lines at the depth where it is called: the first line is there already."""
    return text.strip("\n").replace("\n", "\n" + " " * width)


@lru_cache(maxsize=64)
def _template(name: str) -> tuple[str, str]:
    """A template's text with all that it includes, and its hash, without comments."""
    text = _environment().loader.get_source(_environment(), name)[0]  # type: ignore[union-attr]
    bare = re.sub(r"{#.*?#}", "", text, flags=re.DOTALL)
    bare = "\n".join(line for line in bare.splitlines() if not line.lstrip().startswith("# "))
    names = re.findall(r'{%-? *(?:import|include|from) "([^"]+)"', text)
    included = [_template(each) for each in names]
    parts = "\n".join([bare, *(each for _, each in included)])
    whole = "\n".join([bare, *(each for each, _ in included)])
    return whole, hashlib.sha256(parts.encode()).hexdigest()[:16]


def template_hash(name: str) -> str:
    """A hash of one template and all that it includes, comments stripped."""
    return _template(name)[1]


def template_text(name: str) -> str:
    """One template and all that it includes, comments stripped."""
    return _template(name)[0]


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


def render_tidy(name: str, context: dict[str, object]) -> str:
    """As render_template, without spaces at the ends of lines, and with Python's empty lines.

    A function has two empty lines around it, and none inside. A template has one around it.
    """
    lines = render_template(name, context).split("\n")
    text = "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"
    # What a macro left out leaves an empty line: none stands inside a function.
    text = re.sub(r"\n+(\n {4})", r"\1", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return re.sub(r"\n\n+(?=@)|(?<=\n)( {4}.*)\n\n+(?=\S)", r"\1\n\n\n", text)


_MARKED = re.compile(r"^(\s*(?:for|while) .*:)  # body: (\w+)$")
_WIDTH = 94
_CONSTANT = "gl.constexpr"


def outline(text: str) -> str:
    """Functions whose loops marked `# body: name` call a function of that name, which comes first.

    text: whole functions, each loop's head on one line. What a body needs becomes the arguments,
    in the order of first use; what it assigns and others need, the results.

    Hopper's forward needs it: with bodies in their loops Triton carries other values around them,
    and dense calls of 128 columns met an illegal instruction on an H200 (Triton 3.6).
    """
    lines = text.split("\n")
    while True:
        marked = [n for n, line in enumerate(lines) if _MARKED.match(line)]
        if not marked:
            return "\n".join(lines)
        # The last mark is on a loop that holds no other.
        lines = _replace(lines, marked[-1])


def _replace(lines: list[str], head: int) -> list[str]:
    found = _MARKED.match(lines[head])
    assert found is not None
    name = found.group(2)
    function, loops = _enclosing(ast.parse("\n".join(lines)), head + 1)
    loop = loops[-1]
    needs, results = _analyse(function, loops)
    end = loop.body[-1].end_lineno or 0
    depth = loop.body[0].col_offset
    constants = {arg.arg for arg in function.args.args if _is_constant(arg)}
    arguments = [f"{a}: {_CONSTANT}" if a in constants else a for a in needs]
    defined = ["@gluon.jit", f"def {name}(", *_wrapped(arguments, 4), "):"]
    defined += [" " * 4 + line[depth:] if line.strip() else "" for line in lines[head + 1 : end]]
    if results:
        defined += ["    return (", *_wrapped(results, 8), "    )"]
    called = [f"{name}(", *_wrapped(needs, 4), ")"]
    if results:
        called = ["(", *_wrapped(results, 4), f") = {called[0]}", *called[1:]]
    start = min([function.lineno, *(each.lineno for each in function.decorator_list)]) - 1
    return [
        *lines[:start],
        *defined,
        "",
        "",
        *lines[start:head],
        found.group(1),
        *(" " * depth + line for line in called),
        *lines[end:],
    ]


def _enclosing(tree: ast.Module, line: int) -> tuple[ast.FunctionDef, list[ast.For | ast.While]]:
    """The function around a loop's head, and the loops around it, itself last."""
    function = next(each for each in tree.body if _holds(each, line))
    assert isinstance(function, ast.FunctionDef)
    return function, list(_loops(function.body, line))


def _loops(statements: Sequence[ast.stmt], line: int) -> Iterator[ast.For | ast.While]:
    """The loops among statements that hold a line, the outermost first."""
    for each in statements:
        if _holds(each, line):
            if isinstance(each, (ast.For, ast.While)):
                yield each
            if isinstance(each, (ast.For, ast.While, ast.If)):
                yield from _loops([*each.body, *each.orelse], line)


def _holds(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


def _analyse(
    function: ast.FunctionDef, loops: Sequence[ast.For | ast.While]
) -> tuple[list[str], list[str]]:
    """The names that the body of the last loop needs, and the names that it leaves."""
    loop = loops[-1]
    end = loop.end_lineno or 0
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    stored = [n for n in names if not _loads(n)]
    parameters = {arg.arg for arg in function.args.args}
    local = parameters | {n.id for n in stored}
    before = _known_at(loop, function.body, parameters)
    assigned = {n.id for n in stored if loop.lineno < n.lineno <= end}
    needed: dict[str, None] = {}
    sure = _flow(loop.body, set(), needed)
    # Whoever comes after the loop, or round an outer loop again, sees what the body left.
    elsewhere = {n.id for n in names if _loads(n) and _sees(n.lineno, loops)}
    arguments = [name for name in needed if name in local]
    results = [
        name
        for name in dict.fromkeys(n.id for n in stored)
        if name in assigned
        and (name in needed or name in elsewhere)
        and (name in needed or name in sure or name in before)
    ]
    arguments += [name for name in results if name not in sure and name not in needed]
    return arguments, results


def _known_at(loop: ast.stmt, statements: Sequence[ast.stmt], known: set[str]) -> set[str]:
    """The names surely assigned where the loop begins, which is in these statements."""
    for each in statements:
        if each is loop:
            break
        if each.lineno < loop.lineno <= (each.end_lineno or 0):
            assert isinstance(each, (ast.If, ast.For, ast.While))
            known = known | (_names(each.target) if isinstance(each, ast.For) else set())
            inner = each.body
            if isinstance(each, ast.If) and each.orelse and each.orelse[0].lineno <= loop.lineno:
                inner = each.orelse
            return _known_at(loop, inner, known)
        known = _flow([each], known, {})
    return known


def _sees(line: int, loops: Sequence[ast.For | ast.While]) -> bool:
    loop, outer = loops[-1], loops[0]
    if loop.lineno < line <= (loop.end_lineno or 0):
        return False
    tested = isinstance(loop, ast.While) and line == loop.lineno
    again = outer is not loop and outer.lineno <= line
    return tested or again or line > (loop.end_lineno or 0)


def _flow(statements: Iterable[ast.stmt], known: set[str], needed: dict[str, None]) -> set[str]:
    """Names that statements surely assign; what they read before goes to `needed`."""
    known = set(known)
    for each in statements:
        match each:
            case ast.If():
                _read(each.test, known, needed)
                first = _flow(each.body, known, needed)
                known = first & _flow(each.orelse, known, needed)
            case ast.For():
                _read(each.iter, known, needed)
                _flow(each.body, known | _names(each.target), needed)
            case ast.While():
                _read(each.test, known, needed)
                _flow(each.body, known, needed)
            case ast.AugAssign():
                _read(each, known, needed)
                needed |= {name: None for name in _names(each.target) if name not in known}
                known |= _names(each.target)
            case ast.Assign():
                _read(each.value, known, needed)
                known |= {name for target in each.targets for name in _names(target)}
            case _:
                _read(each, known, needed)
    return known


def _read(node: ast.AST, known: set[str], needed: dict[str, None]) -> None:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and _loads(each) and each.id not in known:
            needed[each.id] = None


def _names(target: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}


def _loads(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _is_constant(argument: ast.arg) -> bool:
    return argument.annotation is not None and ast.unparse(argument.annotation) == _CONSTANT


def _wrapped(names: Sequence[str], indent: int) -> list[str]:
    lines, line = [], ""
    for name in names:
        if line and indent + len(line) + len(name) + 2 > _WIDTH:
            lines.append(" " * indent + line.rstrip())
            line = ""
        line += f"{name}, "
    return [*lines, " " * indent + line.rstrip()] if line else lines
