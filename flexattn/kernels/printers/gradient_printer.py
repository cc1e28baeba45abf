"""Print a score_mod with its derivatives, and what adds them to the gradients of what it loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flexattn.kernels.printers.spelling import Dialect, TensorForm, buffer_names
from flexattn.kernels.printers.triton_printer import (
    TILE,
    MultiPrinter,
    Printed,
    Traits,
    View,
    print_mod,
)
from flexattn.mods.analysis.affine import FREE, along_diagonals, slope_of
from flexattn.mods.derivative import Derivatives, LoadDerivative, derivatives
from flexattn.mods.expr import Expr, reads, walk
from flexattn.problem import Captures, Structure

# A lane gives another one 32 bits.
_SHUFFLED = frozenset(("float32", "float16", "bfloat16", "int32", "int16", "int8", "uint8"))
# Operations of an index that has another value at the next position, mostly. Behind any other, as
# a clamp or a division, many scores of a tile may read one place.
_MOVING = frozenset((
    "var", "const", "scalar", "cast", "add", "sub", "neg", "abs", "mul", "floor_mod", "trunc_mod",
))  # fmt: skip
# Of which diagonals a thread's names speak: those that it reads, and those that it has sums of.
_READ, SUMS = "diagonal", "summed"


def on_diagonals(load: Expr) -> bool:
    """True if all scores of a diagonal of a tile read one place."""
    return reads(load, "kv_idx") and all(map(along_diagonals, load.args))


def reads_by_diagonal(load: Expr) -> bool:
    """True if a load is printed once for each diagonal of a warp."""
    return load.op == "load" and load.dtype in _SHUFFLED and on_diagonals(load)


def reads_in_steps(load: Expr) -> bool:
    """True if many neighbours may read one place."""
    return any(
        node.op not in _MOVING and reads(node, "q_idx", "kv_idx") for node in walk(*load.args)
    )


class Along(NamedTuple):
    """The places that a load reads along diagonals.

    checked: statements that make its indices. places: these, each with whether it is inside.
    value: what reads there. within: the name of whether a tile's places are all inside, "" where
    that is not asked. first, last: there, statements, and the last index: of a thread's first
    diagonal, and a number that is known when the kernel is compiled, so that all have one address.
    """

    checked: tuple[str, ...]
    places: list[Any]
    value: Any
    within: str = ""
    first: tuple[str, ...] = ()
    last: str = ""

    def place(self, base: str, steps: Sequence[str]) -> str:
        """The address where the tile is within; steps: of all indices but the last, whose is 1."""
        indices = (index.text for index, _ in self.places[:-1])
        rows = [f"{index} * {step}" for index, step in zip(indices, steps, strict=True)]
        return " + ".join([base, *rows, self.last])

    def branches(self, inside: str, checked: Iterable[str]) -> list[str]:
        """A statement for tiles that are within, and those for others, behind their indices."""
        others = [*self.checked, *checked]
        if not self.within:
            return others
        parts = {f"if {self.within}:": (*self.first, inside), "else:": others}
        return [line for at, under in parts.items() for line in (at, *(f"    {x}" for x in under))]


class DiagonalPrinter(MultiPrinter):
    """Prints a mod of a tile whose template has names for diagonals.

    diagonal_q: the rows of those of the tile's first key that a thread reads; diagonal_first and
    diagonal_offset: of the first one of these, and how much further each is; is_diagonal: whether
    it is one. summed_q and so on: of those that it has sums of.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.within: dict[Expr, str] = {}

    def along(self, load: Expr, prefix: str, lanes: str = _READ) -> Along:
        """The places that a load reads; what does not change over a tile goes before the loop."""
        printer, places = self._at(load, prefix, f"{lanes}_q", f"is_{lanes}")
        found = Along(places, printer.places[load], printer.values[load])
        if load not in self.within:
            self.within[load] = self._within(load, f"{prefix}_within", found)
        if not self.within[load]:
            return found
        last, slope = load.args[-1], _slope(load)
        first, lines = self._at(last, f"{prefix}_first", f"{lanes}_first", f"is_{lanes}")
        step = "" if slope == 1 else f"{slope} * "
        index = f"{first.values[last].text} + {step}{lanes}_offset"
        return found._replace(within=self.within[load], first=lines, last=index)

    def _at(
        self, root: Expr, prefix: str, q_idx: str, kept: str
    ) -> tuple[_AlongPrinter, tuple[str, ...]]:
        view = View(prefix, q_idx, "start_n", by_row=False)
        dialect = self.dialect._replace(key=TensorForm("[BLOCK_N, BLOCK_M // 2]", "DIAGONALS"))
        traits = self.traits._replace(dialect=dialect)
        printer = _AlongPrinter(kept, self.captures, traits, view, (root,))
        printed = printer.run()
        self.hoisted += printed.hoisted
        return printer, (*printed.early, *printed.body)

    def _within(self, load: Expr, name: str, found: Along) -> str:
        """Let the corners of a tile say whether all of its last index is inside.

        "" where the last index does not rise evenly, another one changes too, or it has a stride.
        """
        slot, last, slope = int(load.value or 0), load.args[-1], _slope(load)
        if not (slope and self.captures.contiguous[slot]):
            return ""
        if any(not arg.variables <= FREE for arg in load.args[:-1]):
            return ""
        # A thread's first diagonal may lie one before its warp's part of a tile.
        ends = [("start_m", "(start_n + BLOCK_N)"), ("(start_m + BLOCK_M - 1)", "start_n")]
        texts = []
        for number, (q_idx, kv_idx) in enumerate(ends if slope > 0 else ends[::-1]):
            view = View(f"{name}{number}", q_idx, kv_idx, by_row=False, by_key=False)
            corner = MultiPrinter(self.captures, self.traits, view, (last,))
            self.early += corner.run().hoisted
            texts.append(corner.values[last].text)
        size = buffer_names(self.mod.kind, slot, len(load.args))[1][-1]
        rows = [inside for _, inside in found.places[:-1]]
        checks = [f"({texts[0]} >= 0)", f"({texts[1]} < {size})", *rows]
        self.early.append(f"{name} = {' & '.join(checks)}")
        return name

    def _load(self, node: Expr) -> Any:
        if not reads_by_diagonal(node):
            return super()._load(node)
        base, _, strides = buffer_names(self.mod.kind, int(node.value or 0), len(node.args))
        prefix = f"{base}_along{self.count}"
        along, read = self.along(node, prefix), f"{prefix}_read"
        self.places[node] = along.places
        inside = f"{read} = read_where({along.place(base, strides[:-1])}, is_{_READ})"
        self.early += along.branches(inside, [f"{read} = {along.value.text}"])
        # What a lane has read is there before the product, and given to each score behind it: it
        # has a third of the registers.
        if not any(node in other.args for other in self.ahead):
            self.ahead = self.ahead - {node}
        text = f"broadcast_diagonals({read}, {base})"
        return self._name(along.value._replace(text=text, row=True, key=True))


