"""A mask_mod for kernels of Gluon: bounds on the keys of each row, and what else it asks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flexattn.kernels.base.features import Unit, asked_once
from flexattn.kernels.printers.triton_printer import Printed, Traits, View, print_mod
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.mods.expr import Expr
from flexattn.problem import INDEX_RANGES, Captures

# Behind the name of what threads loaded for a key each and exchanged.
_BY_KEY = "_by_key"


class MaskPieces(NamedTuple):
    """A mask_mod as bounds on the keys of a row, and what else it asks.

    low, high: the first key of each row, and one past the last, as columns of int32; None where
    nothing is known. rest: the condition on keys between them; None if there is none.
    first_high, last_low: high of the first row, and low of the last: no other row's high is lower,
    and no other's low is higher. exchanged: names of what rest computes of the keys alone, each
    thread for one key, which it then gives to all threads through shared memory; empty where rest
    reads more than that. rest.early is on key_of_thread then.
    under: high of first_row, for the producer, where the mask keeps all keys below it.
    """

    rest: Printed | None
    low: Printed | None = None
    high: Printed | None = None
    last_low: Printed | None = None
    first_high: Printed | None = None
    exchanged: tuple[str, ...] = ()
    under: Printed | None = None

    @property
    def printed(self) -> tuple[Printed, ...]:
        """All of them that there are."""
        every = (self.low, self.high, self.last_low, self.first_high, self.rest)
        return tuple(each for each in every if each is not None)

    @property
    def holds(self) -> bool:
        """True if the loop holds more than one bound, or the rest depends on single keys."""
        asked = () if self.rest is None else self.rest.lines
        return (
            self.low is not None or self.exchanged != () or any("kv_idx" in line for line in asked)
        )

    @property
    def exchanged_lines(self) -> tuple[str, ...]:
        """Statements of what is exchanged, on key_of_thread."""
        return self.rest.early if self.rest is not None and self.exchanged else ()

    @property
    def hoisted(self) -> tuple[str, ...]:
        """The statements that are computed before the loop over keys."""
        return tuple(line for each in self.printed for line in each.hoisted)

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement, and the results."""
        every = self.printed if self.under is None else (*self.printed, self.under)
        return tuple(line for each in every for line in each.lines)


def print_mask(
    captures: Captures,
    traits: Traits,
    tile: Unit | None,
    positions: str = "ROWS",
    exchanges: bool = True,
) -> MaskPieces:
    """A mask_mod in pieces, of which most tiles need one alone.

    tile: its rows and keys; None where it begins at no multiple of them. positions: the constant
    that holds the number of its query positions. exchanges: threads exchange what each of them
    loads for a key.
    """
    form = mask_form(captures.mod.expr, INDEX_RANGES)
    span = form.span

    def piece(name: str, expr: Expr | None, view: View) -> Printed | None:
        if expr is None:
            return None
        return print_mod(captures, traits, view._replace(prefix=name), expr)

    column = View(dtype="int32")
    first = View(q_idx="row_start", by_row=False, dtype="int32")
    last = first._replace(q_idx=f"(row_start + {positions} - 1)")
    once = span.rest is not None and asked_once(span.rest, tile)
    # What is the same for all keys of a tile is asked of the first one, in each row.
    by_tile = span.rest is not None and tile is not None and asked_once(span.rest, (0, tile[1]))
    asked = View(kv_idx="start_n") if by_tile else View()
    pieces = MaskPieces(
        piece("mask", span.rest, first._replace(kv_idx="start_n", dtype="") if once else asked),
        piece("low", span.low, column),
        piece("high", span.high, column),
        piece("last_low", span.low, last),
        piece("first_high", span.high, first),
    )
    if span.is_prefix:
        of_run = first._replace(q_idx="first_row", by_key=False)
        pieces = pieces._replace(under=piece("under", span.high, of_run))
    if once or by_tile or not exchanges or not form.rest_loads_keys_alone:
        return pieces
    by_thread = piece("mask", span.rest, View(kv_idx="key_of_thread"))
    later = piece("mask", span.rest, View(early=_BY_KEY))
    assert by_thread is not None and later is not None
    read = "\n".join((*later.body, later.result))
    made = dict.fromkeys(line.split(" = ")[0] for line in by_thread.early)
    names = tuple(name for name in made if f"{name}{_BY_KEY}" in read)
    return pieces._replace(rest=replace(later, early=by_thread.early), exchanged=names)
