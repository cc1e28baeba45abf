"""NkiSource: a rendered NKI kernel, with the tables it reads and what it takes of the chip."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from flexattn.errors import UnsupportedError
from flexattn.kernels.base.config import describe, values
from flexattn.kernels.base.environment import render_template, template_hash
from flexattn.mods.expr import Mod, pretty
from flexattn.neuron.config import (
    NkiConfig,
    NkiShape,
    shape_of,
)
from flexattn.neuron.emit import NkiValue, Pools
from flexattn.neuron.masks import PrintedMask, print_nki_mask
from flexattn.neuron.printer import NkiPrinter
from flexattn.neuron.tables import NkiTable, tabulate
from flexattn.problem import Captures, Problem

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
    pools = Pools(keys_first=config.form == "st")
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
    header += [f"{kind}_mod: {_one_line(each.mod)}" for kind, each in named]
    header += [f"{table.name}: {table.kind} {_one_line(table.mod)}" for table in mods.tables]
    header.append(f"template: {name} {template_hash(name)}, for {target}")
    context: dict[str, object] = {
        **values(config),
        **values(shape),
        "header": "\n".join(f"# {line}" for line in header),
        "arguments": arguments,
        "results": results,
        "element": element,
        "out_element": "q.dtype",
        "head_dim_qk": structure.head_dim_qk,
        "head_dim_v": structure.head_dim_v,
        "view": Pools(keys_first=config.form == "st").tile("turn"),
        "reference": f"nl.{shape.reference}",
        "value_width": shape.value_width,
        "score_width": -(-config.BLOCK_N // 512) * 512,
        "evict_engine": config.evict,
        "pools": _allocations(mods.tiles, _extent(config, shape)),
        "extent": _extent(config, shape),
        "needs_s": "s" in mods.tiles,
        "score": mods.score,
        "mask": mods.mask,
        "hoisted": mods.hoisted,
        "factor": "1.0" if mods.score else "scale",
        "infinite": any("INFINITY" in line for line in lines),
        "relative": any(table.kind == "relative" for table in mods.tables),
        "split": split,
        "num_splits": config.num_splits,
        "lse": structure.lse,
        "max_scores": structure.max_scores,
    }
    text = _tidy(render_template(name, context))
    body = text[text.index("import nki") :]
    digest = hashlib.sha256(body.encode()).hexdigest()
    tiles = tuple(sorted(mods.tiles.items()))
    return NkiSource(text, digest, arguments, mods.tables, tiles, tuple(results))


def render_nki_combine(problem: Problem, target: str) -> NkiSource:
    """The kernel that merges the splits of a decode kernel."""
    structure, name = problem.structure, "nki/combine.py.jinja"
    results = ("out", *["lse"] * structure.lse, *["max_scores"] * structure.max_scores)
    lines = (f"combine for {problem.describe()}", f"template: {name} {template_hash(name)}")
    context: dict[str, object] = {
        "form": "s",
        "header": "\n".join(f"# {line}, for {target}" for line in lines),
        "results": results,
        "lse": structure.lse,
        "max_scores": structure.max_scores,
    }
    text = _tidy(render_template(name, context))
    digest = hashlib.sha256(text[text.index("import nki") :].encode()).hexdigest()
    return NkiSource(text, digest, ("q", "partial", "maxima", "sums"), (), (), results)


def _extent(config: NkiConfig, shape: NkiShape) -> str:
    """The free dimensions of a tile."""
    if config.form == "st":
        return f"{shape.tile_parts}, {config.BLOCK_M}"
    return str(config.BLOCK_N)


def _allocations(tiles: dict[str, int], extent: str) -> list[tuple[str, str, int, str]]:
    found = []
    for name, dtype, wide in _POOLS:
        if tiles.get(name):
            plural = {"column": "columns", "column_i32": "columns_i32"}.get(name, name)
            found.append((plural, dtype, tiles[name], extent if wide else ""))
    return found


def _one_line(mod: Mod) -> str:
    return pretty(mod.expr).replace("\n", "; ")


def _tidy(text: str) -> str:
    text = "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n") + "\n"
    text = re.sub(r"\n+(\n {4})", r"\1", text)
    return re.sub(r"\n{4,}", "\n\n\n", text)
