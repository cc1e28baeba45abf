"""The edges of a mask as Triton's text: what a serving kernel skips pages by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flexattn.kernels.printers.triton_printer import Traits, print_mod
from flexattn.mods.analysis.affine import Edge
from flexattn.problem import Captures


@dataclass(frozen=True, slots=True)
class PrintedEdge:
    """A bound of the keys that a mask keeps: slope * q_idx + offset + rest.

    lowest: no key below it is kept; else: no key from it on. statements, rest: Triton's text for
    the part that the request alone decides; "0" where there is none.
    """

    lowest: bool
    slope: int
    offset: int
    statements: tuple[str, ...]
    rest: str

    @property
    def query(self) -> str:
        """The end of a range of queries where the bound is loosest."""
        return "q_first" if self.lowest == (self.slope > 0) else "q_last"

    @property
    def tight_query(self) -> str:
        """The end of a range of queries where the bound is tightest."""
        return "q_last" if self.query == "q_first" else "q_first"


def print_edges(
    captures: Captures, edges: Iterable[Edge], traits: Traits
) -> tuple[PrintedEdge, ...]:
    """The edges of a mask_mod, each with the statements that its rest takes."""
    found = []
    for edge in edges:
        statements: tuple[str, ...] = ()
        text = "0"
        if edge.rest is not None:
            part = replace(captures.mod, expr=edge.rest)
            printed = print_mod(part, captures.contiguous, traits)
            statements, text = (*printed.hoisted, *printed.early), printed.result
        found.append(PrintedEdge(edge.lowest, edge.slope, edge.offset, statements, text))
    return tuple(found)
