"""Every name in an accepted kernel is defined, and every function it takes from Triton is there.

What a printer writes and no template defines fails in the compiler alone, on a user's machine.
"""

import ast
from pathlib import Path

import pytest

from tests.rendered_names import undefined

FILES = sorted((Path(__file__).parent / "files").iterdir())
pytestmark = pytest.mark.oldest


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".py.txt"))
def test_no_name_is_undefined(file):
    text, left_out = file.read_text(), functions_of_the_plainest(file)
    while called := undefined(text) & left_out.keys():
        text += "".join(left_out.pop(name) for name in called)
    assert not undefined(text)


def functions_of_the_plainest(file):
    """By name those that a golden leaves out where it has them too."""
    plain = file.with_name(f"{file.name.split('_')[0]}_noop.py.txt")
    source = plain.read_text() if plain.exists() and plain != file else ""
    found = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {node.name: f"\n\n{ast.get_source_segment(source, node)}\n" for node in found}


@pytest.mark.parametrize(
    ("statement", "name"),
    [("sigmoid(x)", "sigmoid"), ("tl.no_such(x)", "tl.no_such"), ("x + BLOCK", "BLOCK")],
)
def test_what_nothing_defines_is_found(statement, name):
    text = f"import triton.language as tl\n\n\ndef kernel(x):\n    y = {statement}\n    return y\n"
    assert undefined(text) == {name}
