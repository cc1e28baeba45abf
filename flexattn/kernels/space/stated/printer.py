"""The text of space/printed.py and printed_gluon.py: formulas and inequalities as plain Python.

To import sympy takes a quarter of a second and to print this 30 ms, as much as the first call of a
server may take in all. So the text is kept, and a test holds it to what is printed now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import lcm

from sympy import Add, Basic, Expr, Symbol
from sympy.printing.pycode import PythonCodePrinter

from flexattn.kernels.space.stated import formulas, gluon, inequalities
from flexattn.kernels.space.stated.inequalities import Inequality
from flexattn.kernels.space.stated.symbols import ESTIMATED, SYMBOLS

__all__ = ["gluon_text", "text"]

_HEAD = '''"""What space/stated says, printed by sympy as Python; `make golden` prints it again."""

# fmt: off
# ruff: noqa

from collections.abc import Sequence
from math import floor
'''


class _Exact(PythonCodePrinter):  # type: ignore[misc]  # sympy ships no types
    """Prints a floor that a double gets right: a sum of thirds that is whole must not end below.

    Halves and quarters are exact; other denominators are divided by once, after the sum.
    """

    def _print_floor(self, expr: Expr) -> str:
        (summed,) = expr.args
        denominators = [term.as_coeff_Mul()[0].q for term in Add.make_args(summed)]
        common = lcm(*denominators)
        odd = common // (common & -common)
        if odd == 1:
            return f"floor({self._print(summed)})"
        whole = Add(*(odd * term for term in Add.make_args(summed)))
        return f"floor(({self._print(whole)})/{odd})"


_EXACT = _Exact({"fully_qualified_modules": False})


def text() -> str:
    """The whole module of the Triton templates' rules."""
    taken = (formulas.SHARED_MEMORY, formulas.REGISTERS)
    groups = (inequalities.SHAPE, inequalities.FIT, inequalities.WORTH)
    return _module((*SYMBOLS, *ESTIMATED), taken, groups)


def gluon_text() -> str:
    """The whole module of the Gluon template's rules."""
    symbols = (*gluon.SYMBOLS, *gluon.ESTIMATED)
    taken = (gluon.SHARED_MEMORY, gluon.REGISTERS)
    return _module(symbols, taken, (gluon.SHAPE, gluon.FIT, gluon.WORTH))


def _module(
    symbols: Sequence[Symbol], taken: Sequence[Basic], groups: Sequence[Sequence[Inequality]]
) -> str:
    """symbols: what the functions take, in order; the last two are the estimates."""
    names = " ".join(symbol.name for symbol in symbols[:-2])
    shape, fit, worth = ([each.holds for each in group] for group in groups)
    return "\n".join([
        _HEAD,
        f"NAMES = tuple({json.dumps(names)}.split())",
        *_words("SHAPE", groups[0]), *_words("FIT", groups[1]), *_words("WORTH", groups[2]),
        *_function(symbols, "estimates", "float", "Shared memory, registers.", taken),
        *_function(symbols, "shape", "int", "Which of SHAPE hold.", shape),
        *_function(symbols, "fit", "int", "Which of FIT hold.", fit),
        *_function(symbols, "worth", "int", "Which of WORTH hold.", worth),
        "",
    ])  # fmt: skip


def _words(name: str, group: Sequence[Inequality]) -> Iterator[str]:
    yield f"{name} = ("
    for each in group:
        yield f"    ({json.dumps(each.name)}, {json.dumps(each.says)}),"
    yield ")"


def _function(
    symbols: Sequence[Symbol], name: str, kind: str, says: str, values: Sequence[Basic]
) -> Iterator[str]:
    """A function of the numbers behind the symbols, in their order."""
    used = {symbol for each in values for symbol in each.free_symbols}
    yield ""
    yield ""
    yield f"def {name}(values: Sequence[int]) -> tuple[{kind}, ...]:"
    yield f'    """{says}"""'
    yield f"    {', '.join(_taken(symbols, used))} = values"
    yield "    return ("
    for each in values:
        yield f"        {_EXACT.doprint(each)},"
    yield "    )"


def _taken(symbols: Sequence[Symbol], used: set[Symbol]) -> Iterator[str]:
    """Names to unpack the numbers into, those that are not used as `_`."""
    left = set(used)
    for symbol in symbols:
        if not left:
            yield "*_"
            return
        yield symbol.name if symbol in used else "_"
        left.discard(symbol)