class _AlongPrinter(MultiPrinter):
    """Prints one load at a warp's diagonals, or an index of it; kept: which of these there are."""

    def __init__(self, kept: str, *given: Any) -> None:
        super().__init__(*given)
        self.kept = kept

    def _places(self, node: Expr) -> Any:
        places = super()._places(node)
        number = next((n for n, (index, _) in enumerate(places) if index.key), None)
        if number is not None:
            index, inside = places[number]
            places[number] = index, self.logical("and", [self.kept, inside])
        return places

    def _read(self, dtype: str, address: str, inside: str, key: bool) -> str:
        """The text of a read. Values that are given to other lanes are read as bits."""
        if self.node is self.roots[0]:
            return f"read_where({address}, {inside})"
        return super()._read(dtype, address, inside, key)

    def _guarded(self, load: Any) -> Any:
        """Gluon has no software pipeline that loads must be kept out of."""
        return load if self.node is self.roots[0] else self._name(load)


def _slope(load: Expr) -> int:
    """The rise of the last index from diagonal to diagonal; 0 where it is not the same for all."""
    found = slope_of(load.args[-1], "q_idx")
    return int(found.value or 0) if found is not None and found.op == "const" else 0


# The two halves of a backward: one holds query rows and walks the keys, the other holds keys and
# walks the rows. What is held lies along a tile's first axis.
OVER_KEYS = Dialect(
    tile=TensorForm("[BLOCK_M2, BLOCK_N2]"),
    key=TensorForm("[1, BLOCK_N2]"),
    row=TensorForm("[BLOCK_M2]"),
)
OVER_ROWS = Dialect(
    tile=TensorForm("[BLOCK_N1, BLOCK_M1]"),
    key=TensorForm("[1, BLOCK_M1]"),
    row=TensorForm("[BLOCK_N1]"),
    walked="q_idx",
    within="start_m < q_len",
)


