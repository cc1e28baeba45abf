"""A mask_mod as the selections of an NKI kernel: its conjuncts, each in its cheapest form.

range: keys against two bounds of their row, by range_select, which gives the row's maximum too.
affine: a linear function of row and key against zero, by affine_select. All that remains is
computed as a tile of zeros and ones, and selected by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexattn.kernels.nki.ops import BINARY, MIRRORED
from flexattn.kernels.nki.printer import NkiPrinter, python_of
from flexattn.kernels.nki.tables import Affine, Table, affine_forms, tabulate
from flexattn.mods import Mod
from flexattn.mods.expr import Expr, walk

__all__ = ["MaskForm", "PrintedMask", "print_mask"]

MaskForm = Literal["range", "affine", "select"]
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


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


@dataclass(frozen=True, slots=True)
class _Bound:
    """kv_idx compared with what a row has of its own."""

    op: str
    value: Expr


def print_mask(
    mod: Mod, form: MaskForm, printer: NkiPrinter, target: str
) -> tuple[PrintedMask, tuple[Table, ...]]:
    """The mask's instructions, and the tables that they read.

    Raises UnsupportedError naming the operation and the target for what cannot be expressed.
    """
    bounds: list[_Bound] = []
    affine: list[tuple[str, Affine]] = []
    rest: list[Expr] = []
    for part in _conjuncts(mod.expr):
        bound = _bound(part) if form == "range" else None
        straight = _straight(part, printer.packed) if form == "affine" else None
        if bound is not None:
            bounds.append(bound)
        elif straight is not None:
            affine.append(straight)
        else:
            rest.append(part)
    whole = tuple(rest[:1])
    for part in rest[1:]:
        whole = (Expr("and", "bool", (whole[0], part)),)
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
    straight_select = _affine_select_turned if printer.pools.keys_first else _affine_select
    selections = [straight_select(op, form_) for op, form_ in affine]
    columns = []
    for bound, value in zip(bounds, cut.parts[len(whole) :], strict=True):
        columns.append((bound.op, printer.as_column(printer.print(value, cut.tables)).text))
    selections += _range_selects(columns)
    reduces = bool(columns)
    needs_sbuf = bool(whole or affine)
    return PrintedMask(lines, predicate, tuple(selections), reduces, needs_sbuf), cut.tables


def _conjuncts(expr: Expr) -> list[Expr]:
    if expr.op == "and" and expr.dtype == "bool":
        return [part for arg in expr.args for part in _conjuncts(arg)]
    negated = expr.args[0] if expr.op == "not" else None
    if negated is not None and negated.op in _NEGATED:
        return [Expr(_NEGATED[negated.op], "bool", negated.args)]
    return [expr]


def _bound(part: Expr) -> _Bound | None:
    """`kv_idx op row's value` where the comparison can be written so."""
    if part.op not in _NEGATED:
        return None
    left, right = part.args
    names = [{str(node.value) for node in walk(side) if node.op == "var"} for side in part.args]
    forms = affine_forms((left, right))
    for side, other, op in ((0, 1, part.op), (1, 0, MIRRORED[part.op])):
        form = forms.get(part.args[side])
        if form is None or abs(form.kv) != 1 or "kv_idx" in names[other]:
            continue
        op = op if form.kv == 1 else MIRRORED[op]
        return _Bound(op, _solved(form, part.args[other]))
    one, two = forms.get(left), forms.get(right)
    if one is None or two is None or abs(one.kv - two.kv) != 1:
        return None
    # Both sides move with the key: a - b op 0 is kv_idx op whatever else there is.
    sign = one.kv - two.kv
    op = part.op if sign == 1 else MIRRORED[part.op]
    rest = _expr(Affine(two.q - one.q, 0, two.rest), one.rest)
    return _Bound(op, rest if sign == 1 else Expr("neg", "int64", (rest,)))


def _solved(form: Affine, other: Expr) -> Expr:
    """What kv_idx is compared with: (other - all of the form but its key), by the key's sign."""
    parts = _expr(Affine(-form.q, 0, None), form.rest)
    value = Expr("add", "int64", (other, parts)) if form.q or form.rest is not None else other
    return value if form.kv == 1 else Expr("neg", "int64", (value,))


def _expr(form: Affine, minus: Expr | None) -> Expr:
    """q * q_idx + rest - minus, as an expression."""
    q_idx = Expr("var", "int64", (), "q_idx")
    value = Expr("mul", "int64", (q_idx, Expr("const", "int64", (), form.q)))
    value = q_idx if form.q == 1 else value
    if form.q == 0:
        value = Expr("const", "int64", (), 0)
    if form.rest is not None:
        value = form.rest if form.q == 0 else Expr("add", "int64", (value, form.rest))
    return value if minus is None else Expr("sub", "int64", (value, minus))


def _straight(part: Expr, packed: bool) -> tuple[str, Affine] | None:
    """`linear function of row and key op 0`; packed rows are no linear function of positions."""
    if part.op not in (*_NEGATED, "eq"):
        return None
    left, right = part.args
    forms = affine_forms((left, right))
    one, two = forms.get(left), forms.get(right)
    if one is None or two is None:
        return None
    difference = Expr("sub", "int64", (left, right))
    form = affine_forms((difference,)).get(difference)
    if form is None or (packed and (form.q != 0 or "h" in _names(form.rest))):
        return None
    return part.op, form


def _names(expr: Expr | None) -> set[str]:
    if expr is None:
        return set()
    return {str(node.value) for node in walk(expr) if node.op == "var"}


def _affine_select(op: str, form: Affine) -> str:
    rest = "0" if form.rest is None else python_of(form.rest, "mask")
    return (
        f"nisa.affine_select(dst=s[:rows, turn, :cols], pattern=[[{form.kv}, cols]], "
        f"channel_multiplier={form.q}, on_true_tile=x, on_false_value=FP32_MIN, "
        f"cmp_op=nl.{BINARY[op]}, offset={form.q} * q0 + {form.kv} * k0 + {rest})"
    )


def _affine_select_turned(op: str, form: Affine) -> str:
    rest = "0" if form.rest is None else python_of(form.rest, "mask")
    return (
        f"nisa.affine_select(dst=s[:keys, turn, :count, :rows], "
        f"pattern=[[{form.kv} * keys, count], [{form.q}, rows]], "
        f"channel_multiplier={form.kv}, on_true_tile=x, on_false_value=FP32_MIN, "
        f"cmp_op=nl.{BINARY[op]}, offset={form.q} * q0 + {form.kv} * k0 + {rest})"
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
