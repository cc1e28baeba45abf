"""The text of space/printed.py: the formulas and inequalities as plain Python functions.

To import sympy takes a quarter of a second and to print this 30 ms, as much as the first call of a
server may take in all. So the text is kept, and a test holds it to what is printed now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from sympy import Basic, Symbol, pycode

from flexattn.space.stated.formulas import REGISTERS, SHARED_MEMORY
from flexattn.space.stated.inequalities import FIT, SHAPE, WORTH, Inequality
from flexattn.space.stated.symbols import ESTIMATED, SYMBOLS

__all__ = ["text"]

_HEAD = '''"""What space/stated says, printed by sympy as Python; `make golden` prints it again."""

# fmt: off
# ruff: noqa

from collections.abc import Sequence
from math import floor
'''


def text() -> str:
    """The whole module."""
    names = " ".join(symbol.name for symbol in SYMBOLS)
    return "\n".join([
        _HEAD,
        f"NAMES = tuple({json.dumps(names)}.split())",
        *_words("SHAPE", SHAPE), *_words("FIT", FIT), *_words("WORTH", WORTH),
        *_function("estimates", "float", "Shared memory, registers.", (SHARED_MEMORY, REGISTERS)),
        *_function("shape", "int", "Which of SHAPE hold.", [each.holds for each in SHAPE]),
        *_function("fit", "int", "Which of FIT hold.", [each.holds for each in FIT]),
        *_function("worth", "int", "Which of WORTH hold.", [each.holds for each in WORTH]),
        "",
    ])  # fmt: skip


def _words(name: str, group: Sequence[Inequality]) -> Iterator[str]:
    yield f"{name} = ("
    for each in group:
        yield f"    ({json.dumps(each.name)}, {json.dumps(each.says)}),"
    yield ")"


def _function(name: str, kind: str, says: str, values: Sequence[Basic]) -> Iterator[str]:
    """A function of the numbers behind the symbols, in their order."""
    used = {symbol for each in values for symbol in each.free_symbols}
    yield ""
    yield ""
    yield f"def {name}(values: Sequence[int]) -> tuple[{kind}, ...]:"
    yield f'    """{says}"""'
    yield f"    {', '.join(_taken(used))} = values"
    yield "    return ("
    for each in values:
        yield f"        {pycode(each, fully_qualified_modules=False)},"
    yield "    )"


def _taken(used: set[Symbol]) -> Iterator[str]:
    """Names to unpack the numbers into, those that are not used as `_`."""
    left = set(used)
    for symbol in (*SYMBOLS, *ESTIMATED):
        if not left:
            yield "*_"
            return
        yield symbol.name if symbol in used else "_"
        left.discard(symbol)
