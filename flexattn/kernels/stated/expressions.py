"""sympy's expressions as Python that a person reads, each number and truth value exactly."""

from __future__ import annotations

from collections.abc import Collection
from math import lcm

import sympy as sp
from sympy.core.relational import Relational
from sympy.printing.precedence import PRECEDENCE, precedence
from sympy.printing.printer import Printer

_RELATIONS = {"Equality": "==", "Unequality": "!="}


class Python(
    Printer,  # type: ignore[misc]  # sympy ships no types
):
    """Prints expressions, a case's numbers as its fields and steps by their names.

    It knows what feasibility is stated with, and refuses the rest. A floor is one that a double
    gets right: a sum of thirds that is whole must not end below. Halves and quarters are exact;
    other denominators are divided by once, after the sum.
    """

    def __init__(self, fields: Collection[sp.Symbol]) -> None:
        super().__init__()
        self._fields = frozenset(fields)

    def cut(self, expr: sp.Basic) -> list[tuple[str, sp.Basic]]:
        """What a long line is cut into: operands, each with the operator before it."""
        if isinstance(expr, sp.Add):
            first, *rest = expr.as_ordered_terms()
            return [("", first), *(("+ ", each) for each in rest)]
        if not isinstance(expr, sp.And | sp.Or):
            raise ValueError(f"name a part of what is too long for a line: {expr}")
        first, *rest = _conditions(expr)
        word = "or " if isinstance(expr, sp.Or) else "and "
        return [("", first), *((word, each) for each in rest)]

    def operand(self, expr: sp.Basic) -> str:
        """As it stands between two operators."""
        return self._within(expr, "Add" if isinstance(expr, sp.Expr) else "Relational")

    def emptyPrinter(self, expr: sp.Basic) -> str:
        raise TypeError(f"feasibility is stated without {type(expr).__name__}: {expr}")

    def _within(self, expr: sp.Basic, outer: str) -> str:
        """An operand, in parentheses where it binds less than what is around it."""
        text: str = self._print(expr)
        loose = isinstance(expr, sp.Piecewise) or precedence(expr) < PRECEDENCE[outer]
        return f"({text})" if loose else text

    def _print_Symbol(self, expr: sp.Symbol) -> str:
        return f"c.{expr.name}" if expr in self._fields else str(expr.name)

    def _print_Integer(self, expr: sp.Expr) -> str:
        return str(expr.p)

    def _print_BooleanTrue(self, expr: sp.Basic) -> str:
        return "True"

    def _print_BooleanFalse(self, expr: sp.Basic) -> str:
        return "False"

    def _print_Add(self, expr: sp.Add) -> str:
        first, *rest = expr.as_ordered_terms()
        text = self._within(first, "Add")
        for term in rest:
            below = term.could_extract_minus_sign()
            text += (
                f" - {self._within(-term, 'Mul')}" if below else f" + {self._within(term, 'Add')}"
            )
        return text

    def _print_Mul(self, expr: sp.Mul) -> str:
        above, below = sp.fraction(expr)
        text = " * ".join(self._within(each, "Mul") for each in sp.Mul.make_args(above))
        if below == 1:
            return text
        return f"{text} / {self._within(below, 'Pow')}"

    def _print_Rational(self, expr: sp.Rational) -> str:
        return f"{expr.p} / {expr.q}"

    def _print_floor(self, expr: sp.Expr) -> str:
        terms = sp.Add.make_args(expr.args[0])
        common = lcm(*(term.as_coeff_Mul()[0].q for term in terms))
        odd = common // (common & -common)
        if odd == 1:
            return f"floor({self._print(expr.args[0])})"
        whole = sp.Add(*(odd * term for term in terms))
        return f"floor({self._within(whole, 'Mul')} / {odd})"

    def _print_Mod(self, expr: sp.Expr) -> str:
        return " % ".join(self._within(each, "Pow") for each in expr.args)

    def _print_Max(self, expr: sp.Expr) -> str:
        return f"max({self._listed(expr)})"

    def _print_Min(self, expr: sp.Expr) -> str:
        return f"min({self._listed(expr)})"

    def _listed(self, expr: sp.Expr) -> str:
        """Arguments of a function, numbers last."""
        return ", ".join(map(self._print, sorted(expr.args, key=lambda each: each.is_number)))

    def _print_Relational(self, expr: Relational) -> str:
        sign = _RELATIONS.get(type(expr).__name__, expr.rel_op)
        left, right = (self._within(each, "Add") for each in expr.args)
        return f"{left} {sign} {right}"

    def _print_And(self, expr: sp.Basic) -> str:
        return " and ".join(self._within(each, "Relational") for each in _conditions(expr))

    def _print_Or(self, expr: sp.Basic) -> str:
        sizes = {
            each.args[0]
            for each in expr.args
            if isinstance(each, sp.Eq) and each.args[1].is_number
        }
        if len(sizes) == 1 and len(expr.args) > 1 and all(isinstance(e, sp.Eq) for e in expr.args):
            among = ", ".join(self._print(each.args[1]) for each in expr.args)
            return f"{self._print(sizes.pop())} in ({among})"
        return " or ".join(self._within(each, "Relational") for each in _conditions(expr))

    def _print_Tuple(self, expr: sp.Tuple) -> str:
        return ", ".join(map(self._print, expr.args))

    def _print_Not(self, expr: sp.Basic) -> str:
        return f"not {self._within(expr.args[0], 'Not')}"

    def _print_Piecewise(self, expr: sp.Piecewise) -> str:
        """One of two, in a line."""
        (then, condition), (other, _) = branches(expr)
        return f"{self._print(then)} if {self._print(condition)} else {self._print(other)}"


def branches(expr: sp.Basic) -> list[tuple[sp.Basic, sp.Basic]]:
    """(value, condition) of each piece; anything else is one piece."""
    if not isinstance(expr, sp.Piecewise):
        return [(expr, True)]
    return [(piece.expr, piece.cond) for piece in expr.args]


def _conditions(expr: sp.Basic) -> list[sp.Basic]:
    """What `and` or `or` joins, remainders last: whether a divisor is 0 is asked before."""
    return sorted(expr.args, key=lambda each: bool(each.has(sp.Mod)))


def fitted(before: str, expr: sp.Basic, behind: str, width: int, python: Python) -> list[str]:
    """An expression between two texts: in a line, or an operand a line where that is too long."""
    whole = f"{before}{python.doprint(expr)}{behind}"
    if len(whole) <= width or isinstance(expr, sp.Piecewise):
        return [whole]
    if isinstance(expr, sp.Not):
        before, expr = f"{before}not ", expr.args[0]
    lines: list[str] = []
    for word, operand in python.cut(expr):
        text = python.operand(operand)
        if len(word) + len(text) + 4 <= width:
            lines.append(f"{word}{text}")
        else:
            lines += fitted(word, operand, "", width - 4, python)
    return [f"{before}(", *(f"    {line}" for line in lines), f"){behind}"]
