"""Which parts of a mod become tables before an NKI kernel runs, and what is left for the chip.

NKI engines cannot gather by a computed index: a captured tensor is read by DMA, along rows, keys
or the difference of the two. What a mod loads, and what depends on rows alone or keys alone, is
therefore evaluated on the host, into a table that the kernel reads in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexattn.errors import UnsupportedError
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Bound, Mod
from flexattn.mods.analysis.affine import Affine, affine_forms
from flexattn.mods.expr import Expr, const, reads, walk
from flexattn.mods.numbers import number_of
from flexattn.mods.ops import is_float, is_int
from flexattn.mods.simplify import rebuilt
from flexattn.mods.site import interned
from flexattn.neuron.emit import ON_CHIP
from flexattn.problem import INDEX_RANGES, Problem

# Integers of tables are at most this, so that sums of a few stay exact; checked as they are made.
TABLE_LIMIT = 2**22
# A table for every pair of row and key may have so many elements: 256 MiB of float32.
MOST_ELEMENTS = 2**26
TableKind = Literal["uniform", "row", "key", "relative", "pair"]
# What engines compute on whole tiles.
_ON_CHIP = ON_CHIP | {"cast"}
# What Python computes when a kernel is specialised.
STATIC = frozenset("add sub mul neg floor_div floor_mod".split())


@dataclass(frozen=True, slots=True)
class NkiTable:
    """An expression that is evaluated on the host for every index it depends on.

    kind: uniform [B, H], row [B, H, L], key [B, H, S], relative [B, H, over kv_idx - q_idx] or
    pair [B, H, L, S]; B and H are 1 where it does not depend on them. name: the kernel's argument.
    """

    name: str
    kind: TableKind
    mod: Mod
    per_batch: bool
    per_head: bool


@dataclass(frozen=True, slots=True)
class Tabulated:
    """Parts of a mod, with a `table` node, by name, for each that became one."""

    parts: tuple[Expr, ...]
    tables: tuple[NkiTable, ...]


def tabulate(mod: Mod, parts: tuple[Expr, ...], target: str, packed: bool) -> Tabulated:
    """Cut parts of a mod into tables and what the engines compute.

    packed: query heads lie along the rows, as in decode, so `h` is a row's. Raises
    UnsupportedError naming the operation and the target where neither can take a node.
    """
    cutter = _Cutter(mod, parts, target, packed)
    return Tabulated(tuple(map(cutter.cut, parts)), tuple(cutter.tables))


def linear_forms(parts: tuple[Expr, ...], packed: bool) -> dict[Expr, Affine]:
    """The integer nodes that are linear in a tile's rows and keys; packed: as of `tabulate`."""
    found = affine_forms(parts, INDEX_RANGES)
    return {node: form for node, form in found.items() if is_linear(form, packed)}


def is_linear(form: Affine, packed: bool) -> bool:
    """True where Python knows all of a form but rows and keys, and it has no packed rows."""
    if form.rest is None:
        return not (packed and form.q)
    return is_static(form.rest) and not (packed and (form.q or reads(form.rest, "h")))


def is_static(node: Expr) -> bool:
    """True where Python knows a node's value when the kernel is specialised."""
    nodes = walk(node, enter=lambda each: each.op in STATIC and not _is_given(each))
    return all(each.op in STATIC or _is_given(each) for each in nodes)


def _is_given(node: Expr) -> bool:
    if node.op in ("const", "scalar") or (node.op == "var" and node.value in ("b", "h")):
        return True
    return number_of(node) is not None


class _Cutter:
    def __init__(self, mod: Mod, parts: tuple[Expr, ...], target: str, packed: bool) -> None:
        self.mod, self.target, self.packed = mod, target, packed
        self.tables: list[NkiTable] = []
        self.made: dict[Expr, Expr] = {}
        self.relative: dict[Expr, bool] = {}
        self.affine = forms = linear_forms(parts, packed)
        for node in walk(*parts):
            form = forms.get(node)
            inner = all(self.relative[arg] for arg in node.args)
            position = node.op == "var" and node.value in ("q_idx", "kv_idx")
            self.relative[node] = form.relative if form else inner and not position

    def cut(self, node: Expr) -> Expr:
        made = self.made
        for each in walk(node, enter=lambda each: each not in made and self._form(each) == "cut"):
            if each not in made:
                made[each] = self._new(each, self._form(each))
        return made[node]

    def _form(self, node: Expr) -> TableKind | Literal["kept", "cut"]:
        """The fate of a node: a kind of table, "kept" as it is, or made of "cut" operands."""
        if node.op in ("const", "scalar") or (node.op == "var" and node.value == "score"):
            return "kept"
        names = node.variables
        if (node.op == "cast" and _keeps(node)) or "score" in names:
            return "cut"
        if self._easy(node):
            return "kept"
        kind = self._kind(names)
        if kind in ("uniform", "row", "key"):
            return kind
        if node.op == "load" or node.op not in _ON_CHIP:
            return "relative" if self.relative[node] and not self.packed else "pair"
        return "cut"

    def _new(self, node: Expr, form: TableKind | Literal["kept", "cut"]) -> Expr:
        if form == "kept":
            return node
        if form != "cut":
            return self._table(node, form)
        if node.op == "cast" and _keeps(node):
            return self.made[node.args[0]]
        if "score" in node.variables:
            self._check_on_chip(node)
        return Expr(node.op, node.dtype, tuple(self.made[arg] for arg in node.args), node.value)

    def _kind(self, names: frozenset[str]) -> TableKind:
        """By what varies within a tile: rows, keys, both or neither."""
        rows = bool(names & ({"q_idx", "h"} if self.packed else {"q_idx"}))
        if "kv_idx" in names:
            return "pair" if rows else "key"
        return "row" if rows else "uniform"

    def _easy(self, node: Expr) -> bool:
        """True of what costs an iota or nothing: affine indices, and numbers that Python knows."""
        return node in self.affine or (
            is_static(node) and not (self.packed and "h" in node.variables)
        )

    def _table(self, node: Expr, kind: TableKind) -> Expr:
        name = f"{self.mod.kind}_t{len(self.tables)}"
        mod = self.mod
        part = interned(mod.kind, node, mod.buffers, mod.scalars)
        names = node.variables
        head = "h" in names or (self.packed and kind in ("row", "pair"))
        self.tables.append(NkiTable(name, kind, part, "b" in names, head))
        return Expr("table", node.dtype, (), name)

    def _check_on_chip(self, node: Expr) -> None:
        if node.op not in _ON_CHIP:
            raise UnsupportedError(
                f"{node.op} of {node.dtype}, on the score",
                f"no engine of {self.target} computes it",
                "write it with exp, log, tanh, sigmoid, erf or arithmetic",
            )


