"""Print an Expr as Triton statements: what does not depend on the keys first, once per tile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from flexattn.errors import UnsupportedError
from flexattn.kernels.printers.spelling import (
    HALVES,
    NARROW,
    TRITON,
    Dialect,
    buffer_names,
    by_invariant,
    is_literal,
    itemsize,
    literal,
    scalar_name,
)
from flexattn.mods.analysis.intervals import intervals_of
from flexattn.mods.expr import Expr, depending, walk
from flexattn.mods.numbers import number_of
from flexattn.mods.ops import OPS, Range, is_float, is_int
from flexattn.problem import INDEX_RANGES, Captures

# Of one text: how many operations lie within one another, and how many characters it has. Python's
# parser ends at 200 parentheses, and compilers visit what is nested by recursion.
_DEEPEST, _LONGEST = 24, 1000
# What gives one of its operands, and what makes no error of an operand much larger.
_CHOOSING = frozenset(("where", "minimum", "maximum", "clamp_min", "clamp_max"))
_STEADY = _CHOOSING.union(
    ("add", "sub", "mul", "div", "neg", "abs", "relu", "cast", "detach", "own_gradient"),
    ("eq", "ne", "lt", "le", "gt", "ge"),
)


class _Nesting:
    """The depth of nested operations in the text of each node."""

    def __init__(self) -> None:
        self._depths: dict[Expr, int] = {}

    def ends(self, node: Expr, text: str, named: bool) -> bool:
        """True if a node gets a name: it is named anyway, or its text grows too deep or long."""
        depth = 1 + max((self._depths.get(arg, 0) for arg in node.args), default=0)
        if named or depth > _DEEPEST or len(text) > _LONGEST:
            return True
        self._depths[node] = depth
        return False


def _feeding_loads(nodes: list[Expr]) -> set[Expr]:
    """The loads that do not wait for the score, and what they need; nodes are in walk's order."""
    scored = depending(nodes, ("score",))
    found: set[Expr] = set()
    for node in reversed(nodes):
        if node not in scored and (node.op == "load" or node in found):
            found.add(node)
            found.update(node.args)
    return found


def _summed_halves(nodes: list[Expr]) -> frozenset[Expr]:
    """Products in 16 bits that are summed, with nothing but casts and signs between."""
    found: set[Expr] = set()
    below = [arg for node in nodes if node.op in ("add", "sub") for arg in node.args]
    while below:
        node = below.pop()
        if node.op in ("neg", "cast"):
            below += node.args
        elif node.op == "mul" and node.dtype in HALVES:
            found.add(node)
    return frozenset(found)


def _rough_tanhs(nodes: list[Expr]) -> set[Expr]:
    """Each tanh that may err by 2^-11, because the rounding of scores hides it.

    nodes: in walk's order. Such a tanh reads the score in both branches of each `where`, and no
    operation that may magnify an error, such as atanh or a division by it, reads its result.
    """
    scored, magnified = set[Expr](), set[Expr]()
    for node in nodes:
        held = [arg in scored for arg in node.args[node.op == "where" :]] or [
            node.value == "score"
        ]
        if all(held) if node.op in _CHOOSING else any(held):
            scored.add(node)
    for node in reversed(nodes):
        if node.op not in _STEADY or node in magnified:
            magnified.update(node.args)
        elif node.op == "div":
            magnified.add(node.args[1])
    return {node for node in scored - magnified if node.op == "tanh"}


def _integer_power(text: str, exponent: Expr) -> str:
    """An integer's power as products; raises UnsupportedError unless the exponent is 0 to 16."""
    if exponent.op != "const" or not 0 <= int(exponent.value or 0) <= 16:
        shown = exponent.value if exponent.op == "const" else exponent.op
        raise UnsupportedError(
            f"an integer to the power {shown}",
            "integer powers take a constant exponent from 0 to 16",
            "convert to float first",
        )
    return f"({' * '.join([text] * int(exponent.value or 0)) or '1'})"


INT32: Range = (-(2**31), 2**31 - 1)


