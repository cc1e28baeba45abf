"""A mask_mod as the selections of an NKI kernel: its conjuncts, each in its cheapest form.

range: keys against two bounds of their row, by range_select, which gives the row's maximum too.
affine: a linear function of row and key against zero, by affine_select. All that remains is
computed as a tile of zeros and ones, and selected by that.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.mods import Mod
from flexattn.mods.analysis.affine import Affine
from flexattn.mods.analysis.mask_form import conjunction, mask_form
from flexattn.neuron.config import MaskSelect
from flexattn.neuron.emit import BINARY
from flexattn.neuron.printer import NkiPrinter, offset_of
from flexattn.neuron.tables import NkiTable, is_linear, tabulate
from flexattn.problem import INDEX_RANGES


@dataclass(frozen=True, slots=True)
class PrintedMask:
    """A mask's instructions; each leaves the scores in `x`, FP32_MIN where the mask removes them.

    predicate: of a tile in `keep`, computed first; "" if none is needed. selections: affine_select
    and range_select calls, on `x` and into `s`. reduces: the last one leaves the maximum in `top`.
    needs_sbuf: the first of them cannot read PSUM.
    """

    lines: tuple[str, ...]
    predicate: str
    selections: tuple[str, ...]
    reduces: bool
    needs_sbuf: bool


def print_nki_mask(
    mod: Mod, select: MaskSelect, printer: NkiPrinter, target: str
) -> tuple[PrintedMask, tuple[NkiTable, ...]]:
    """The mask's instructions, and the tables that they read.

    Raises UnsupportedError naming the operation and the target for what cannot be expressed.
    """
    bounds, affine, rest = [], [], []
    for term in mask_form(mod.expr, INDEX_RANGES).terms:
        bound, linear = term.bound, term.affine
        if select == "range" and bound is not None:
            bounds.append(bound)
        elif select == "affine" and linear is not None and is_linear(linear.form, printer.packed):
            affine.append(linear)
        else:
            rest.append(term.expr)
    joined = conjunction(rest)
    whole = () if joined is None else (joined,)
    cut = tabulate(mod, (*whole, *(each.value for each in bounds)), target, printer.packed)
    printer.prefix = mod.kind
    begin = len(printer.body)
    predicate = ""
    if whole:
        kept = printer.print(cut.parts[0], cut.tables)
        predicate = f"keep{printer.pools.tile()}"
        printer.body += _as_predicate(predicate, kept.place, kept.text)
        printer.pools.give(kept)
    lines = tuple(printer.body[begin:])
    del printer.body[begin:]
    keys_first = printer.pools.keys_first
    selections = [_affine_select(each.op, each.form, keys_first) for each in affine]
    columns = []
    for bound, value in zip(bounds, cut.parts[len(whole) :], strict=True):
        columns.append((bound.op, printer.as_column(printer.print(value, cut.tables)).text))
    selections += _range_selects(columns)
    reduces = bool(columns)
    needs_sbuf = bool(whole or affine)
    return PrintedMask(lines, predicate, tuple(selections), reduces, needs_sbuf), cut.tables


def _affine_select(op: str, form: Affine, keys_first: bool) -> str:
    tile, pattern, partition = "[:rows, turn, :cols]", f"[[{form.kv}, cols]]", form.q
    if keys_first:
        tile, partition = "[:keys, turn, :count, :rows]", form.kv
        pattern = f"[[{form.kv} * keys, count], [{form.q}, rows]]"
    return (
        f"nisa.affine_select(dst=s{tile}, pattern={pattern}, "
        f"channel_multiplier={partition}, on_true_tile=x, on_false_value=FP32_MIN, "
        f"cmp_op=nl.{BINARY[op]}, offset={offset_of(form, 'mask')})"
    )


def _range_selects(columns: list[tuple[str, str]]) -> list[str]:
    """Two bounds to a call; an odd one is compared twice."""
    calls = []
    for place in range(0, len(columns), 2):
        pair = columns[place : place + 2]
        (op0, bound0), (op1, bound1) = pair[0], pair[-1]
        calls.append(
            f"nisa.range_select(dst=s[:rows, turn, :cols], on_true_tile=x, "
            f"comp_op0=nl.{BINARY[op0]}, comp_op1=nl.{BINARY[op1]}, bound0={bound0}, "
            f"bound1={bound1}, reduce_cmd=nisa.reduce_cmd.reset_reduce, "
            f"reduce_res=top, reduce_op=nl.maximum, range_start=k0, "
            f"on_false_value=FP32_MIN)"
        )
    return calls


def _as_predicate(keep: str, place: str, text: str) -> list[str]:
    """Write a truth value of any place into the tile that is kept."""
    if place == "tile":
        return [f"nisa.tensor_copy(dst={keep}, src={text}, engine=nisa.engine.vector)"]
    if place == "static":
        return [f"nisa.memset(dst={keep}, value={text})"]
    spread = f"nisa.tensor_scalar(dst={keep}, data={keep}, op0=nl.add, operand0={text})"
    return [f"nisa.memset(dst={keep}, value=0)", spread]
