"""A public name of a module is that module's alone, but for what modules of one kind all give."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "flexattn"


class Protocol(NamedTuple):
    """Modules that are asked alike, each of which gives these names; and who asks."""

    modules: str
    names: str
    why: str


PROTOCOLS = (
    Protocol("cli/*.py", "run", "verbs with a file of their own: `VERBS` in cli/app.py"),
    Protocol(
        "kernels/*/*.py",
        "PREFILL BACKWARD render arguments axes defaults fit_to_mask backward_grid "
        "sizes_of_launch invariant_config case_of LIMITS ConfigCase SHARED_SLACK REGISTER_SLACK "
        "GATHER_REGISTERS",
        "what families are made of, by the words of KernelFamily and Limits: none imports another",
    ),
    Protocol(
        "kernels/*/*.py", "announcement merged block_warps", "passes over PTX: ptx/stages.py"
    ),
    Protocol("**/*.py", "main", "what a program starts with"),
    Protocol("integrations/*.py", "FlexattnBackend", "servers name a backend's class so"),
)
# Gluon's names, which a rendered kernel imports, and what stands for them in the interpreter.
HANDED_ON = {"gluon_api.py"}


def targets(statement: ast.Assign) -> Iterator[str]:
    """Names that an assignment binds."""
    for name in (part for each in statement.targets for part in ast.walk(each)):
        if isinstance(name, ast.Name):
            yield name.id


def public_names(body: list[ast.stmt]) -> Iterator[str]:
    """What statements of a module define without an underscore."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = [statement.name]
        elif isinstance(statement, ast.If | ast.Try):
            found = [*public_names(statement.body), *public_names(statement.orelse)]
        elif isinstance(statement, ast.AnnAssign):
            found = [ast.unparse(statement.target)]
        else:
            found = [*targets(statement)] if isinstance(statement, ast.Assign) else []
        yield from (name for name in found if not name.startswith("_"))


def twice(files: dict[str, str]) -> dict[str, set[str]]:
    """Names that several modules define, each with these modules; files: texts by their paths."""
    places = defaultdict(set)
    for path, text in files.items():
        for name in public_names(ast.parse(text).body):
            places[name].add(path)
    return {name: found for name, found in places.items() if len(found) > 1}


def declared(name: str, paths: set[str]) -> bool:
    """Whether one protocol has the name, and all of these modules."""
    return any(
        name in each.names.split() and all(Path(path).match(each.modules) for path in paths)
        for each in PROTOCOLS
    )


def test_no_public_name_is_defined_twice_but_those_of_protocols():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    texts = {path: file.read_text() for path, file in files.items() if path not in HANDED_ON}
    found = {name: paths for name, paths in twice(texts).items() if not declared(name, paths)}
    assert found == {}, "one of them has another name, or an underscore, or is the other"


def test_every_protocol_has_modules_that_give_its_names():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = twice({path: file.read_text() for path, file in files.items()})
    for each in PROTOCOLS:
        assert set(each.names.split()) <= set(found), "a name that is declared is defined twice"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(): pass\nclass C:\n    x = 1\n_g = 1", ["f", "C"]),
        ("A, B = 1, 2\nc: int = 3", ["A", "B", "c"]),
        ("if x:\n    y = 1\nelse:\n    z = 2", ["y", "z"]),
        ("SIZES = (rows, keys) = 1, 2", ["SIZES", "rows", "keys"]),
    ],
)
def test_the_reader_of_names_sees(text, names):
    assert list(public_names(ast.parse(text).body)) == names