class Traits(NamedTuple):
    """The features of the target's language that change how a function is spelled.

    interpreted: Triton's CPU interpreter. head_per_row: `h` is a column of heads, one a row, not
    a number; batch_per_row: `b` is one too. fast_tanh: the hardware's tanh is accurate enough
    for the output's dtype. short_tanh: an exponential and a division are, also where no rounding
    of scores hides the error of the hardware's. predicated_loads: what differs by key is read by
    the function for its dtype, which the template defines. dialect: the language.
    """

    interpreted: bool = False
    head_per_row: bool = False
    batch_per_row: bool = False
    fast_tanh: bool = False
    short_tanh: bool = False
    predicated_loads: bool = False
    dialect: Dialect = TRITON


class View(NamedTuple):
    """The place where an expression is computed, which decides the names of its variables.

    prefix: of the names given to statements; "" is the mod's kind. q_idx, kv_idx, h: texts; a name
    of its own is the ordinary one. by_row, by_key: whether those texts differ by row and by key.
    diagonals: whether its keys are diagonals. uniform: whether a tile has one value. early: suffix
    of what is computed early, where body reads it. dtype: that of the result, "" its own.
    """

    prefix: str = ""
    q_idx: str = "q_idx"
    kv_idx: str = "kv_idx"
    h: str = "h"
    by_row: bool = True
    by_key: bool = True
    diagonals: bool = False
    uniform: bool = False
    early: str = ""
    dtype: str = ""


TILE = View()


