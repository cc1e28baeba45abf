"""Bodies of loops that become functions compute what they computed in their place."""

import ast

import pytest

from flexattn.kernels.base.environment import outline

PRELUDE = (
    "class gluon:\n    jit = staticmethod(lambda f: f)\n\n\nclass gl:\n    constexpr = int\n\n\n"
)


def run(text, name, *args):
    space = {}
    exec(compile(PRELUDE + text, "rendered", "exec"), space)
    return space[name](*args)


LOOPS = {
    "sum": """
@gluon.jit
def work(n):
    total = 0
    for i in range(n):  # body: add
        square = i * i
        total += square
    return total
""",
    "conditional": """
@gluon.jit
def work(n):
    last = -1
    found = 0
    i = 0
    while i < n:  # body: look
        # An odd number is kept, and seen after the loop.
        if i % 2:
            last = i
            found += 1
        i += 1
    return last, found
""",
    "nested": """
@gluon.jit
def work(n):
    rows = 0
    held = 0
    row = 0
    while row < n:  # body: one_row
        part = 0
        for i in range(row):  # body: one_cell
            part += i + held
            held = part
        rows += part
        row += 1
    return rows, held
""",
    "sometimes": """
@gluon.jit
def work(n):
    total = 0
    for unit in range(n):  # body: one_unit
        if unit > 2:
            bound = unit
            total += bound
        for i in range(unit):  # body: one_tile
            # Of its own: what the unit has is there in some units alone.
            if i > 1:
                bound = i
                total += bound
    return total
""",
    "constant": """
@gluon.jit
def work(n, PART: gl.constexpr):
    total = 0
    for i in range(n):  # body: add
        total += PART
    return total
""",
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_is_computed(name):
    text = LOOPS[name]
    args = (7, 3) if "PART" in text else (7,)
    outlined = outline(text)
    assert "# body:" not in outlined
    assert run(outlined, "work", *args) == run(text, "work", *args)


def test_each_body_is_a_function_before_its_loop():
    tree = ast.parse(outline(LOOPS["nested"]))
    assert [f.name for f in tree.body] == ["one_cell", "one_row", "work"]


def test_what_nobody_needs_is_no_result():
    outlined = outline(LOOPS["sum"])
    assert (
        "def add(\n    i, total,\n):" in outlined and "square" not in outlined.split("return")[1]
    )


def test_a_constant_stays_one():
    assert "PART: gl.constexpr" in outline(LOOPS["constant"]).split("def work")[0]


def test_comments_stay():
    assert "    # An odd number is kept" in outline(LOOPS["conditional"])


def test_text_without_marks_is_itself():
    text = "def f():\n    for i in range(3):\n        pass\n"
    assert outline(text) == text
