"""What is read from sources by regular expressions is what Python's own readers see in them."""

import ast
import io
import tokenize

from flexattn.records.environment import bare, closure, imports_of, module_path
from tests.package_files import each_file

SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def tokens(source, left_out=()):
    """What of a source means something, but what begins at `left_out`."""
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        each.string for each in found if each.type not in SILENT and each.start not in left_out
    ]


def docstrings(tree):
    """Where they begin, (line, column)."""
    owners = [node for node in ast.walk(tree) if isinstance(node, OWNERS)]
    first = [node.body[0] for node in owners if ast.get_docstring(node) is not None]
    return {(node.lineno, node.col_offset) for node in first}


def imported(tree):
    """(module, name) of what the tree imports of the package, but for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        yield from imported(node)


@each_file
def test_a_bare_source_has_every_token_of_the_other(path):
    source = path.read_text()
    assert tokens(bare(source)) == tokens(source, docstrings(ast.parse(source)))
    assert "\n\n" not in bare(source) or '"""' in bare(source)


@each_file
def test_imports_are_those_that_python_sees(path):
    source = path.read_text()
    wanted = {each for each in imported(ast.parse(source)) if each[0].split(".")[0] == "flexattn"}
    assert imports_of(bare(source)) == wanted


SOURCE = '''"""Of a module."""
from __future__ import annotations

from typing import TYPE_CHECKING

from flexattn.errors import (  # with a comment
    InputError,
    ModError as Other,
)

if TYPE_CHECKING:
    from flexattn.cli import app

    import flexattn.tuning
import flexattn.settings

TEXT = "import sys; from flexattn.tuning import x"


def f():
    # from flexattn.runtime.dispatch import nothing
    from flexattn.runtime import launch

    return """
    kept # this

    too"""
'''


def test_functions_import_and_type_checkers_do_not():
    assert imports_of(bare(SOURCE)) == {
        ("flexattn.errors", "InputError"), ("flexattn.errors", "ModError"),
        ("flexattn.settings", ""), ("flexattn.runtime", "launch"),
    }  # fmt: skip


def test_a_string_stays_as_it_is():
    """Once a line of it that looked like a comment, or was empty, did not count."""
    found = bare(SOURCE)
    assert '    return """\n    kept # this\n\n    too"""' in found
    assert "comment" not in found and "Of a module" not in found and "nothing" not in found
    for old, new in (("kept # this", "kept # that"), ("this\n\n", "this\n")):
        assert bare(SOURCE.replace(old, new)) != found
    for old, new in (("with a", "with no"), ("Of a module", "Of it"), ("\n\n\n", "\n")):
        assert bare(SOURCE.replace(old, new)) == found


def test_a_name_is_followed_to_the_module_that_defines_it():
    """flexattn.mods passes on what traces a mod, which a Mod's own module does not reach."""
    assert ("flexattn.mods", "Mod") in imports_of(
        module_path("flexattn.problem.problem").read_text()
    )
    found = closure(["flexattn.problem.problem"])
    assert "flexattn.mods.expr" in found
    assert not {"flexattn.mods", "flexattn.mods.bind", "flexattn.mods.trace"} & set(found)
    assert list(found) == sorted(found)
    traces = {"flexattn.mods.bind", "flexattn.mods.trace"}
    assert traces <= set(closure(["flexattn.serving.plan"]))
    assert not traces & set(closure(["flexattn.serving.plan"], stop=("flexattn.mods.bind",)))
