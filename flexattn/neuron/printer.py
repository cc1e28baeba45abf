"""Print an Expr as NKI instructions: one a line, on tiles of the score's shape and on columns.

A tile is [rows, cols]: query rows on the partitions, keys along the free dimension. What depends
on rows alone is a column, [rows, 1], made once for all keys. Engines compute in float32, so
integers are exact below 2^24; the printer refuses what could pass that.
"""

from __future__ import annotations

import math
from collections import Counter

from flexattn.errors import UnsupportedError
from flexattn.mods.analysis.affine import Affine
from flexattn.mods.analysis.intervals import intervals_of
from flexattn.mods.expr import Expr, reads, walk
from flexattn.mods.numbers import number_of
from flexattn.mods.ops import OPS, Range, is_int
from flexattn.neuron.emit import ACTIVATIONS, BINARY, ON_CHIP, ZERO, NkiEmitter, NkiValue, Pools
from flexattn.neuron.tables import TABLE_LIMIT, NkiTable, is_static, linear_forms

# Integers that float32 holds exactly.
_EXACT = 2**24
_HALF_POOLS = {"bfloat16": "tile_bf16", "float16": "tile_f16"}
# Characters of the text of one compile-time number, which nests by five of them.
_LONGEST = 500


class NkiPrinter(NkiEmitter):
    """Prints parts of mods that share one kernel's memory.

    lengths: of q and kv, which bound the indices. packed: rows are query heads and positions.
    """

    def __init__(self, target: str, lengths: tuple[int, int], packed: bool, pools: Pools) -> None:
        super().__init__(target, pools)
        self.lengths, self.packed = lengths, packed
        self.uses: Counter[Expr] = Counter()
        self.values: dict[Expr, NkiValue] = {}
        self.kept: set[Expr] = set()
        self.tables: dict[str, NkiTable] = {}
        self.prefix = ""

    def print(
        self, expr: Expr, tables: tuple[NkiTable, ...], score: NkiValue | None = None
    ) -> NkiValue:
        """Instructions for an expression; the value lies where the result says.

        score: what the variable `score` is. The result of a part may share a sub-expression with
        an earlier one only if that was a column.
        """
        self.tables |= {table.name: table for table in tables}
        nodes = list(walk(expr))
        self.ranges = self._bounds(expr)
        self.affine = linear_forms((expr,), self.packed)
        self.uses = Counter(arg for node in nodes for arg in node.args)
        self.uses[expr] += 1
        self.values = {node: value for node, value in self.values.items() if node in self.kept}
        if score is not None:
            self.values[Expr("var", "float32", (), "score")] = score
        return self._value(expr)

    def as_tile(self, value: NkiValue) -> NkiValue:
        """The value as a tile, for a score_mod whose result is the same for all keys of a row."""
        if value.place == "tile":
            return value
        tile = self.pools.take("tile_f32")
        self.fill(tile, value)
        return tile

    def as_column(self, value: NkiValue) -> NkiValue:
        """The value as a column; it is a number or a column."""
        if value.place == "column":
            return value
        column = self.pools.take("column")
        self.fill(column, value)
        return column

    def _bounds(self, expr: Expr) -> dict[Expr, Range | None]:
        """Which integers each node can be; those of tables and numbers are checked at a call."""
        q_len, kv_len = self.lengths
        ranges = {
            "b": (0, 2**16), "h": (0, 2**16),
            "q_idx": (0, max(q_len - 1, 0)), "kv_idx": (0, max(kv_len - 1, 0)),
        }  # fmt: skip
        known: dict[Expr, Expr] = {}
        for node in walk(expr):
            args = tuple(known[arg] for arg in node.args)
            known[node] = Expr(node.op, node.dtype, args, node.value)
            if node.op in ("table", "scalar") and is_int(node.dtype):
                inside = (-TABLE_LIMIT, TABLE_LIMIT)
                if node.op == "table":
                    source = self.tables[str(node.value)].mod.expr
                    inside = intervals_of(source, ranges)[source] or inside
                low, high = max(inside[0], -TABLE_LIMIT), min(inside[1], TABLE_LIMIT)
                for op, limit in (("maximum", low), ("minimum", high)):
                    bound = Expr("const", node.dtype, (), limit)
                    known[node] = Expr(op, node.dtype, (known[node], bound))
        found = intervals_of(known[expr], ranges)
        return {node: found[twin] for node, twin in known.items()}

    def _value(self, expr: Expr) -> NkiValue:
        for node in walk(expr, enter=lambda node: not (node in self.values or self._whole(node))):
            if node not in self.values:
                value = self.values[node] = self._made(node)
                if value.place != "tile":
                    self.kept.add(node)
        return self.values[expr]

    def _static(self, node: Expr) -> bool:
        return is_static(node) and not (self.packed and reads(node, "h"))

    def _whole(self, node: Expr) -> bool:
        """True of a value that is made at once, and not of its operands."""
        return node.op == "table" or node in self.affine or self._static(node)

    def _made(self, node: Expr) -> NkiValue:
        if self._static(node):
            return NkiValue("static", python_of(node, self.prefix))
        if node.op == "table":
            return self._loaded(self.tables[str(node.value)])
        if is_int(node.dtype):
            self._check_exact(node)
        if node in self.affine:
            return self._iota(node)
        args = [self.values[arg] for arg in node.args]
        result = self._operation(node, args)
        for arg in node.args:
            self.uses[arg] -= 1
            value = self.values[arg]
            if not self.uses[arg] and value.place == "tile" and value != result:
                self.pools.give(value)
        return result

    def _check_exact(self, node: Expr) -> None:
        found = self.ranges[node]
        if found is None or max(abs(found[0]), abs(found[1])) >= _EXACT:
            raise UnsupportedError(
                f"{node.op} of {node.dtype} that may reach {found}",
                f"integers are exact below 2^24 on {self.target}, which computes in float32",
                "use smaller indices, or a table of floats",
            )

    def _loaded(self, table: NkiTable) -> NkiValue:
        """A table's values for the tile at hand, by DMA."""
        name, (b, h) = table.name, _place(table)
        if table.kind in ("uniform", "row"):
            column = self.pools.take("column")
            source = f"{name}[{b}, {h}, q0:q0 + rows]"
            if table.kind == "uniform":
                source = f"{name}.ap(pattern=[[0, rows], [1, 1]], offset={_start(table)})"
            self.hoisted.append(f"nisa.dma_copy(dst={column.text}, src={source})")
            return column
        tile = self.pools.take("tile_f32")
        if table.kind == "pair":
            source = f"{name}[{b}, {h}, q0:q0 + rows, k0:k0 + cols]"
        else:
            step, offset = "0", f"{_start(table)} + k0"
            if table.kind == "relative":
                # Row r of a table that repeats with its period starts r elements earlier.
                step, offset = "relative_step", f"{offset} - q0 + relative_zero"
            source = f"{name}.ap(pattern=[[{step}, rows], [1, cols]], offset={offset})"
        self.body.append(f"nisa.dma_copy(dst={tile.text}, src={source})")
        return tile

    def _iota(self, node: Expr) -> NkiValue:
        form = self.affine[node]
        if form.kv == 0:
            column = self.pools.take("column")
            self.hoisted.append(
                f"nisa.iota(dst={column.text}, pattern=[[0, 1]], "
                f"offset={form.q} * q0 + {_constant_of(form, self.prefix)}, "
                f"channel_multiplier={form.q})",
            )
            return column
        tile = self.pools.take("tile_f32")
        self.body.append(
            f"nisa.iota(dst={tile.text}, pattern=[[{form.kv}, cols]], "
            f"offset={offset_of(form, self.prefix)}, channel_multiplier={form.q})",
        )
        return tile

    def _operation(self, node: Expr, args: list[NkiValue]) -> NkiValue:
        op = node.op
        if op == "cast":
            return self._cast(node, args[0])
        if op == "where":
            return self.where(*args)
        if op == "reciprocal":
            return self._rounded(node, self.inverse(args[0]))
        if op == "div":
            return self._quotient(node, *args)
        if op in ("floor_div", "floor_mod") and is_int(node.dtype):
            limits = self.ranges[node.args[1]]
            positive = args[1].place == "static" and limits is not None and limits[0] > 0
            reach = self.ranges[node.args[0]]
            return self.floored(op, args[0], args[1] if positive else None, reach)
        if op in BINARY:
            mirrored = BINARY[OPS[op].mirrored or op]
            return self._rounded(node, self.binary(BINARY[op], mirrored, *args))
        if op in ACTIVATIONS:
            return self._rounded(node, self.activation(op, args[0]))
        if op in ON_CHIP:
            return self._rounded(node, self.unary(op, args[0]))
        raise UnsupportedError(
            f"{op} of {node.dtype}",
            f"no engine of {self.target} computes it on a tile",
            "let it depend on q_idx or kv_idx alone, or write it with other operations",
        )

    def _quotient(self, node: Expr, above: NkiValue, below: NkiValue) -> NkiValue:
        inverse = self.inverse(below)
        result = self.binary("multiply", "multiply", above, inverse)
        self.pools.give(inverse)
        return self._rounded(node, result)

    def _cast(self, node: Expr, arg: NkiValue) -> NkiValue:
        source = node.args[0].dtype
        if arg.place == "static":
            return arg
        if node.dtype == "bool":
            return self.binary("not_equal", "not_equal", arg, ZERO)
        if is_int(node.dtype):
            raise UnsupportedError(
                f"cast of {source} to {node.dtype} where it depends on q_idx and kv_idx",
                f"{self.target} rounds to the nearest where torch truncates",
                "use torch.floor, or let it depend on q_idx or kv_idx alone",
            )
        return self._rounded(node, arg)

    def _rounded(self, node: Expr, value: NkiValue) -> NkiValue:
        """16-bit results are rounded by writing them; all else stays float32."""
        pool = _HALF_POOLS.get(node.dtype)
        if pool is None or value.place == "static" or value.pool == pool:
            return value
        if value.place == "column":
            raise UnsupportedError(
                f"{node.op} of {node.dtype} for each row", "columns are float32 here"
            )
        result = self.pools.take(pool)
        self.copy(result, value)
        if node.op != "cast":
            self.pools.give(value)
        return result


