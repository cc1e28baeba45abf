"""Mods as Gluon statements: what the Triton printer says of them, in the names of Gluon."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flexattn.kernels.base.features import asked_once
from flexattn.kernels.hopper.config import CONSUMER_ROWS
from flexattn.kernels.printers.score_printer import PrintedScore
from flexattn.kernels.printers.score_printer import print_score as triton_score
from flexattn.kernels.printers.triton_printer import Printed, Traits, View
from flexattn.kernels.printers.triton_printer import print_mod as triton_mod
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.mods.expr import Expr
from flexattn.problem import INDEX_RANGES, Captures, Structure

__all__ = ["MaskPieces", "gluon_text", "print_mask", "print_mod", "print_score"]

# What the Triton printer writes, and what a consumer of ROWS rows calls it.
_LAYOUTS = (
    (r"tl\.zeros\(\[BLOCK_M, BLOCK_N\], (tl\.\w+)\)", r"gl.zeros([ROWS, BLOCK_N], \1, MMA_S)"),
    (r"tl\.zeros\(\[1, BLOCK_N\], (tl\.\w+)\)", r"gl.zeros([1, BLOCK_N], \1, MMA_S)"),
    (r"tl\.zeros\(\[STRIP\], (tl\.\w+)\)", r"gl.zeros([STRIP], \1, IN_A_LINE)"),
    (r"tl\.zeros\(\[BLOCK_M\], (tl\.\w+)\)", r"gl.zeros([ROWS], \1, BY_ROW)"),
    (r"tl\.arange\(0, BLOCK_M\)", "gl.arange(0, ROWS, BY_ROW)"),
    (r"tl\.arange\(0, BLOCK_N\)", "gl.arange(0, BLOCK_N, BY_KEY)"),
    (r"tl\.arange\(0, STRIP\)", "gl.arange(0, STRIP, IN_A_LINE)"),
    (r"\bBLOCK_M\b", "ROWS"),
    # Gluon's zeros_like takes no scalar, which has no layout (Triton 3.6).
    (r"tl\.zeros_like\(a\)", "(a - a)"),
    # A selection behind a condition stays there.
    (r"^( +)qk = tl\.where\((.*)\)$", r"\1qk = stay(gl.where(\2))"),
    (r"\btl\.sigmoid\b", "sigmoid"),
    # Its enumerations have no other name.
    (r"\btl\.(?!PropagateNan)", "gl."),
)


@dataclass(frozen=True, slots=True)
class MaskPieces:
    """A mask_mod as bounds on the keys of a row, and what else it asks.

    low, high: the first key of each row, and one past the last, as columns of int32; None where
    nothing is known. rest: what is asked of keys between them; None where that is nothing.
    first_high, last_low: high of the first row, and low of the last: no other row's high is lower,
    and no other's low is higher. ahead: names of what rest computes on the keys alone, each thread
    for a key of its own, which is then told to all of them; empty where rest reads more than that.
    under: high of first_row, for the loading warp, where the mask keeps all keys below it.
    """

    rest: Printed | None
    low: Printed | None = None
    high: Printed | None = None
    last_low: Printed | None = None
    first_high: Printed | None = None
    ahead: tuple[str, ...] = ()
    under: Printed | None = None

    @property
    def printed(self) -> tuple[Printed, ...]:
        """All of them that there are."""
        every = (self.low, self.high, self.last_low, self.first_high, self.rest)
        return tuple(each for each in every if each is not None)

    @property
    def holds(self) -> bool:
        """Whether more than one bound is held over the loop, or what is asked of single keys."""
        asked = () if self.rest is None else (*self.rest.lines, *self.ahead)
        return self.low is not None or any("kv_idx" in line for line in asked)

    @property
    def in_line(self) -> tuple[str, ...]:
        """Statements of what is ahead, on key_in_line."""
        lines = () if self.rest is None else self.rest.early
        return tuple(re.sub(r"\bkv_idx\b", "key_in_line", line) for line in lines)

    @property
    def hoisted(self) -> tuple[str, ...]:
        """What is computed before the loop over keys."""
        return tuple(line for each in self.printed for line in each.hoisted)

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement, and the results."""
        every = self.printed if self.under is None else (*self.printed, self.under)
        return tuple(line for each in every for line in each.lines)


def print_mask(captures: Captures, traits: Traits, keys: int) -> MaskPieces:
    """A mask_mod in pieces, of which most tiles need one alone; keys: of a tile."""
    form = mask_form(captures.mod.expr, INDEX_RANGES)
    span = form.span

    def piece(name: str, expr: Expr | None, view: View) -> Printed | None:
        if expr is None:
            return None
        view = replace(view, prefix=name)
        mod = replace(captures.mod, expr=expr)
        return _gluon(triton_mod(mod, captures.contiguous, traits, view))

    column = View(dtype="int32")
    first = View(q_idx="row_start", by_row=False, dtype="int32")
    last = replace(first, q_idx="(row_start + ROWS - 1)")
    once = span.rest is not None and asked_once(span.rest, (CONSUMER_ROWS, keys))
    pieces = MaskPieces(
        piece("mask", span.rest, replace(first, kv_idx="start_n", dtype="") if once else View()),
        piece("low", span.low, column),
        piece("high", span.high, column),
        piece("last_low", span.low, last),
        piece("first_high", span.high, first),
    )
    if span.is_prefix:
        of_run = replace(first, q_idx="first_row", by_key=False)
        pieces = replace(pieces, under=piece("under", span.high, of_run))
    return _ahead(pieces) if form.rest_loads_keys_alone and not once else pieces


def _ahead(pieces: MaskPieces) -> MaskPieces:
    """With what rest reads by key alone read before the scores are there."""
    printed = pieces.rest
    assert printed is not None
    text = "\n".join((*printed.body, printed.result))
    made = dict.fromkeys(line.split(" = ")[0] for line in printed.early)
    names = tuple(name for name in made if re.search(rf"\b{name}\b", text))
    body, result = printed.body, printed.result
    for name in names:
        body = tuple(re.sub(rf"\b{name}\b", f"{name}_by_key", line) for line in body)
        result = re.sub(rf"\b{name}\b", f"{name}_by_key", result)
    rest_by_key = replace(printed, body=body, result=result)
    return replace(pieces, rest=rest_by_key, ahead=names)


def print_mod(captures: Captures, traits: Traits) -> Printed:
    """A mask_mod; q_idx is a column and kv_idx a row, in the scores' layout."""
    return _gluon(triton_mod(captures.mod, captures.contiguous, traits))


def print_score(structure: Structure, traits: Traits, watched: bool) -> PrintedScore:
    """The score_mod of a structure that has one, each consumer's rows for themselves.

    watched: the softmax is the one that does what it can of it by itself.
    """
    found = triton_score(structure, traits, even_columns=True, fuses=watched, hands=True)
    return replace(
        found,
        hoisted=_texts(found.hoisted),
        early=_texts(found.early),
        body=_texts(found.body),
        rows=_texts(found.rows),
        limits=None,
    )


def gluon_text(text: str) -> str:
    """Triton's functions by Gluon's names, with the layouts that Gluon wants said."""
    for pattern, replacement in _LAYOUTS:
        text = re.sub(pattern, replacement, text)
    return text


def _gluon(found: Printed) -> Printed:
    return Printed(
        _texts(found.hoisted), _texts(found.early), _texts(found.body), gluon_text(found.result)
    )


def _texts(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(gluon_text(line) for line in lines)
