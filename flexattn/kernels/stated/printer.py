"""The text of a family's printed module: its statement as plain Python that a person reads.

To import sympy takes a quarter of a second, as much as the first call of a server may take in all.
So the text is kept, and a test holds it to what is printed now. Steps keep their names, a
Piecewise is `if`, `elif` and `else`, and each rule stands in one place with its words.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from textwrap import indent, wrap

from sympy import And, Basic, Not, Or, Piecewise, Symbol, Tuple, preorder_traversal

from flexattn.kernels.stated.expressions import Python, branches, fitted
from flexattn.kernels.stated.statement import Formula, Inequality, Statement, Step

_WIDTH = 99
_HEAD = '''"""Feasibility of {about}.

Printed of {stated}, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
'''


def text(statement: Statement, stated: str) -> str:
    """The whole module. stated: the file that the statement is in."""
    case = (*statement.symbols, *statement.estimated)
    python = Python(case)
    functions = "".join(f"\n\n{_function(each, python)}" for each in statement.formulas)
    groups = (("shape", statement.shape), ("fit", statement.fit), ("worth", statement.worth))
    rules = "".join(_group(name, group, python) for name, group in groups)
    imported = "from math import floor\n" if "floor(" in functions else ""
    parts = [
        _HEAD.format(about=statement.about, stated=stated),
        imported,
        "\nfrom flexattn.kernels.base.rule import Rule, Rules\n\n\n",
        _case(statement),
        functions,
        _estimate(statement.formulas) if statement.formulas else "",
        f"\n\nRULES: Rules[RuleCase] = Rules(\n{rules})\n",
    ]
    return "".join(parts)


def _case(statement: Statement) -> str:
    truths = _truths(statement)
    lines = [
        "@dataclass(slots=True, eq=False, repr=False)",
        "class RuleCase:",
        '    """The numbers of one case."""',
        "",
    ]
    for symbol in statement.symbols:
        lines.append(f"    {symbol.name}: {_kind(symbol in truths)}")
    if statement.estimated:
        lines.append("    # Known where the rules of the shape hold.")
    for symbol in statement.estimated:
        truth = symbol in truths
        lines.append(f"    {symbol.name}: {_kind(truth)} = {False if truth else 0}")
    return "".join(f"{line}\n" for line in lines)


def _truths(statement: Statement) -> set[Basic]:
    """The symbols that stand for truth values."""
    stated = [each.holds for each in (*statement.shape, *statement.fit, *statement.worth)]
    whole = [each for each in stated if isinstance(each, Symbol)]
    for formula in statement.formulas:
        whole += [Symbol(name) for name, truth in _given(formula) if truth]
        stated += [formula.value, *(step.value for step in formula.steps)]
    parts = [part for each in stated for part in preorder_traversal(each)]
    for part in parts:
        if isinstance(part, And | Or | Not):
            whole += part.args
        elif isinstance(part, Piecewise):
            whole += [condition for _, condition in branches(part)]
    return {each for each in whole if isinstance(each, Symbol)}


def _function(formula: Formula, python: Python) -> str:
    kinds = [_kind(truth) for _, truth in _given(formula)]
    kind = kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"
    body = _Body(python, formula.steps).returned(formula.value, 4)
    head = f"def {formula.names[0]}(c: RuleCase) -> {kind}:\n"
    return head + indent(_docstring(formula.says), "    ") + "".join(body)


def _given(formula: Formula) -> list[tuple[str, bool]]:
    """(name, whether it is a truth value) of each value of a formula."""
    steps = {step.symbol: step.value for step in formula.steps}
    values = formula.value.args if isinstance(formula.value, Tuple) else (formula.value,)
    truths = [isinstance(steps.get(each, each), And | Or | Not) for each in values]
    return list(zip(formula.names, truths, strict=True))


def _kind(truth: bool) -> str:
    return "bool" if truth else "int"


def _docstring(says: str) -> str:
    if len(says) + 10 <= _WIDTH:
        return f'"""{says}"""\n'
    first, _, rest = says.partition(". ")
    return "\n".join([f'"""{first}.', "", *wrap(rest, _WIDTH - 4), '"""', ""])


class _Body:
    """The lines of one function, each step as late as what needs it allows.

    depth: columns before a line.
    """

    def __init__(self, python: Python, steps: Sequence[Step]) -> None:
        self._python = python
        self._left = {step.symbol: step for step in steps}

    def returned(self, value: Basic, depth: int) -> Iterator[str]:
        """Lines that return a value: each piece in a branch of its own, with its own steps."""
        cases = branches(value)
        for at, (piece, condition) in enumerate(cases):
            later = self._needed(part for case in cases[at + 1 :] for part in case)
            shared = [step for step in self._needed([piece]) if step in later]
            yield from self._taken([*self._needed([condition]), *shared], depth)
            if condition != True:  # noqa: E712  # sympy's own truth
                yield from self._line("if ", condition, ":", depth)
            inner = depth + 4 * (condition != True)  # noqa: E712
            yield from self._taken(self._needed([piece]), inner)
            yield from self._line("return ", piece, "", inner)

    def _needed(self, values: Iterable[Basic]) -> list[Step]:
        """The steps that values need and that were not taken yet, in their order."""
        wanted = {symbol for value in values for symbol in _symbols(value)}
        for step in reversed(self._left.values()):
            if step.symbol in wanted:
                wanted |= _symbols(step.value)
        return [step for step in self._left.values() if step.symbol in wanted]

    def _taken(self, steps: Collection[Step], depth: int) -> Iterator[str]:
        for step in [each for each in self._left.values() if each in steps]:
            del self._left[step.symbol]
            comment = wrap(step.why, _WIDTH - 2 - depth)
            yield from (f"{' ' * depth}# {line}\n" for line in comment)
            yield from self._assigned(step.symbol.name, step.value, depth)

    def _assigned(self, name: str, value: Basic, depth: int) -> Iterator[str]:
        cases = branches(value)
        if len(cases) <= 2:
            lines = [*self._line(f"{name} = ", value, "", depth)]
            if len(cases) == 1 or len(lines[0]) <= _WIDTH:
                yield from lines
                return
        word = "if"
        for piece, condition in cases:
            if condition == True:  # noqa: E712
                yield f"{' ' * depth}else:\n"
            else:
                yield from self._line(f"{word} ", condition, ":", depth)
            yield from self._line(f"{name} = ", piece, "", depth + 4)
            word = "elif"

    def _line(self, before: str, value: Basic, behind: str, depth: int) -> Iterator[str]:
        lines = fitted(before, value, behind, _WIDTH - depth, self._python)
        yield from (f"{' ' * depth}{line}\n" for line in lines)


def _symbols(value: Basic) -> set[Basic]:
    return set(getattr(value, "free_symbols", ()))


def _estimate(formulas: Iterable[Formula]) -> str:
    lines = [
        "def estimate(c: RuleCase) -> None:",
        '    """Write into a case what its config takes."""',
    ]
    for each in formulas:
        names = ", ".join(f"c.{name}" for name in each.names)
        lines.append(f"    {names} = {each.names[0]}(c)")
    return "\n\n" + "".join(f"{line}\n" for line in lines)


def _group(name: str, group: Sequence[Inequality], python: Python) -> str:
    rules = "".join(_rule(each, python) for each in group)
    return f"    {name}=(\n{rules}    ),\n" if rules else f"    {name}=(),\n"


def _rule(rule: Inequality, python: Python) -> str:
    """A row: the name, the words, and what must hold; in as few lines as a formatter takes."""
    name, says = json.dumps(rule.name), json.dumps(rule.says)
    row = f"{name}, {says}, lambda c: {python.doprint(rule.holds)}"
    if len(row) + len("Rule(),") <= _WIDTH - 8:
        lines = [f"Rule({row}),"]
    elif len(row) <= _WIDTH - 12:
        lines = ["Rule(", f"    {row}", "),"]
    else:
        parts = [f"{name},", *_words(rule.says), *_held(rule, python)]
        lines = ["Rule(", *(f"    {part}" for part in parts), "),"]
    return indent("".join(f"{line}\n" for line in lines), " " * 8)


def _held(rule: Inequality, python: Python) -> list[str]:
    inside = python.doprint(rule.holds)
    if _WIDTH - 12 - len("lambda c: ,") < len(inside) <= _WIDTH - 16:
        return ["lambda c: (", f"    {inside}", "),"]
    return fitted("lambda c: ", rule.holds, ",", _WIDTH - 12, python)


def _words(says: str) -> list[str]:
    """A string, in several lines where it is long."""
    lines = wrap(says, _WIDTH - 16, drop_whitespace=False)
    return [json.dumps(line) for line in lines[:-1]] + [f"{json.dumps(lines[-1])},"]
