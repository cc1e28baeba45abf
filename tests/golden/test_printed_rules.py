"""space/printed.py is what sympy prints of the statements now: `make golden` writes it again."""

from pathlib import Path

import sympy

from flexattn.space import printed
from flexattn.space.stated.printer import text


def test_the_printed_rules_are_those_stated(request):
    file = Path(printed.__file__)
    if request.config.getoption("--accept-golden"):
        file.write_text(text(), encoding="utf-8")
    words = f"by sympy {sympy.__version__}: `make golden` writes it, where the statements changed"
    assert file.read_text(encoding="utf-8") == text(), words