def _place(table: NkiTable) -> tuple[str, str]:
    return "b" if table.per_batch else "0", "h" if table.per_head else "0"


def _start(table: NkiTable) -> str:
    """The place of the first row of the batch and the head at hand."""
    name, (b, h) = table.name, _place(table)
    return f"({b} * {name}.shape[1] + {h}) * {name}.shape[2]"


def offset_of(form: Affine, prefix: str) -> str:
    """An affine form's value at a tile's first row and key, as Python."""
    return f"{form.q} * q0 + {form.kv} * k0 + {_constant_of(form, prefix)}"


def _constant_of(form: Affine, prefix: str) -> str:
    text = str(form.number) if form.number >= 0 else f"({form.number})"
    if form.rest is None:
        return text
    rest = python_of(form.rest, prefix)
    return f"{rest} + {text}" if form.number else rest


def python_of(expr: Expr, prefix: str) -> str:
    """A compile-time number as Python; `b`, `h` and captured scalars are names.

    prefix: of the captured numbers' names, the mod's kind. Raises UnsupportedError for a text that
    is too long for one line.
    """
    texts: dict[Expr, str] = {}
    for node in walk(expr, enter=lambda node: number_of(node) is None):
        captured = number_of(node)
        if node.op == "const":
            texts[node] = _number_text(node)
        elif node.op == "scalar":
            texts[node] = f"{prefix}_scalar{node.value}"
        elif captured is not None:
            texts[node] = f"{prefix}_scalar{captured[0]}"
        elif node.op == "var":
            texts[node] = str(node.value)
        elif node.op == "neg":
            texts[node] = f"(-{texts[node.args[0]]})"
        else:
            x, y = (texts[arg] for arg in node.args)
            texts[node] = f"({x} {OPS[node.op].symbol} {y})"
        if len(texts[node]) > _LONGEST:
            raise UnsupportedError(
                f"a number that is computed from b, h and captured numbers in {len(texts)} steps",
                "it is printed in one expression",
                "compute it outside of the mod and capture it as a tensor",
            )
    return texts[expr]


def _number_text(node: Expr) -> str:
    """A constant; infinities as a product that overflows, which needs no function call."""
    value = node.value
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "(-INFINITY)" if value < 0 else "INFINITY" if value > 0 else "(INFINITY - INFINITY)"
    return f"({value!r})" if isinstance(value, int | float) and value < 0 else repr(value)
