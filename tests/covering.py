"""Products of parameters, of which `make test` runs rows that cover every pair, or every value.

The other rows have the mark `long`. Greedy, as in AETG (Cohen et al., 1997): the next row is the
one that covers most of what no row has covered, and among equals the one whose values are rarest.
"""

from collections import Counter
from itertools import combinations, product

import pytest

_PARAM = type(pytest.param())


def pairwise(**values):
    """A parametrize mark: any values of two parameters meet in a row that is not `long`."""
    return _covering(2, values)


def each_choice(**values):
    """A parametrize mark: any value of a parameter is in a row that is not `long`."""
    return _covering(1, values)


def _covering(strength, values):
    rows = [tuple(enumerate(row)) for row in product(*(range(len(v)) for v in values.values()))]
    covered = {row: frozenset(combinations(row, strength)) for row in rows}
    missing, used, often = set().union(*covered.values()), Counter(), set()

    def worth(row):
        return len(covered[row] & missing), -sum(used[choice] for choice in row)

    while missing:
        best = max(rows, key=worth)
        often.add(best)
        used.update(best)
        missing -= covered[best]
    choices = [list(map(_wrapped, each, range(len(each)))) for each in map(list, values.values())]
    params = []
    for row in rows:
        parts = [choices[place][index] for place, index in row]
        marks = [mark for part in parts for mark in part.marks]
        marks += [pytest.mark.long] * (row not in often)
        given = [part.values[0] for part in parts]
        params.append(pytest.param(*given, marks=marks, id="-".join(part.id for part in parts)))
    return pytest.mark.parametrize(tuple(values), params)


def _wrapped(value, place):
    """A value as a pytest.param that has an id."""
    param = value if isinstance(value, _PARAM) else pytest.param(value)
    text = str(param.values[0])
    name = param.id or (text if len(text) < 40 else f"{type(param.values[0]).__name__}{place}")
    return pytest.param(*param.values, marks=param.marks, id=name)