@dataclass(frozen=True, slots=True)
class Printed:
    """Statements of three kinds, and the result.

    hoisted: before the loop over keys. early: inside it, on the keys alone, so what they load can
    come while the scores are computed. body: after the scores.
    """

    hoisted: tuple[str, ...]
    early: tuple[str, ...]
    body: tuple[str, ...]
    result: str

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement, and the result."""
        return (*self.hoisted, *self.early, *self.body, self.result)


class _Value(NamedTuple):
    """A printed operand: its text, its dtype in the kernel, whether it differs by row and key."""

    text: str
    dtype: str
    row: bool = False
    key: bool = False


def print_mod(
    captures: Captures, traits: Traits, view: View = TILE, expr: Expr | None = None
) -> Printed:
    """Triton statements for a mod over `score`, `b`, `h`, `q_idx` and `kv_idx`.

    expr: a part of it, which is printed in its place. Captured tensors are the names in
    `buffer_names`. Raises UnsupportedError for an operation that Triton cannot express.
    """
    return MultiPrinter(captures, traits, view, () if expr is None else (expr,)).run()


class MultiPrinter:
    """Prints expressions over the same variables as one sequence of statements.

    roots: the expressions, in order; by default the mod's own. "Keys" are what the template's loop
    walks, and "rows" what it holds: a backward's loop may go over query rows.
    """

    def __init__(
        self, captures: Captures, traits: Traits, view: View, roots: tuple[Expr, ...] = ()
    ) -> None:
        self.captures, self.mod, self.traits, self.view = captures, captures.mod, traits, view
        self.roots = roots or (self.mod.expr,)
        self.dialect, self.tl = traits.dialect, traits.dialect.module
        walked = self.dialect.walked
        held = "q_idx" if walked == "kv_idx" else "kv_idx"
        self.keyed = ("score", walked) if view.by_key else ("score",)
        self.rowed = ("score", held) if view.by_row else ("score",)
        if view.by_row:
            varying = ["h"] * traits.head_per_row + ["b"] * traits.batch_per_row
            self.rowed = (*self.rowed, *varying)
        self.hoisted: list[str] = []
        self.early: list[str] = []
        self.body: list[str] = []
        self.count = 0
        self.values: dict[Expr, _Value] = {}
        self.nesting = _Nesting()
        # Of each load, its indices and that they are inside, as its statement has them.
        self.places: dict[Expr, list[tuple[_Value, str]]] = {}
        nodes = list(walk(*self.roots))
        self.uses = Counter(arg for node in nodes for arg in node.args)
        self.ranges = intervals_of(self.roots[0], INDEX_RANGES, *self.roots[1:])
        self.ahead = _feeding_loads(nodes)
        self.summed = frozenset() if traits.interpreted else _summed_halves(nodes)
        self.rough = _rough_tanhs(nodes) if traits.fast_tanh else set()
        self.node = self.roots[-1]
        per_key, per_row = depending(nodes, self.keyed), depending(nodes, self.rowed)
        # What is computed before the loop, or before the scores, for use after them.
        self.crossing = {
            arg
            for node in per_key
            for arg in node.args
            if arg not in per_key or (node in per_row and arg not in per_row)
        }

    def run(self) -> Printed:
        for node in walk(*self.roots):
            self.node = node
            self.values[node] = self._node(node)
        first = self.roots[0]
        result = self._as(self.values[first], self.view.dtype or first.dtype)
        hoisted, early, body = tuple(self.hoisted), tuple(self.early), tuple(self.body)
        return Printed(hoisted, early, body, result)

    def _name(self, value: _Value) -> _Value:
        """Give a value a statement of its own, as early as it can be computed."""
        name = f"{self.view.prefix or self.mod.kind}_{self.count}"
        self.count += 1
        inside = self.body if value.row and self.node not in self.ahead else self.early
        (inside if value.key else self.hoisted).append(f"{name} = {value.text}")
        early = value.key and inside is self.early
        return value._replace(text=name + self.view.early * early)

    def _node(self, node: Expr) -> _Value:
        if node.op == "var":
            name = str(node.value)
            view = {"q_idx": self.view.q_idx, "kv_idx": self.view.kv_idx, "h": self.view.h}
            dtype = "float32" if name == "score" else "int32"
            return _Value(view.get(name, name), dtype, name in self.rowed, name in self.keyed)
        if node.op == "const":
            text = literal(node.value, node.dtype)
            if node.dtype == "int64" and not self._fits(node):  # no tensor of 32 bits takes it
                text = f"{self.tl}.cast({text}, {self.dialect.type(node.dtype)})"
            return _Value(text, node.dtype)
        number = number_of(node)
        if number is not None:
            return _Value(scalar_name(self.mod.kind, number[0]), "int32")
        if node.op == "scalar":
            name = scalar_name(self.mod.kind, int(node.value or 0))
            if node.dtype == "int32":
                return _Value(name, "int32")
            return self._name(
                _Value(f"{self.tl}.cast({name}, {self.dialect.type(node.dtype)})", node.dtype)
            )
        if node.op == "load":
            return self._load(node)
        value = self._operation(node)
        named = self.uses[node] > 1 or node in self.crossing or node in self.roots
        return self._name(value) if self.nesting.ends(node, value.text, named) else value

    def _operation(self, node: Expr) -> _Value:
        args = [self.values[arg] for arg in node.args]
        row, key = any(arg.row for arg in args), any(arg.key for arg in args)
        if node.op == "cast":
            dtype = self._narrow((node,), args)
            return _Value(self._cast(args[0], node, dtype), dtype, row, key)
        if node.op == "where":
            dtype = self._narrow((node,), args[1:])
            texts = [args[0].text, *(self._as(arg, dtype) for arg in args[1:])]
            text = self.dialect.computed(OPS["where"], dtype, texts)
            return _Value(text, dtype, row, key)
        spelled = by_invariant(node, self.mod.kind, self.ranges[node.args[0]])
        if spelled:
            above = args[0]._replace(text=self._as(args[0], "int32"), dtype="int32")
            above = above if above.text.isidentifier() else self._name(above)
            return _Value(spelled.format(above.text, args[1].text), "int32", row, key)
        operand = node.args[0].dtype
        computed = "float32" if operand in HALVES else self._narrow((node,), args)
        if node.dtype == "bool" and operand != "bool":
            computed = "float32" if operand in HALVES else self._narrow(node.args, args)
        text = self._spell(node, [self._as(arg, computed) for arg in args], computed)
        if node.dtype in HALVES:
            text, computed = self._converted(text, computed, node.dtype), node.dtype
        elif node.dtype == "int64" and computed == "int64" and self._fits(node):
            text, computed = f"{text}.to({self.tl}.int32)", "int32"
        return _Value(text, "bool" if node.dtype == "bool" else computed, row, key)

    def _narrow(self, nodes: tuple[Expr, ...], args: list[_Value]) -> str:
        """32-bit arithmetic where neither the operands nor these nodes can leave 32 bits."""
        if nodes[0].dtype != "int64":
            return nodes[0].dtype
        fits = all(self._fits(node) for node in nodes)
        wide = any(arg.dtype == "int64" and not is_literal(arg.text) for arg in args)
        return "int64" if wide or not fits else "int32"

    def _fits(self, node: Expr) -> bool:
        return self._between(node, INT32)

    def _between(self, node: Expr, ends: Range) -> bool:
        limits = self.ranges[node]
        return limits is not None and ends[0] <= limits[0] and limits[1] <= ends[1]

    def _as(self, value: _Value, dtype: str) -> str:
        if value.dtype == dtype or is_literal(value.text):
            return value.text
        return self._converted(value.text, value.dtype, dtype)

    def _cast(self, value: _Value, node: Expr, dtype: str) -> str:
        text, source, truth = value.text, node.args[0].dtype, node.dtype == "bool"
        if source in HALVES and (self.traits.interpreted if truth else is_int(node.dtype)):
            text, source = self._converted(text, source, "float32"), "float32"
        return f"({text} != 0)" if truth else self._converted(text, source, dtype)

    def _converted(self, text: str, source: str, dtype: str) -> str:
        """The interpreter converts by its own rules what numpy has no dtype for."""
        if self.traits.interpreted and not {source, dtype}.isdisjoint(NARROW):
            return f"libdevice.converted({text}, {self.dialect.type(dtype)})"
        if dtype.startswith("float8") and not is_float(source):
            text = f"{text}.to({self.tl}.float32)"  # no compiler has the cast of an integer
        return f"{text}.to({self.dialect.type(dtype)})"

    def _spell(self, node: Expr, args: list[str], computed: str) -> str:
        if computed == "bool" and node.op in ("and", "or", "xor", "not"):
            return self.logical(node.op, args)
        if node.op == "trunc_div" and computed == "float32":
            # A quotient that rounds up to an integer from below would lose one by truncation.
            quotient = f"{self.tl}.div_rn({args[0]}, {args[1]})"
            if node.dtype in HALVES:  # torch truncates one of 16 bits
                quotient = self._converted(quotient, computed, node.dtype)
                quotient = self._converted(quotient, node.dtype, computed)
            return f"libdevice.trunc({quotient})"
        if node.op in ("shl", "shr"):
            last = 8 * itemsize(computed) - 1
            if not self._between(node.args[1], (0, last)):
                name = "shift_left" if node.op == "shl" else "shift_right"
                return f"{name}({args[0]}, {args[1]}, {last})"
        if node in self.summed:
            # LLVM makes one fma of a half product and its sum, which drops a rounding that torch
            # does. It leaves an fma alone, and adding +0 changes nothing that a sum can see.
            return f"{self.tl}.fma({args[0]}, {args[1]}, 0.0)"
        if node.op == "tanh" and computed == "float32" and not self.traits.interpreted:
            if self.traits.fast_tanh and (node in self.rough or not self.traits.short_tanh):
                return f"fast_tanh({args[0]})"
            if self.traits.short_tanh:
                return f"short_tanh({args[0]})"
        if node.op == "pow" and is_int(node.dtype):
            return _integer_power(args[0], node.args[1])
        floored = node.op in ("floor_div", "floor_mod") and not is_float(computed)
        # Where no operand is negative, C's division, which truncates, floors, too.
        if floored and all(self._between(arg, (0, 2**64)) for arg in node.args):
            return f"({args[0]} {OPS[node.op].symbol} {args[1]})"
        return self.dialect.computed(OPS[node.op], computed, args)

    def logical(self, op: str, args: list[str]) -> str:
        """The interpreter broadcasts a scalar bool to integers, on which `~` is not a negation."""
        if op == "not":
            return (
                f"libdevice.logical_not({args[0]})" if self.traits.interpreted else f"(~{args[0]})"
            )
        text = args[0]
        for arg in args[1:]:
            if self.traits.interpreted:
                text = f"libdevice.logical_{op}({text}, {arg})"
            else:
                text = f"{text} {OPS[op].symbol} {arg}"
        return f"({text})" if len(args) > 1 and not self.traits.interpreted else text

    def _load(self, node: Expr) -> _Value:
        """Read a captured tensor, wrapping negative indices and never outside its bounds."""
        slot = int(node.value or 0)
        buffer = self.mod.buffers[slot]
        base, _, strides = buffer_names(self.mod.kind, slot, buffer.rank)
        terms: dict[bool, list[str]] = {True: [], False: []}
        checks: dict[bool, list[str]] = {True: [], False: []}
        row = key = False
        for dim, (index, inside) in enumerate(self._places(node)):
            checks[index.key].append(inside)
            unit = dim == buffer.rank - 1 and self.captures.contiguous[slot]
            terms[index.key].append(index.text if unit else f"{index.text} * {strides[dim]}")
            row, key = row or index.row, key or index.key
        if key and terms[False]:
            rows = _Value(" + ".join([base, *terms.pop(False)]), "pointer", row)
            base = self._name(rows).text
            within = _Value(self.logical("and", checks.pop(False)), "bool", row)
            checks[True].append(self._name(within).text)
        address = " + ".join([base, *terms[key]])
        inside = self.logical("and", checks[key]) if checks[key] else ""
        loaded = _Value(self._read(buffer.dtype, address, inside, key), buffer.dtype, row, key)
        whole, check = self._whole(node)
        if whole and not row:
            rest = [each for each in checks[True] if each != check]
            text = self._read(buffer.dtype, address, " & ".join(rest), key)
            return self._of_two(whole, loaded._replace(text=text), loaded)
        # A mask_mod stands behind a condition already, and a value for every score comes alone.
        guarded = key and not (row or self.view.uniform) and self.mod.kind == "score"
        return self._guarded(loaded) if guarded else self._name(loaded)

    def _read(self, dtype: str, address: str, inside: str, key: bool) -> str:
        """The expression that reads an address, 0 where it is not inside; "" is everywhere."""
        if key and inside and self.traits.predicated_loads:
            return f"predicated_load_{dtype}({address}, {inside})"
        # No integer becomes a number of eight bits.
        zero = "0.0" if dtype.startswith("float8") else "0"
        checked = f", mask={inside}, other={zero}" if inside else ""
        return f"{self.tl}.load({address}{checked})"

    def _places(self, node: Expr) -> list[tuple[_Value, str]]:
        """A load's indices, each with the text of whether it is inside."""
        slot = int(node.value or 0)
        sizes = buffer_names(self.mod.kind, slot, self.mod.buffers[slot].rank)[1]
        places = []
        for size, arg in zip(sizes, node.args, strict=True):
            index = self.values[arg]
            found = self.ranges[arg]
            if found is None or found[0] < 0:
                wrapped = f"{self.tl}.where({index.text} < 0, {index.text} + {size}, {index.text})"
                index = self._name(index._replace(text=wrapped))
                # As an unsigned number a negative index is above every size: one comparison.
                unsigned = self.dialect.type(index.dtype.replace("int", "uint"))
                inside = f"({index.text}.to({unsigned}) < {size}.to({unsigned}))"
            else:
                inside = f"({index.text} < {size})"
            places.append((index, inside))
        self.places[node] = places
        return places

    def _whole(self, node: Expr) -> tuple[str, str]:
        """Two conditions of a load of what is walked: a whole tile is inside, an element is.

        Both are "" for other loads, and where a dialect has no end of a tile.
        """
        slot, end = int(node.value or 0), self.dialect.end
        sizes = buffer_names(self.mod.kind, slot, self.mod.buffers[slot].rank)[1]
        read = zip(node.args, self.places[node], sizes, strict=True)
        keyed = [(arg, check, size) for arg, (index, check), size in read if index.key]
        if not end or [(arg.op, arg.value) for arg, *_ in keyed] != [("var", self.dialect.walked)]:
            return "", ""
        return f"({end} <= {keyed[0][2]})", keyed[0][1]

    def _of_two(self, condition: str, one: _Value, other: _Value) -> _Value:
        """A value read in the loop: the first where a condition holds, which all threads share."""
        value = self._name(one)
        statement = self.early.pop()
        name = statement.partition(" = ")[0]
        otherwise = f"    {name} = {other.text}"
        self.early += [f"if {condition}:", f"    {statement}", "else:", otherwise]
        return value

    def _guarded(self, load: _Value) -> _Value:
        """A load of keys inside the loop, kept out of Triton's software pipeline.

        Pipelined, a gather goes through shared memory element by element, and its stages crowd
        out those of K and V. The pipeline takes no load behind a condition; this one holds.
        """
        like = self.dialect.diagonal if self.view.diagonals else self.dialect.key
        zeros = self.dialect.zeros(like, load.dtype)
        value = self._name(load._replace(text=zeros))
        self.early += [f"if {self.dialect.within}:", f"    {value.text} = {load.text}"]
        return value
