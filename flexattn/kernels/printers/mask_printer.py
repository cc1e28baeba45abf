"""Print a mask_mod in parts, each with the tiles that need it, and its edges for paged caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from flexattn.kernels.printers.triton_printer import Printed, Traits, View, print_mod
from flexattn.mods.analysis.affine import Edge
from flexattn.mods.analysis.mask_form import DocumentIds, mask_form
from flexattn.mods.expr import Expr
from flexattn.mods.simplify import make
from flexattn.problem import INDEX_RANGES, Captures


class MaskPart(NamedTuple):
    """Statements that mask a tile; needed: what a tile is asked.

    All of them stand behind that condition: with loads of keys before the scores, ptxas turns the
    conditions into selects, and a tile without a mask runs 610 instructions instead of 381 (64x64,
    documents, Triton 3.6, sm_90).
    """

    printed: Printed
    needed: str

    @property
    def names_keys(self) -> bool:
        """True if the statements name the indices of the tile's keys."""
        return any("kv_idx" in line for line in self.printed.lines)


class SpanEnd(NamedTuple):
    """A bound on the keys of a tile's rows, for its first and for its last row.

    A later row's bound is never lower. first, last: what they are called. divides: whether some
    part of the mask is needed on one side of it alone.
    """

    statements: tuple[str, ...]
    first: str
    last: str
    divides: bool


class Segments(NamedTuple):
    """DocumentIds of rows and keys that must be equal, looked at before the loop.

    Where the rows of a tile have one number, and its keys follow one another in the blocks that
    need the mask, two ends say what the tile keeps, and no tile of keys compares numbers: 6 % of
    the time of 8 causal documents on an H200. rows, one: of all rows of the tile, and of the
    first. head, tail: of head_keys and tail_keys, the first and the last block. All are names or
    texts.
    """

    statements: tuple[str, ...]
    rows: str
    one: str
    head: str
    tail: str


class MaskParts(NamedTuple):
    """The parts of a mask_mod, and where the keys of a row begin and end, None if unknown.

    upto: the mask keeps all keys under `high`, and no others.
    """

    parts: tuple[MaskPart, ...]
    low: SpanEnd | None = None
    high: SpanEnd | None = None
    segments: Segments | None = None
    upto: bool = False

    @property
    def hoisted(self) -> tuple[str, ...]:
        """The statements of the parts that are computed before the loop over keys."""
        return tuple(line for part in self.parts for line in part.printed.hoisted)

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement, for what a kernel must import and define."""
        bounds = [bound.statements for bound in (self.low, self.high) if bound is not None]
        if self.segments is not None:
            bounds.append(self.segments.statements)
        return (*(line for part in self.parts for line in part.printed.lines), *sum(bounds, ()))


def whole_mask(captures: Captures, traits: Traits, needed: str = "i < num_kv") -> MaskParts:
    """A mask_mod in one part; of lists, the first num_kv tiles need it."""
    printed = print_mod(captures, traits)
    return MaskParts((MaskPart(printed, needed),))


def mask_parts(
    captures: Captures, traits: Traits, packed_heads: int, segments: bool, columns: bool
) -> MaskParts:
    """A mask_mod in as many parts as its bounds on the keys make.

    packed_heads: how many query heads the rows of a tile are of; bounds hold for one alone.
    segments: whether the template looks at segments before its loop. columns: whether it compares
    each row's bounds with its keys, by `keys_below`.
    """
    form = mask_form(captures.mod.expr, INDEX_RANGES)
    span, rest, same = form.span, form.span.rest, None
    if packed_heads > 1 and span.per_head:
        return whole_mask(captures, traits, "masked")
    documents = form.documents if segments else None
    if documents is not None:
        same, rest = make("eq", "bool", (documents.row, documents.key)), documents.rest
    sides = (
        ("below", span.below, "masked & (i < low_end)"),
        ("above", span.above, "masked & (i >= high_begin)"),
        ("same", same, "masked & apart"),
        ("rest", rest, "masked"),
    )
    bounds = {"below": span.low, "above": span.high}
    parts = []
    for name, expr, needed in sides:
        bound = bounds.get(name)
        if expr is not None and columns and bound is not None:
            parts.append(MaskPart(_compared(captures, name, bound, traits), needed))
        elif expr is not None:
            parts.append(MaskPart(print_mod(captures, traits, View(f"mask_{name}"), expr), needed))
    low = _bound(captures, traits, "low", span.low, span.below)
    high = _bound(captures, traits, "high", span.high, span.above)
    found = None if documents is None else _segments(captures, traits, documents)
    return MaskParts(tuple(parts), low, high, found, span.is_prefix)


def _compared(captures: Captures, name: str, bound: Expr, traits: Traits) -> Printed:
    """A bound as a column of the rows, on one side of which the keys of a tile are kept."""
    printed = print_mod(captures, traits, View(f"mask_{name}", dtype="int32"), bound)
    under = f"keys_below({printed.result} - start_n)"
    return replace(printed, result=under if name == "above" else f"{under} == 0")


def _segments(captures: Captures, traits: Traits, documents: DocumentIds) -> Segments:
    row, key = documents.row, documents.key
    views = (
        (row, View("row_number", q_idx="offs_m")),
        (row, View("one_number", q_idx="first_row", by_row=False)),
        (key, View("head_number", kv_idx="head_keys", by_key=False)),
        (key, View("tail_number", kv_idx="tail_keys", by_key=False)),
    )
    printed = [print_mod(captures, traits, view, expr) for expr, view in views]
    statements = tuple(line for each in printed for line in each.hoisted)
    return Segments(statements, *(each.result for each in printed))


def _bound(
    captures: Captures, traits: Traits, name: str, expr: Expr | None, part: Expr | None
) -> SpanEnd | None:
    if expr is None:
        return None
    # Of one head the bound is a number, also where decode's rows each know their head.
    number = View(h="head" if traits.head_per_row else "h", by_row=False, dtype="int32")
    first, last = (
        print_mod(
            captures, traits, number._replace(prefix=f"{name}_{row}", q_idx=f"{row}_row"), expr
        )
        for row in ("first", "last")
    )
    return SpanEnd((*first.hoisted, *last.hoisted), first.result, last.result, part is not None)


class PrintedEdge(NamedTuple):
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
    def is_affine(self) -> bool:
        """True if the bound is a number for each query, whatever the request and captures are."""
        return self.rest == "0"

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
            printed = print_mod(captures, traits, expr=edge.rest)
            statements, text = (*printed.hoisted, *printed.early), printed.result
        found.append(PrintedEdge(edge.lowest, edge.slope, edge.offset, statements, text))
    return tuple(found)


class KeyBounds(NamedTuple):
    """Edges of the keys that a mask_mod keeps, of those that it keeps of all rows, and of a gap of
    keys that it does not keep. The last two are None if nothing is known of such keys."""

    kept: tuple[PrintedEdge, ...] = ()
    free: tuple[PrintedEdge, ...] | None = None
    gap: tuple[PrintedEdge, ...] | None = None


def print_key_bounds(captures: Captures | None, traits: Traits) -> KeyBounds:
    """The bounds of a mask_mod; none where there is no mask_mod."""
    if captures is None:
        return KeyBounds()
    form = mask_form(captures.mod.expr, INDEX_RANGES)
    free, gap = (
        None if each is None else print_edges(captures, each, traits)
        for each in (form.free_edges, form.gap_edges)
    )
    return KeyBounds(print_edges(captures, form.edges, traits), free, gap)
