"""Which cases of a long list make test compiles."""

import pytest

LONG = pytest.mark.full_matrix


def share(cases, kept):
    """The cases that are kept, for make test; the others for the long matrix.

    cases: tuples of parameters, or the one parameter of each.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if kept(case) else LONG))
    return found