class Scatter(NamedTuple):
    """The statements that add the gradient of one load to a captured tensor's.

    before, inside, after: the loop over keys, in which `ds` is the gradient of the tile's modified
    scores, and `p` their weights. In a tile of Gluon's, after: the products that ds goes into;
    last: the loops over rows of one head, of which `before` is before the first.
    """

    before: tuple[str, ...]
    inside: tuple[str, ...]
    after: tuple[str, ...]
    last: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrintedGradient(Printed):
    """Statements that turn `score`, the scaled product, into the modified score and derivatives.

    result: the modified score. factor: what the gradient of it is multiplied by to be that of
    `score`; "" for 1, "0" where the score is not read.
    """

    factor: str
    scatters: tuple[Scatter, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement."""
        scattered = (line for each in self.scatters for part in each for line in part)
        own = (*self.hoisted, *self.early, *self.body, self.result, self.factor)
        return (*own, *scattered)


def grad_name(slot: int) -> str:
    """The kernel's argument for a captured tensor's gradient: float32, dense."""
    return f"{buffer_names('score', slot, 0)[0]}_grad"


def learned_loads(structure: Structure) -> list[Expr]:
    """The loads of a score_mod that get a gradient."""
    if structure.score is None or not structure.grads:
        return []
    return [each.load for each in derivatives(structure.score.mod, structure.grads).loads]


def adds_along_diagonals(structure: Structure) -> bool:
    """True if a load that gets a gradient has one place for all of a diagonal of a tile."""
    return any(map(on_diagonals, learned_loads(structure)))


def print_gradient(captures: Captures, slots: tuple[int, ...], traits: Traits) -> PrintedGradient:
    """A score_mod of one half, whose dialect the traits have, with its derivatives.

    slots: the captured tensors whose gradients this half adds up, which is one that holds rows.
    Raises UnsupportedError as `derivatives` and `print_mod` do.
    """
    found = derivatives(captures.mod, slots)
    roots = (captures.mod.expr, *found.roots)
    kind = DiagonalPrinter if traits.dialect.gluon else MultiPrinter
    printer = kind(captures, traits, TILE, roots)
    printed = printer.run()
    result = _as_tile(printer, captures.mod.expr, printed.result)
    factor = "0" if found.score is None else _factor(printer, found.score)
    scatters = tuple(_Scatter(printer, i, each).run(found) for i, each in enumerate(found.loads))
    steps = [line for slot in sorted({int(each.load.value or 0) for each in found.loads})
             for line in _steps(slot, captures.mod.buffers[slot].rank)]  # fmt: skip
    hoisted = (*printer.hoisted, *steps)
    return PrintedGradient(hoisted, printed.early, printed.body, result, factor, scatters)


def print_with_gradients(
    structure: Structure, traits: Traits, slots: tuple[int, ...] = ()
) -> tuple[PrintedGradient | None, Printed | None]:
    """The score_mod with its derivatives and the mask_mod of a half; None where there is none.

    slots, and what is raised: as of `print_gradient`.
    """
    score = mask = None
    if structure.score is not None:
        score = print_gradient(structure.score, slots, traits)
    if structure.mask is not None:
        mask = print_mod(structure.mask, traits)
    return score, mask


def _as_tile(printer: MultiPrinter, expr: Expr, text: str) -> str:
    """A score that does not read the product is the same for some scores, or for all."""
    value = printer.values[expr]
    if value.row and value.key:
        return text
    return f"{printer.dialect.zeros(printer.dialect.tile, 'float32')} + {text}"


def _factor(printer: MultiPrinter, expr: Expr) -> str:
    if expr.op == "const" and expr.value == 1.0:
        return ""
    value = printer.values[expr]
    return value.text if value.dtype == "float32" else f"{value.text}.to({printer.tl}.float32)"


def _steps(slot: int, rank: int) -> list[str]:
    """Strides of a dense gradient, in 64 bits where it may be large; none for the last."""
    base, sizes, _ = buffer_names("score", slot, rank)
    lines = []
    for dim in reversed(range(rank - 1)):
        inner = "" if dim == rank - 2 else f" * {base}_step{dim + 1}"
        lines.append(f"{base}_step{dim} = {sizes[dim + 1]}.to(tl.int64){inner}")
    return lines


class _PlacePrinter(MultiPrinter):
    """Prints where a load reads, and not the load."""

    def _load(self, node: Expr) -> Any:
        if node is not self.roots[0]:
            return super()._load(node)
        self._places(node)
        return self.values[node.args[0]]


def _along_diagonals(printer: MultiPrinter, load: Expr, prefix: str) -> _PlacePrinter:
    """The places of a load on a tile's diagonals: of its first row, and keys `diagonal_kv`."""
    view = View(prefix, q_idx="start_m", kv_idx="diagonal_kv", by_row=False)
    dialect = printer.dialect._replace(key=TensorForm("[BLOCK_N2]"))
    traits = printer.traits._replace(dialect=dialect)
    found = _PlacePrinter(printer.captures, traits, view, (load,))
    found.run()
    return found


class _Scatter:
    """One load's gradient, summed over what its place does not depend on, then added there.

    Where no index depends on the keys, that is once for all of the loop. For places in steps, what
    goes to a tile's first and last one is summed before it is added: programs add in any order,
    and many terms that cancel would lose float32's digits.
    """

    def __init__(self, printer: MultiPrinter, number: int, each: LoadDerivative) -> None:
        self.slot = int(each.load.value or 0)
        self.base = buffer_names("score", self.slot, 0)[0]
        self.places = printer.places[each.load]
        self.row = any(index.row for index, _ in self.places)
        self.key = any(index.key for index, _ in self.places)
        self.factor = _factor(printer, each.factor)
        self.logical, self.tl = printer.logical, printer.tl
        self.number = number
        self.sum = f"{self.base}_sum{number}"
        self.steps = reads_in_steps(each.load)
        self.along = None
        self.warps = None
        self.gluon = printer.dialect.gluon
        if isinstance(printer, DiagonalPrinter) and reads_by_diagonal(each.load):
            self.warps = printer.along(each.load, f"{self.base}_added{number}", SUMS)
            self.places = self.warps.places
        if self.warps is None and self.row and self.key and on_diagonals(each.load):
            self.along = _along_diagonals(printer, each.load, f"{self.base}_along{number}")

    def run(self, found: Derivatives) -> Scatter:
        """The statements; found: of all loads."""
        each = f"ds * {self.factor}" if self.factor else "ds"
        # A derivative may be no number where a weight is 0.
        each = f"{self.tl}.where(p == 0.0, 0.0, {each})" if self.factor else each
        if self.warps is not None:
            return self._over_warps(each, self.warps)
        if self.gluon:
            return self._over_head(each)
        if not found.summed((self.slot,)):
            own = ("rows[:, None]", "(offs_n < end_n)[None, :]")
            return Scatter((), (f"{self.sum} = {each}", *self._add(*own, by="store")), ())
        if self.steps and self.row and self.key:
            return self._over_steps(each)
        if self.along is not None:
            return Scatter((), tuple(self._over_diagonals(each, self.along, "rows[:, None]")), ())
        some = f"({self.sum} != 0.0)"
        if self.row and self.key:
            return Scatter((), (f"{self.sum} = {each}", *self._add(some, "rows[:, None]")), ())
        if self.key:
            kept = f"tl.where(rows[:, None], {each}, 0.0)"
            grad = f"{self.sum} = tl.sum({kept}, 0)[None, :]"
            return Scatter((), (grad, *self._added(some)), ())
        before = f"{self.sum} = tl.zeros([BLOCK_M2, 1], tl.float32)"
        inside = f"{self.sum} += tl.sum({each}, 1)[:, None]"
        if self.row:
            return Scatter((before,), (inside,), self._added("rows[:, None]"))
        total = f"{self.sum} = tl.sum(tl.where(rows[:, None], {self.sum}, 0.0))"
        return Scatter((before,), (inside,), (total, *self._add()))

    def _over_diagonals(self, each: str, along: _PlacePrinter, kept: str) -> list[str]:
        """One addition for each diagonal of a tile, in place of one for each of its scores.

        Row i moved by i columns has element (i, j) in column c = (j - i) mod N: a column then
        holds the diagonals i - j = N t - c, for as many t as rows of M pass over N columns.
        """
        self.places = along.places[along.roots[0]]
        moved, turned = f"{self.base}_moved{self.number}", f"{self.base}_turned{self.number}"
        inner = [
            f"{self.sum} = tl.sum(tl.where({moved} // BLOCK_N2 == turn, {turned}, 0.0), 0)",
            "diagonal_kv = start_n + lanes_n - turn * BLOCK_N2",
            *along.hoisted, *along.early, *along.body,
            *self._add(f"({self.sum} != 0.0)"),
        ]  # fmt: skip
        return [
            f"{moved} = lanes_n[None, :] + lanes_m[:, None]",
            f"{turned} = tl.where({kept}, {each}, 0.0)",
            f"{turned} = tl.gather({turned}, {moved} % BLOCK_N2, 1)",
            "for turn in tl.static_range(0, (BLOCK_M2 + BLOCK_N2 - 2) // BLOCK_N2 + 1):",
            *(f"    {line}" for line in inner),
        ]

    def _over_steps(self, each: str) -> Scatter:
        """The ends of each row are added as one, then those of what is left of each column."""
        ds, kept = (f"{self.base}_{what}{self.number}" for what in ("ds", "kept"))
        first = [f"{ds} = {each}", *self._stepped(f"({ds} != 0.0)", "rows[:, None]")]
        grad, spot = f"{self.base}_grad", f"{self.base}_spot{self.number}"
        left = f"add_ends({grad}, {spot}, {ds}, {kept}, 0)"
        others = [f'tl.atomic_add({grad} + {spot}, {ds}, mask={left}, sem="relaxed")']
        if self.along is not None:
            others = self._over_diagonals(ds, self.along, kept)
        lines = (
            f"{kept} = add_ends({grad}, {spot}, {ds}, {kept}, 1)",
            f"if tl.max({kept}.to(tl.int32)) > 0:",
            *(f"    {line}" for line in others),
        )
        return Scatter((), (*first, *lines), ())

    def _stepped(self, *kept: str) -> tuple[str, ...]:
        """Statements that give places, and where they are kept and inside, a name."""
        checks = [*(inside for _, inside in self.places), *kept]
        return (
            f"{self.base}_spot{self.number} = ({' + '.join(self._offsets)}).to(tl.int64)",
            f"{self.base}_kept{self.number} = {self.logical('and', checks)}",
        )

    def _added(self, *kept: str) -> tuple[str, ...]:
        """Statements that add sums of a row of places, or of a column."""
        if not self.steps:
            return self._add(*kept)
        spot, inside = (f"{self.base}_{what}{self.number}" for what in ("spot", "kept"))
        added = f"add_steps({self.base}_grad, {spot}, {self.sum}, {inside})"
        return (*self._stepped(*kept), added)

    @property
    def _offsets(self) -> list[str]:
        """The parts of a place, in elements."""
        last = len(self.places) - 1
        return [
            index.text if dim == last else f"{index.text} * {self.base}_step{dim}"
            for dim, (index, _) in enumerate(self.places)
        ]

    def _over_head(self, each: str) -> Scatter:
        """Sums of keys, in registers for all rows of a head; then one addition for each warp."""
        place = " + ".join([f"{self.base}_grad", *self._offsets])
        kept = self.logical("and", [inside for _, inside in self.places] or ["True"])
        total = f"{self.sum} = gl.sum({self.sum}.reshape([BLOCK_N // 16, 16]), 1)"
        last = total, f"add_of_warps({place}, {self.sum}, {kept})"
        before = f"{self.sum} = gl.zeros([BLOCK_N], gl.float32, BY_KEY)"
        return Scatter((before,), (f"{self.sum} += gl.sum({each}, 1)",), (), last)

    def _over_warps(self, each: str, along: Along) -> Scatter:
        """One addition for each diagonal of a warp's part of a tile."""
        values = f"{self.base}_ds{self.number}"
        steps = [f"{self.base}_step{dim}" for dim in range(len(self.places) - 1)]
        place = along.place(f"{self.base}_grad", steps)
        inside = f"add_where({place}, {self.sum}, is_{SUMS})"
        added = along.branches(inside, self._add(f"({self.sum} != 0.0)", by="add_where"))
        lines = (f"{self.sum} = reduce_diagonals({values})", *added)
        return Scatter((), (f"{values} = {each}",), lines)

    def _add(self, *kept: str, by: str = "atomic_add") -> tuple[str, ...]:
        """Statements that add the sum to the gradient where it is kept and inside."""
        place, inside = (f"{self.base}_{what}{self.number}" for what in ("place", "inside"))
        checks = [*(inside for _, inside in self.places), *kept]
        lines = [f"{place} = {' + '.join([f'{self.base}_grad', *self._offsets])}"]
        if checks:
            lines.append(f"{inside} = {self.logical('and', checks)}")
        if by == "add_where":
            return (*lines, f"{by}({place}, {self.sum}, {inside})")
        mask = f", mask={inside}" if checks else ""
        relaxed = ', sem="relaxed"' if by == "atomic_add" else ""
        return (*lines, f"{self.tl}.{by}({place}, {self.sum}{mask}{relaxed})")