def _keeps(node: Expr) -> bool:
    """A cast that changes no value on engines that compute in float32 whatever the dtype."""
    source, target = node.args[0].dtype, node.dtype
    wide = ("float32", "float64")
    if target == "bool":
        return source == "bool"
    if is_int(target):
        return is_int(source) or source == "bool"
    return target in wide


def make_table(table: NkiTable, bound: Bound, problem: Problem, rows: int, target: str) -> Tensor:
    """The values of a table, [B or 1, H or 1, n], n by its kind.

    rows: BLOCK_M, over which a relative table repeats. Raises UnsupportedError where it would be
    too large, or holds integers that float32 does not.
    """
    packed = problem.structure.kind == "decode"
    B = problem.B if table.per_batch else 1
    H = problem.Hq if table.per_head or (packed and table.kind in ("row", "pair")) else 1
    L, S = problem.q_len, problem.kv_len
    env = {
        "b": torch.arange(B)[:, None, None, None],
        "h": torch.arange(H)[None, :, None, None],
        "q_idx": torch.arange(L)[None, None, :, None],
        "kv_idx": torch.arange(S)[None, None, None, :],
    }
    kinds = {
        "uniform": (1, 1), "row": (L, 1), "key": (1, S), "relative": (1, L + S - 1),
        "pair": (L, S),
    }  # fmt: skip
    sizes = kinds[table.kind]
    lanes = sizes[0] * sizes[1] * (rows if table.kind == "relative" else 1)
    if B * H * lanes > MOST_ELEMENTS:
        raise UnsupportedError(
            f"{_load(table.mod.expr)} as a table of {B} x {H} x {lanes} elements",
            f"{target} reads what depends on both q_idx and kv_idx from a table of at most "
            f"{MOST_ELEMENTS}",
            "write it as a function of q_idx - kv_idx, or of each alone",
        )
    mod = table.mod
    if table.kind == "relative":
        # A function of kv_idx - q_idx alone is what it is at q_idx = L - 1, moved.
        mod = _shifted(mod, L - 1)
        env["kv_idx"] = torch.arange(L + S - 1)[None, None, None, :]
    values = evaluate(mod, env, bound.tensors, bound.scalars)
    if (
        not is_float(mod.expr.dtype)
        and values.numel()
        and int(values.abs().max() if values.dtype != torch.bool else 1) > TABLE_LIMIT
    ):
        raise UnsupportedError(
            f"{_load(table.mod.expr)}, which reaches {int(values.abs().max())}",
            f"{target} computes in float32: integers of a table are at most {TABLE_LIMIT}",
            "number documents and the like from 0",
        )
    kept = values.dtype if values.dtype in (torch.bfloat16, torch.float16) else torch.float32
    values = values.to(kept).expand(B, H, *sizes)
    if packed and table.kind in ("row", "pair"):
        heads = problem.structure.packed_heads
        values = values.reshape(B, H // heads, heads * L, -1)
    if table.kind == "pair":
        return values.contiguous()
    if table.kind == "relative":
        return values.reshape(B, H, -1).repeat(1, 1, rows).contiguous()
    return values.reshape(*values.shape[:2], -1).contiguous()


def _shifted(mod: Mod, zero: int) -> Mod:
    query, position = Expr("var", "int64", (), "q_idx"), const(zero, "int64")
    expr = rebuilt(mod.expr, lambda node, _: position if node is query else None)
    return interned(mod.kind, expr, mod.buffers, mod.scalars)


def _load(expr: Expr) -> str:
    op = next((node.op for node in walk(expr) if node.op == "load"), expr.op)
    return f"{op} of {expr.dtype}"
