"""The printed rules are what sympy prints of the statements now: `make golden` writes them."""

from pathlib import Path

import pytest
import sympy

from flexattn.kernels.hopper import printed as printed_gluon
from flexattn.kernels.hopper_backward import printed as printed_hopper_backward
from flexattn.kernels.nki import printed as printed_nki
from flexattn.kernels.paged_decode import (
    printed as printed_serving,
    printed_warps as printed_serving_warps,
)
from flexattn.kernels.stated import (
    gluon,
    hopper_backward,
    inequalities,
    nki,
    serving,
    serving_warps,
)
from flexattn.kernels.stated.expressions import Python
from flexattn.kernels.stated.printer import text
from flexattn.kernels.triton import printed

PRINTED = {
    "triton": (printed, inequalities, inequalities.TRITON_STATEMENT),
    "hopper": (printed_gluon, gluon, gluon.HOPPER_STATEMENT),
    "hopper backward": (
        printed_hopper_backward,
        hopper_backward,
        hopper_backward.HOPPER_BACKWARD_STATEMENT,
    ),
    "programs": (printed_serving, serving, serving.PROGRAMS_STATEMENT),
    "warps": (printed_serving_warps, serving_warps, serving_warps.WARPS_STATEMENT),
    "nki": (printed_nki, nki, nki.NKI_STATEMENT),
}


@pytest.mark.parametrize("family", PRINTED)
def test_the_printed_rules_are_those_stated(family, request):
    module, source, statement = PRINTED[family]
    file, stated = Path(module.__file__), Path(source.__file__)
    wanted = text(statement, f"{stated.parent.name}/{stated.name}")
    if request.config.getoption("--accept-golden"):
        file.write_text(wanted, encoding="utf-8")
    words = f"by sympy {sympy.__version__}: `make golden` writes it, where the statements changed"
    assert file.read_text(encoding="utf-8") == wanted, words


@pytest.mark.parametrize("turned", [False, True])
def test_a_choice_keeps_its_parentheses_in_a_sum(turned):
    """`a + b if x else c` is the choice of a sum, not a sum with a choice."""
    a, b, c, x = sympy.symbols("a b c x")
    printed_sum = Python(()).doprint(a + sympy.Piecewise((b, x), (c, True)))
    assert eval(printed_sum, {"a": 1, "b": 20, "c": 300, "x": turned}) == (21 if turned else 301)


@pytest.mark.parametrize("family", PRINTED)
def test_a_person_reads_what_is_printed(family):
    """One line once had 4,542 characters, in a file that no linter and no formatter looked at."""
    lines = Path(PRINTED[family][0].__file__).read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) < 100
    assert not any(each in line for line in lines for each in ("fmt: off", "noqa", "lambda: "))
