"""Which cases of a long list make test compiles."""

from collections.abc import Iterable

import pytest

from flexattn.kernels.base.config import describe

LONG = pytest.mark.full_matrix


def part(configs: Iterable, of: int, turn: int = 0) -> list:
    """One in `of` of a space's configs, in the order of their names.

    turn: another problem's, which compiles other ones of them.
    """
    return sorted(dict.fromkeys(configs), key=describe)[turn::of]


def share(cases, kept):
    """The cases that are kept, for make test; the others for the long matrix.

    cases: tuples of parameters, or the one parameter of each.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if kept(case) else LONG))
    return found
