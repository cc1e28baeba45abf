"""Which nodes of an Expr are printed early, which in a form of their own, and which by a name."""

from __future__ import annotations

from flexattn.errors import UnsupportedError
from flexattn.kernels.printers.triton_ops import HALVES
from flexattn.mods.expr import Expr, depending

# Of one text: how many operations lie within one another, and how many characters it has. Python's
# parser ends at 200 parentheses, and compilers visit what is nested by recursion.
_DEEPEST, _LONGEST = 24, 1000


class Nesting:
    """How many operations lie within one another in the text of each node."""

    def __init__(self) -> None:
        self._depths: dict[Expr, int] = {}

    def ends(self, node: Expr, text: str, named: bool) -> bool:
        """Whether a node gets a name: it is named anyway, or its text grows too deep or long."""
        depth = 1 + max((self._depths.get(arg, 0) for arg in node.args), default=0)
        if named or depth > _DEEPEST or len(text) > _LONGEST:
            return True
        self._depths[node] = depth
        return False


def feeding_loads(nodes: list[Expr]) -> set[Expr]:
    """Of nodes in walk's order: loads that do not wait for the score, and what they need."""
    scored = depending(nodes, ("score",))
    found: set[Expr] = set()
    for node in reversed(nodes):
        if node not in scored and (node.op == "load" or node in found):
            found.add(node)
            found.update(node.args)
    return found


def summed_halves(nodes: list[Expr]) -> frozenset[Expr]:
    """Products in 16 bits that are summed, with nothing but casts and signs between."""
    found: set[Expr] = set()
    below = [arg for node in nodes if node.op in ("add", "sub") for arg in node.args]
    while below:
        node = below.pop()
        if node.op in ("neg", "cast"):
            below += node.args
        elif node.op == "mul" and node.dtype in HALVES:
            found.add(node)
    return frozenset(found)


def integer_power(text: str, exponent: Expr) -> str:
    """An integer's power as products; raises UnsupportedError unless the exponent is 0 to 16."""
    if exponent.op != "const" or not 0 <= int(exponent.value or 0) <= 16:
        shown = exponent.value if exponent.op == "const" else exponent.op
        raise UnsupportedError(
            f"an integer to the power {shown}",
            "integer powers take a constant exponent from 0 to 16",
            "convert to float first",
        )
    return f"({' * '.join([text] * int(exponent.value or 0)) or '1'})"
