"""Print a score_mod's terms: what each tile computes, and what its rows get back at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from flexattn.kernels.printers.spelling import in_base_2
from flexattn.kernels.printers.triton_printer import Printed, Traits, View, print_mod
from flexattn.mods.analysis.affine import FREE, same_in_tiles, slope_of
from flexattn.mods.analysis.intervals import reaches_end
from flexattn.mods.expr import Expr, const, reads, terms_of
from flexattn.mods.ops import is_int
from flexattn.mods.rules import FLOAT, ONE, times
from flexattn.mods.simplify import make
from flexattn.problem import Captures, Structure

Fused = Literal["", "blocks", "ramp", "columns", "diagonals", "softcap"]


class KeyLimits(NamedTuple):
    """The keys that a prefill tile can need, where the score_mod's own mask says so.

    lines: statements on row_start. first, last: the first key, and one past the last.
    """

    lines: tuple[str, ...]
    first: str
    last: str


class PrintedScore(NamedTuple):
    """Statements of a score_mod, and of what it leaves for later.

    hoisted: before the loop over keys. early: inside it, on the keys alone. body: after the
    scores; it turns `qk`, the bare product, into base-2 scores, except a factor `qk_scale` where
    `folded`. strip: whether a vector of STRIP diagonals is read. rows: statements after the loop
    whose last one is `shift`, what each row adds to its scores in base 2. empties: whether -inf
    may be among that. limits: of the keys. fused: what the softmax does by itself: "ramp",
    with the numbers `slope` and `column`, the first key's; "columns" and "diagonals", with one
    `column` a key or a score; "softcap", with `score_scale` inside of tanh; "blocks", with a
    `qk_scale` of any sign that is computed for each tile; "" nothing. Only with `folded`.
    halves: whether that scale has a column for each key, of two numbers.
    """

    hoisted: tuple[str, ...]
    early: tuple[str, ...]
    body: tuple[str, ...]
    folded: bool = False
    strip: bool = False
    rows: tuple[str, ...] = ()
    empties: bool = False
    limits: KeyLimits | None = None
    fused: Fused = ""
    halves: bool = False

    @property
    def reads_keys(self) -> bool:
        """True if the tile's statements name the indices of its keys."""
        return any("kv_idx" in line for line in (*self.early, *self.body))

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement, in the order of the kernel."""
        limits = self.limits.lines if self.limits else ()
        return (*self.hoisted, *limits, *self.early, *self.body, *self.rows)


# How many conditions of a score_mod's own mask are asked of a whole tile.
_CONDITIONS = 16
LOG2E = const(1.4426950216293335, FLOAT)


def print_score(
    structure: Structure,
    traits: Traits,
    fuses: bool = False,
    tile: tuple[int, int] | None = None,
) -> PrintedScore:
    """The score_mod of a structure that has one; raises as `print_mod` does.

    In Gluon what is added grows evenly from key to key where it can, which the layout of scores
    makes cheap, and threads exchange the values of diagonals by a function of the template's own.
    fuses: the template's softmax adds columns, or caps scores, by itself. tile: rows and keys,
    where tiles begin at multiples of both: factors of their blocks are computed once a tile.
    """
    return _Score(structure, traits, fuses, tile).run()


def whole_score(captures: Captures, traits: Traits) -> PrintedScore:
    """A score_mod as it is written, which no rule took apart; raises as `print_mod` does."""
    printed = print_mod(captures, traits)
    dialect, far = traits.dialect, reaches_end(captures.mod.expr)
    result = in_base_2(printed.result, far, dialect.module)
    if not reads(captures.mod.expr, "score"):
        result = f"{dialect.zeros(dialect.tile, FLOAT)} + {result}"
    body = ("score = qk * sm_scale", *printed.body, f"qk = {result}")
    return PrintedScore(printed.hoisted, printed.early, body)


@dataclass
class _Score:
    structure: Structure
    traits: Traits
    fuses: bool
    tile: tuple[int, int] | None
    hoisted: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        score, terms = self.structure.score, self.structure.terms
        assert score is not None and terms is not None
        self.captures, self.terms, self.blocks, self.halves = score, terms, ONE, False
        if self.tile is not None and "scale" not in self.structure.rules_off:
            self.terms, self.blocks = terms.of_blocks(self.tile[0], self.tile[1] // 2)
            self.halves = not same_in_tiles(self.blocks, *self.tile)
        self.dialect, self.tl = self.traits.dialect, self.traits.dialect.module

    def run(self) -> PrintedScore:
        structure, terms, blocks = self.structure, self.terms, self.blocks is not ONE
        decode = structure.kind == "decode"
        reference = "row_start // PACKED" if decode else "row_start"
        folded = "scale" not in structure.rules_off
        folded = folded and terms.core is not None and terms.positive(terms.outer)
        folded = folded and (structure.positive_scale or not terms.linear)
        fused = self._fused(folded) if self.fuses else ""
        folded = folded and (fused != "" or not (terms.added or blocks))
        far = terms.core is not None and reaches_end(make("mul", FLOAT, (terms.outer, terms.core)))
        folded = folded and not far
        if fused:
            self._fuse(fused, reference)
        else:
            self._scored(folded, far, self._added(reference))
        limits = None
        if terms.keep is not None:
            self._masked(terms.keep)
            if not decode and structure.sparsity is None:
                limits = self._limits(terms.keep)
        rows = self._rows(reference) if terms.leaves_loop else ()
        return PrintedScore(
            hoisted=tuple(self.hoisted),
            early=tuple(self.early),
            body=tuple(self.body),
            folded=folded,
            strip=terms.diagonal is not None,
            rows=rows,
            empties=terms.row is not None,
            limits=limits,
            fused=fused,
            halves=self.halves,
        )

    def _fused(self, folded: bool) -> Fused:
        """The part that the softmax can do; folded: the scale of scores keeps their order."""
        terms = self.terms
        if not folded or terms.core is None:
            return ""
        if terms.linear and not terms.added and self.blocks is not ONE:
            return "blocks"
        if terms.linear and terms.column is not None and terms.added == (terms.column,):
            return "columns" if self._slope() is None else "ramp"
        if terms.linear and terms.diagonal is not None and terms.added == (terms.diagonal,):
            return "diagonals"
        capped = terms.capped and terms.positive(terms.inner) and self.structure.positive_scale
        capped = capped and self.traits.fast_tanh and terms.keep is None and not self.halves
        return "softcap" if capped else ""

    def _fuse(self, fused: Fused, reference: str) -> None:
        terms = self.terms
        if fused == "softcap":
            self._factor("score", "sm_scale", terms.inner, True)
            self._factor("qk", "LOG2E", terms.outer, True)
            return
        self._factor("qk", "sm_scale * LOG2E", terms.outer, True)
        if fused == "blocks":
            return
        if terms.diagonal is not None:
            self.body.append(f"column = {self._strip(terms.diagonal)}")
            return
        assert terms.column is not None
        slope = self._slope()
        if slope is None:
            view = View("column", q_idx=f"({reference})", by_row=False)
            self.body.append(f"column = {self._placed(terms.column, view)}")
        else:
            self._even(slope, terms.column, reference)

    def _slope(self) -> Expr | None:
        """The rise of a column from key to key, where it is always the same; else None."""
        column = self.terms.column
        return None if column is None else slope_of(column, "kv_idx")

    def _print(self, expr: Expr, view: View) -> Printed:
        return print_mod(self.captures, self.traits, view, expr)

    def _place(self, expr: Expr, view: View) -> str:
        """Print into the tile's statements; the text of the result."""
        printed = self._print(expr, view)
        self.hoisted += printed.hoisted
        # What waits for no memory comes after the scores: before, it would hold registers.
        waits = any(f"{self.tl}.load(" in line for line in printed.early)
        (self.early if waits else self.body).extend(printed.early)
        self.body += printed.body
        return printed.result

    def _factor(self, name: str, first: str, factor: Expr, folded: bool) -> str:
        """`first` times a factor: before the loop where it takes more than an instruction."""
        text = first if factor is ONE else f"{first} * {self._place(factor, View(name))}"
        if self.blocks is not ONE and name == ("qk" if self.terms.linear else "score"):
            rows, keys = _parted(self.blocks)
            if rows is not ONE:
                text += f" * {self._place(rows, View('rows', 'row_start', by_row=False))}"
            self.hoisted.append(f"whole_scale = {text}")
            self.body.append(f"{name}_scale = whole_scale * {self._of_tile(keys)}")
        elif factor.op == "const" and not folded:
            return f"({text})"
        else:
            self.hoisted.append(f"{name}_scale = {text}")
        return f"{name}_scale"

    def _of_tile(self, blocks: Expr) -> str:
        """The factor of a tile's keys: a number, or a column where each half has one."""
        starts = ("start_n", "(start_n + BLOCK_N // 2)")[: 1 + self.halves]
        first, *more = (
            self._place(blocks, View(f"half{i}", "row_start", key, by_row=False, uniform=True))
            for i, key in enumerate(starts)
        )
        if not more:
            return first
        keys = self.dialect.arange("BLOCK_N", self.dialect.over_keys)
        # A thread's keys differ from another's in the bits of 6: the halves are known.
        half = f"({self.tl}.expand_dims({keys}, 0) & ~6) < BLOCK_N // 2"
        return f"{self.tl}.where({half}, {first}, {more[0]})"

    def _scored(self, folded: bool, far: bool, added: list[str]) -> None:
        terms = self.terms
        if terms.core is None:
            zeros = self.dialect.zeros(self.dialect.tile, FLOAT)
            self.body.append(f"qk = {zeros}{_sum(added)}")
            return
        if terms.linear:
            scale = self._factor("qk", "sm_scale * LOG2E", terms.outer, folded)
            core = "qk"
        else:
            inner = "sm_scale"
            if terms.inner is not ONE or self.blocks is not ONE:
                inner = self._factor("score", "sm_scale", terms.inner, False)
            self.body.append(f"score = qk * {inner}")
            core = self._place(terms.core, View("core"))
            if far:
                if terms.outer is not ONE:
                    core = f"{core} * {self._place(terms.outer, View('outer'))}"
                scored = in_base_2("score", True, self.tl)
                self.body += [f"score = {core}", f"qk = {scored}{_sum(added)}"]
                return
            scale = "LOG2E"
            if terms.outer is not ONE or folded:
                scale = self._factor("qk", "LOG2E", terms.outer, folded)
        if added:
            # Said aloud: the compiler might fuse the product inside of what is added instead.
            core = f"{self.tl}.fma({core}, {scale}, {added[0]}){_sum(added[1:])}"
        elif not folded:
            core = f"{core} * {scale}"
        if core != "qk":
            self.body.append(f"qk = {core}")

    def _added(self, reference: str) -> list[str]:
        """Texts of what is added to a tile's scores, in base 2."""
        terms, found = self.terms, []
        if terms.column is not None:
            view = View("column", q_idx=f"({reference})", by_row=self.structure.kind == "decode")
            slope = self._slope() if self.dialect.gluon else None
            if slope is None:
                found.append(self._placed(terms.column, view))
            else:
                found.append(self._even(slope, terms.column, reference))
        if terms.diagonal is not None:
            found.append(self._strip(terms.diagonal))
        if terms.rest is not None:
            found.append(self._placed(terms.rest, View("rest")))
        return found

    def _even(self, slope: Expr, column: Expr, reference: str) -> str:
        """A column of one slope: a product and a sum a key, and no conversions.

        In the layout of Hopper's scores a thread's keys differ from another's in the bits of 6
        alone: what is left are numbers that are known when the kernel is compiled.
        """
        rate = self._place(self._base_2(slope), View("slope", by_row=False, by_key=False))
        view = View("start", f"({reference})", f"({reference})", by_row=False, by_key=False)
        start = self._place(self._base_2(column), view)
        tl = self.tl
        keys = self.dialect.arange("BLOCK_N", self.dialect.over_keys)
        self.hoisted += [f"slope = {rate}", f"first = {start}"]
        self.body += [
            f"keys = {tl}.expand_dims({keys}, 0)",
            f"column = ((keys & 6) + (start_n - {reference})).to({tl}.float32) * slope + first",
        ]
        return f"{tl}.fma((keys & ~6).to({tl}.float32), slope, column)"

    def _placed(self, expr: Expr, view: View) -> str:
        """The text of a term that is added to scores, in base 2."""
        if reaches_end(expr):
            return in_base_2(self._place(expr, view), True, self.tl)
        return self._place(self._base_2(expr), view)

    def _base_2(self, expr: Expr) -> Expr:
        """expr * log2(e), with the constant where it is multiplied least often."""
        if expr.op == "mul":
            for x, y in (expr.args, expr.args[::-1]):
                if y.variables <= FREE:
                    return make("mul", FLOAT, (x, times(y, LOG2E)))
        return make("mul", FLOAT, (expr, LOG2E))

    def _strip(self, expr: Expr) -> str:
        """The values of a tile's diagonals, read from a vector by q_idx - kv_idx.

        Lane i of the vector is the diagonal row_start - (start_n + BLOCK_N - 1) + i. The vector
        passes through shared memory, and addresses differ by constants: one read for each score.
        """
        view = View("strip", q_idx="row_start", kv_idx="strip_kv", by_row=False, diagonals=True)
        dialect, rows = self.dialect, self.dialect.rows
        lanes = dialect.arange("STRIP", dialect.over_diagonals)
        self.early.append(f"strip_kv = start_n + (BLOCK_N - 1) - {lanes}")
        strip = self._placed(expr, view)
        if self.dialect.gluon:
            self.body.append(f"strip = along_diagonals(exchange.index(consumer), {strip})")
            return "strip"
        # In the layouts of matrix instructions a thread's places differ from another's in row bits
        # other than 8 and in the key bits of 6: what is left is known when this is compiled, and
        # two rows share their reads.
        row_at = dialect.arange(rows, dialect.over_rows)
        key_at = dialect.arange("BLOCK_N", dialect.over_keys)
        self.body += [
            f"row_at, key_at = {row_at}[:, None], {key_at}[None, :]",
            "at = (row_at & 8) - (key_at & ~6) + (BLOCK_N - 1)",
            "at += (row_at & ~8) - (key_at & 6)",
            f"strip = {self.tl}.gather({strip}, at.reshape({rows} * BLOCK_N), 0)",
        ]
        return f"strip.reshape({rows}, BLOCK_N)"

    def _rows(self, reference: str) -> tuple[str, ...]:
        """The terms that rows get back, printed for vectors of rows after the loop."""
        terms = self.terms
        head = "offs_h" if self.structure.kind == "decode" else "h"
        view = View("row", q_idx="row_q", h=head, by_row=False, by_key=False)
        lines: list[str] = []
        texts: list[str] = []
        if terms.row is not None:
            printed = self._print(terms.row, view)
            lines += printed.hoisted
            texts.append(printed.result)
        if terms.row_slope is not None:
            printed = self._print(terms.row_slope, view._replace(prefix="row_slope"))
            lines += printed.hoisted
            texts.append(f"{printed.result} * (row_q - {reference}).to({self.tl}.float32)")
        zeros = self.dialect.zeros(self.dialect.row, FLOAT)
        far = terms.row is not None and reaches_end(terms.row)
        shift = f"({' + '.join(texts)})"
        if far:
            lines.append(f"shift = {shift}")
            shift = "shift"
        lines.append(f"shift = {in_base_2(shift, far, self.tl)} + {zeros}")
        return tuple(lines)

    def _masked(self, keep: Expr) -> None:
        """The score_mod's own mask, looked at where a corner of the tile says that it matters."""
        view = View("keep")
        printed = self._print(keep, view)
        self.hoisted += printed.hoisted
        # Where nothing is known of the tile, the condition only keeps loads out of the pipeline.
        needed = self._mixed_tile(keep) or self.dialect.within
        chosen = f'{self.tl}.where({printed.result}, qk, float("-inf"))'
        inner = [*printed.early, *printed.body, f"qk = {self.dialect.guarded.format(chosen)}"]
        self.body.append(f"if {needed}:")
        self.body += [f"    {line}" for line in inner]

    def _mixed_tile(self, keep: Expr) -> str | None:
        """A scalar condition without which every lane of a prefill tile is kept.

        A comparison of affine numbers holds everywhere if it does in the corner where it is
        nearest to failing.
        """
        if self.structure.kind == "decode":
            return None
        texts = []
        parts = terms_of(keep, "and")
        if len(parts) > _CONDITIONS:
            return None
        for i, part in enumerate(parts):
            slopes = _affine(part)
            if slopes is None:
                return None
            row = "row_start" if slopes[0] >= 0 else f"(row_start + {self.dialect.rows} - 1)"
            key = "start_n" if slopes[1] >= 0 else "(start_n + BLOCK_N - 1)"
            view = View(f"mixed{i}", q_idx=row, kv_idx=key, by_row=False)
            printed = self._print(make("not", "bool", (part,)), view)
            self.hoisted += printed.hoisted
            self.body += [*printed.early, *printed.body]
            texts.append(f"({printed.result})")
        return " | ".join(texts)

    def _limits(self, keep: Expr) -> KeyLimits | None:
        """The keys outside of which a comparison fails for every row of the tile."""
        lines: list[str] = []
        first, last = "0", "kv_len"
        for i, part in enumerate(terms_of(keep, "and")[:_CONDITIONS]):
            slopes = _affine(part)
            if slopes is None or abs(slopes[1]) != 1:
                continue
            x, y = part.args
            slack = make("sub", x.dtype, (y, x))
            row = f"(row_start + {self.dialect.rows} - 1)" if slopes[0] >= 0 else "row_start"
            view = View(f"limit{i}", q_idx=row, kv_idx="0", by_row=False, by_key=False)
            printed = self._print(slack, view)
            lines += printed.hoisted
            # slack + slope * kv >= 0, or > 0.
            strict = part.op == "lt"
            if slopes[1] < 0:
                last = f"{self.tl}.minimum({last}, {printed.result} + {0 if strict else 1})"
            else:
                first = f"{self.tl}.maximum({first}, {1 if strict else 0} - {printed.result})"
        if (first, last) == ("0", "kv_len"):
            return None
        # Captured offsets may be wide; between 0 and the length the loop counts in 32 bits.
        if first != "0":
            first = f"{self.tl}.minimum({first}, kv_len).to({self.tl}.int32)"
        if last != "kv_len":
            last = f"{self.tl}.maximum({last}, 0).to({self.tl}.int32)"
        return KeyLimits(tuple(lines), first, last)


def _parted(factor: Expr) -> tuple[Expr, Expr]:
    """A product as what reads no key, and what does."""
    if "kv_idx" not in factor.variables:
        return factor, ONE
    if factor.op != "mul":
        return ONE, factor
    parts = [_parted(arg) for arg in factor.args]
    return times(parts[0][0], parts[1][0]), times(parts[0][1], parts[1][1])


def _sum(texts: list[str]) -> str:
    return "".join(f" + {text}" for text in texts)


def _affine(part: Expr) -> tuple[int, int] | None:
    """For x < y or x <= y of integers: the constant slopes of y - x in q_idx and kv_idx."""
    if part.op not in ("lt", "le") or not is_int(part.args[0].dtype):
        return None
    x, y = part.args
    slack = make("sub", x.dtype, (y, x))
    found = []
    for name in ("q_idx", "kv_idx"):
        slope = slope_of(slack, name)
        if slope is None or slope.op != "const":
            return None
        found.append(int(slope.value or 0))
    return found[0], found[1]
