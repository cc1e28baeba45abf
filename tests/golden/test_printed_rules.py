"""The printed rules are what sympy prints of the statements now: `make golden` writes them."""

from pathlib import Path

import pytest
import sympy

from flexattn.kernels.hopper import printed as printed_gluon
from flexattn.kernels.stated.printer import gluon_text, text
from flexattn.kernels.triton import printed


@pytest.mark.parametrize(("module", "text"), [(printed, text), (printed_gluon, gluon_text)])
def test_the_printed_rules_are_those_stated(module, text, request):
    file = Path(module.__file__)
    if request.config.getoption("--accept-golden"):
        file.write_text(text(), encoding="utf-8")
    words = f"by sympy {sympy.__version__}: `make golden` writes it, where the statements changed"
    assert file.read_text(encoding="utf-8") == text(), words
