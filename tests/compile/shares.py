"""Which cases of a long list make test compiles."""

from collections.abc import Iterable

import pytest

from flexattn.kernels.base.config import describe

LONG = pytest.mark.full_matrix


def part(options: pytest.Config, configs: Iterable, of: int, turn: int = 0) -> list:
    """A space's configs in the order of their names; with --half-matrix one in `of` of them.

    turn: which of them comes first.
    """
    found = sorted(dict.fromkeys(configs), key=describe)
    return found[turn::of] if options.getoption("--half-matrix") else found


def share(cases, kept):
    """The cases that are kept, for make test; the others for the long matrix.

    cases: tuples of parameters, or the one parameter of each.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if kept(case) else LONG))
    return found
