"""NkiSource: a rendered NKI kernel, with the tables it reads and what it takes of the chip.

A mask_mod is selections, its conjuncts each in its cheapest form. range: keys against two bounds
of their row, by range_select, which gives the row's maximum too. affine: a linear function of row
and key against zero, by affine_select. All that remains is computed as a tile of zeros and ones,
and selected by that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexattn.errors import UnsupportedError
from flexattn.kernels.base.config import describe, values
from flexattn.kernels.base.environment import render_tidy, template_hash
from flexattn.mods.analysis.affine import Affine
from flexattn.mods.analysis.mask_form import conjunction, mask_form
from flexattn.mods.expr import Mod, in_a_line
from flexattn.neuron.config import (
    MaskSelect,
    NkiConfig,
    shape_of,
)
from flexattn.neuron.emit import BINARY, NkiValue, Pools
from flexattn.neuron.printer import NkiPrinter, offset_of
from flexattn.neuron.tables import NkiTable, is_linear, tabulate
from flexattn.problem import INDEX_RANGES, Captures, Problem, Structure


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
    selections = [_affine_select(each.op, each.form) for each in affine]
    columns = []
    for bound, value in zip(bounds, cut.parts[len(whole) :], strict=True):
        columns.append((bound.op, printer.as_column(printer.print(value, cut.tables)).text))
    selections += _range_selects(columns)
    reduces = bool(columns)
    needs_sbuf = bool(whole or affine)
    return PrintedMask(lines, predicate, tuple(selections), reduces, needs_sbuf), cut.tables


def _affine_select(op: str, form: Affine) -> str:
    return (
        f"nisa.affine_select(dst=s[:rows, turn, :cols], pattern=[[{form.kv}, cols]], "
        f"channel_multiplier={form.q}, on_true_tile=x, on_false_value=FP32_MIN, "
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


# In the order in which the kernel allocates them: name, dtype, whether it is a tile.
_POOLS = (
    ("tile_f32", "float32", True),
    ("tile_bf16", "bfloat16", True),
    ("tile_f16", "float16", True),
    ("tile_i32", "int32", True),
    ("tile_u8", "uint8", True),
    ("column", "float32", False),
    ("column_i32", "int32", False),
)


@dataclass(frozen=True, slots=True)
class NkiSource:
    """A kernel's text and what its caller must give it.

    arguments: q, k, v, scale, schedule, then the tables and the captured numbers by name. tiles:
    of each pool that the mods need. results: "out" and the statistics, in the kernel's order.
    """

    text: str
    hash: str
    arguments: tuple[str, ...]
    tables: tuple[NkiTable, ...]
    tiles: tuple[tuple[str, int], ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Score:
    body: tuple[str, ...]
    result: str


@dataclass(frozen=True, slots=True)
class NkiMods:
    """The mods of one problem in one form, printed."""

    score: _Score | None
    mask: PrintedMask | None
    hoisted: tuple[str, ...]
    tables: tuple[NkiTable, ...]
    tiles: dict[str, int]


def print_mods(problem: Problem, config: NkiConfig, target: str) -> NkiMods:
    """Both mods as instructions over one set of tiles.

    Raises UnsupportedError naming the operation and the target for what cannot be expressed.
    """
    structure = problem.structure
    if structure.sinks:
        raise UnsupportedError(
            f"sinks on {target}",
            "kernels for Neuron have no sinks",
            "leave them out, and rescale out by sigmoid(lse - sink)",
        )
    if structure.fp8:
        raise UnsupportedError(
            f"float8_e4m3fn on {target}",
            "kernels for Neuron multiply float16, bfloat16 and float32",
            "multiply q, k and v by their descales and pass them in bfloat16",
        )
    packed = structure.kind == "decode"
    lengths = (problem.q_len, problem.kv_len)
    pools = Pools()
    printer = NkiPrinter(target, lengths, packed, pools)
    tables: list[NkiTable] = []
    score = _print_score(structure.score, printer, tables)
    if score is None and not structure.positive_scale:
        score = _Score((), _scores(pools).text)
    mask = None
    if structure.mask is not None:
        printer.body = []
        mask, found = print_nki_mask(structure.mask.mod, config.mask, printer, target)
        tables += found
    tiles = dict(pools.used)
    if score is not None or (mask is not None and (mask.needs_sbuf or mask.selections)):
        tiles["s"] = 1
    if mask is not None and mask.predicate:
        tiles["keep"] = 1
    return NkiMods(score, mask, tuple(printer.hoisted), tuple(tables), tiles)


def _print_score(
    captures: Captures | None, printer: NkiPrinter, tables: list[NkiTable]
) -> _Score | None:
    if captures is None:
        return None
    mod = captures.mod
    cut = tabulate(mod, (mod.expr,), printer.target, printer.packed)
    tables += cut.tables
    printer.prefix = mod.kind
    printed = printer.print(cut.parts[0], cut.tables, _scores(printer.pools))
    value = printer.as_tile(printed)
    return _Score(tuple(printer.body), value.text)


def _scores(pools: Pools) -> NkiValue:
    return NkiValue("tile", f"s{pools.tile('turn')}")


def render_nki(problem: Problem, config: NkiConfig, target: str, title: str) -> NkiSource:
    """The prefill or decode kernel of a problem for a target such as "trn2"."""
    structure = problem.structure
    shape = shape_of(problem, config)
    mods = print_mods(problem, config, target)
    name = f"nki/{structure.kind}.py.jinja"
    results = ["out", *["lse"] * structure.lse, *["max_scores"] * structure.max_scores]
    split = config.num_splits > 1
    if split:
        results = ["partial", "maxima", "sums"]
    both = ("score", structure.score), ("mask", structure.mask)
    named = [(kind, captures) for kind, captures in both if captures is not None]
    scalars = [
        f"{kind}_scalar{slot}" for kind, each in named for slot in range(len(each.mod.scalars))
    ]
    arguments = ("q", "k", "v", "scale", "schedule", *(t.name for t in mods.tables), *scalars)
    element = "nl.bfloat16" if config.mixed else "q.dtype"
    lines = [*mods.hoisted, *(mods.score.body if mods.score else ())]
    if mods.mask is not None:
        lines += [*mods.mask.lines, *mods.mask.selections]
    header = [title, f"config: {describe(config)}"]
    header += [f"{kind}_mod: {in_a_line(each.mod.expr)}" for kind, each in named]
    header += [f"{table.name}: {table.kind} {in_a_line(table.mod.expr)}" for table in mods.tables]
    header.append(f"template: {name} {template_hash(name)}, for {target}")
    context = {
        **values(config),
        **values(shape),
        "header": "\n".join(f"# {line}" for line in header),
        "arguments": arguments,
        "results": results,
        "element": element,
        "out_element": "q.dtype",
        "head_dim_qk": structure.head_dim_qk,
        "head_dim_v": structure.head_dim_v,
        "value_width": shape.value_width,
        "score_width": -(-config.BLOCK_N // 512) * 512,
        "pools": _allocations(mods.tiles, config.BLOCK_N),
        "needs_s": "s" in mods.tiles,
        "score": mods.score,
        "mask": mods.mask,
        "hoisted": mods.hoisted,
        "factor": "1.0" if mods.score else "scale",
        "infinite": any("INFINITY" in line for line in lines),
        "relative": any(table.kind == "relative" for table in mods.tables),
        "split": split,
        "num_splits": config.num_splits,
    }
    tiles = tuple(sorted(mods.tiles.items()))
    return _rendered(name, context, structure, arguments, mods.tables, tiles, tuple(results))


def render_nki_combine(problem: Problem, target: str) -> NkiSource:
    """The kernel that merges the splits of a decode kernel."""
    structure, name = problem.structure, "nki/combine.py.jinja"
    results = ("out", *["lse"] * structure.lse, *["max_scores"] * structure.max_scores)
    lines = (f"combine for {problem.describe()}", f"template: {name} {template_hash(name)}")
    context = {
        "header": "\n".join(f"# {line}, for {target}" for line in lines),
        "results": results,
    }
    arguments = "q", "partial", "maxima", "sums"
    return _rendered(name, context, structure, arguments, (), (), results)


def _rendered(
    name: str, context: Mapping[str, object], structure: Structure, *rest: Any
) -> NkiSource:
    """rest: the fields of NkiSource behind its hash."""
    statistics = {"lse": structure.lse, "max_scores": structure.max_scores}
    text = render_tidy(name, {**context, **statistics})
    digest = hashlib.sha256(text[text.index("import nki") :].encode()).hexdigest()
    return NkiSource(text, digest, *rest)


def _allocations(tiles: dict[str, int], width: int) -> list[tuple[str, str, int, int]]:
    found = []
    for name, dtype, wide in _POOLS:
        if tiles.get(name):
            plural = {"column": "columns", "column_i32": "columns_i32"}.get(name, name)
            found.append((plural, dtype, tiles[name], width if wide else 0))
    return found
