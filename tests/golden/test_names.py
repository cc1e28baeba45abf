"""Every name in an accepted kernel is defined, and every function it takes from Triton is there.

What a printer writes and no template defines fails in the compiler alone, on a user's machine.
"""

from pathlib import Path

import pytest

from tests.rendered_names import undefined

FILES = sorted((Path(__file__).parent / "files").iterdir())
pytestmark = pytest.mark.oldest


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".py.txt"))
def test_no_name_is_undefined(file):
    assert not undefined(file.read_text())


@pytest.mark.parametrize(
    ("statement", "name"),
    [("sigmoid(x)", "sigmoid"), ("tl.no_such(x)", "tl.no_such"), ("x + BLOCK", "BLOCK")],
)
def test_what_nothing_defines_is_found(statement, name):
    text = f"import triton.language as tl\n\n\ndef kernel(x):\n    y = {statement}\n    return y\n"
    assert undefined(text) == {name}
