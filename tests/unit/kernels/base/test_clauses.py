"""Lines of a template that end with a clause: there if something holds, or once for each."""

import pytest

from flexattn.kernels.base.environment import _environment

CLAUSES = """{% macro sums(n) %}
s{{ i }} = {{ i }}  {? for i in range(n) ?}
{% endmacro %}
def f(x):
    x += 1           {? if more ?}
    {{ sums(2) | block(4) }}  {? if more ?}
{{ sums(1) -}}  {? if not more ?}
    x += {{ i * j }}  {? if more for i in (1, 2) for j in (3, 5) if i + j != 5 ?}
    return x
"""
SUMS = ("    x += 3", "    x += 5", "    x += 10")


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        (True, ["def f(x):", "    x += 1", "    s0 = 0", "    s1 = 1", *SUMS, "    return x", ""]),
        (False, ["def f(x):", "s0 = 0", "    return x", ""]),
    ],
)
def test_lines_are_there_as_their_clauses_say(more, lines):
    assert _environment().from_string(CLAUSES).render(more=more).split("\n") == lines


def test_a_clause_is_no_line_of_its_own():
    """So errors name the line of the file."""
    source = _environment().preprocess("a  {? if b ?}\nc\n", "name")
    assert source.count("\n") == 2
