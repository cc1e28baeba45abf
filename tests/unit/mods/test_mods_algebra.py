"""Bounds over tiles are never wrong: a thousand random masks, and twenty tiles of each."""

import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind
from flexattn.mods.algebra import TableUse, bounds, bounds_of, tables_of, verdicts
from flexattn.mods.algebra.bounds import _read
from flexattn.mods.expr import Buffer, Expr, Mod, const, fingerprint
from flexattn.mods.simplify import make, renumber
from flexattn.mods.site import Bound
from tests.cases import CASES

LENGTH, TILES = 60, 40
DTYPES = ("int64", "int32", "int8", "uint8")
EXTREME = [-(2**63), 2**63 - 1, -(2**62), 2**31, -(2**31) - 1]


def var(name):
    return Expr("var", "int64", (), name)


def number(value, dtype):
    low, high = (0, 255) if dtype == "uint8" else (-(2 ** (b := int(dtype[3:]) - 1)), 2**b - 1)
    return const(min(max(value, low), high), dtype)


@st.composite
def integers(draw, depth):
    """An integer expression, of a dtype that may wrap."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(leaves())
    op = draw(st.sampled_from([
        "add", "sub", "mul", "neg", "abs", "minimum", "maximum", "floor_div", "floor_mod",
        "trunc_div", "trunc_mod", "where", "cast", "and", "not", "shl", "shr", "affine",
    ]))  # fmt: skip
    x = draw(integers(depth=depth - 1))
    if op == "affine":
        scaled = make("mul", x.dtype, (x, number(draw(st.integers(-31, 31)), x.dtype)))
        return make("add", x.dtype, (scaled, number(draw(st.integers(-70, 70)), x.dtype)))
    if op in ("neg", "abs", "not"):
        return make(op, x.dtype, (x,))
    if op == "cast":
        return make("cast", draw(st.sampled_from(DTYPES)), (x,))
    if op in ("shl", "shr"):
        return make(op, x.dtype, (x, number(draw(st.integers(0, 5)), x.dtype)))
    if op in ("floor_div", "floor_mod", "trunc_div", "trunc_mod", "and"):
        least = draw(st.sampled_from([1, 1, 1, -9]))
        y = number(draw(st.integers(least, 40)) or 1, x.dtype)
        if op != "and" and not y.value:  # a negative one, clamped into a dtype without signs
            y = number(1, x.dtype)
        if op != "and" and draw(st.integers(0, 3)) == 0:  # a divisor from elsewhere, never zero
            z = draw(integers(depth=depth - 1))
            y = make("cast", x.dtype, (make("and", z.dtype, (z, number(7, z.dtype))),))
            y = make("add", x.dtype, (y, number(1, x.dtype)))
        return make(op, x.dtype, (x, y))
    y = make("cast", x.dtype, (draw(integers(depth=depth - 1)),))
    if op == "where":
        return make("where", x.dtype, (draw(flags(depth=depth - 1)), x, y))
    return make(op, x.dtype, (x, y))


@st.composite
def leaves(draw):
    kind = draw(st.sampled_from(["q_idx", "kv_idx", "q_idx", "kv_idx", "h", "const", "load"]))
    if kind == "const":
        return number(draw(st.integers(-40, 70)), "int64")
    if kind != "load":
        return var(kind)
    slot = draw(st.integers(0, 5))
    place = make("add", "int64", (var(draw(st.sampled_from(["q_idx", "kv_idx", "h"]))),
                                  number(draw(st.integers(-3, 3)), "int64")))  # fmt: skip
    places = (place,)
    if slot == 5:
        places = (make("floor_mod", "int64", (place, number(2, "int64"))), var("kv_idx"))
    elif draw(st.integers(0, 3)) == 0:  # an index from memory, as offsets[document[q_idx]]
        places = (make("cast", "int64", (Expr("load", BUFFERS[0].dtype, places, 0),)),)
    return make("load", BUFFERS[slot].dtype, places, slot)


@st.composite
def flags(draw, depth):
    """A condition."""
    op = draw(st.sampled_from(["compare"] * 4 + ["and", "or", "xor", "not", "where", "cast"]))
    if depth == 0 or op in ("compare", "cast"):
        x = draw(integers(depth=max(depth - 1, 0)))
        if op == "compare" and draw(st.integers(0, 9)) == 0:  # of floats nothing is known
            x = make("cast", "float32", (x,))
        if op == "cast":
            return make("cast", "bool", (x,))
        y = draw(integers(depth=max(depth - 1, 0)))
        y = make("cast", x.dtype, (y,))
        compared = draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
        return make(compared, "bool", (x, y))
    x, y, z = (draw(flags(depth=depth - 1)) for _ in range(3))
    operands = {"not": (x,), "where": (x, y, z)}.get(op, (x, y))
    return make(op, "bool", operands)


BUFFERS = (
    Buffer("int32", 1), Buffer("int64", 1), Buffer("int8", 1), Buffer("uint8", 1),
    Buffer("int64", 1), Buffer("int32", 2),
)  # fmt: skip


def memory():
    """What random masks read: sorted, falling, random, short, and with numbers that overflow."""
    g = torch.Generator().manual_seed(7)
    wild = torch.randint(-9, 60, (LENGTH,), generator=g)
    wild[::7] = torch.tensor(EXTREME + EXTREME[:4])
    return (
        (torch.arange(LENGTH) // 7).int(), torch.arange(LENGTH, 0, -1),
        torch.randint(-128, 128, (LENGTH,), generator=g).to(torch.int8),
        torch.randint(0, 256, (LENGTH // 2,), generator=g).to(torch.uint8), wild,
        torch.randint(0, LENGTH, (2, LENGTH), generator=g).int(),
    )  # fmt: skip


MEMORY = memory()


def bound_of(expr):
    expr, slots, _ = renumber(expr)
    buffers = tuple(BUFFERS[i] for i in slots)
    mod = Mod("mask", expr, buffers, (), fingerprint("mask", expr, buffers, ()))
    return Bound(mod, tuple(MEMORY[i] for i in slots), ())


def tiles(draw):
    """The inclusive corners of tiles, and their heads: each [TILES]."""
    ends = []
    for _ in range(2):
        first = torch.randint(0, LENGTH, (TILES,), generator=draw)
        size = torch.randint(1, 18, (TILES,), generator=draw)
        ends.append((first, (first + size).clamp(max=LENGTH) - 1))
    return ends[0], ends[1], torch.randint(0, 3, (TILES,), generator=draw)


def assert_sound(bound, seed):
    (q_lo, q_hi), (kv_lo, kv_hi), h = tiles(torch.Generator().manual_seed(seed))
    corners = {
        "b": torch.zeros_like(h), "h": h, "q_lo": q_lo, "q_hi": q_hi, "kv_lo": kv_lo,
        "kv_hi": kv_hi,
    }  # fmt: skip
    bounds = bounds_of(bound.mod)
    tables = tables_of(bounds.tables, bound.tensors)
    must, may = (
        each.expand(TILES) for each in verdicts(bounds, corners, bound.tensors, (), tables)
    )
    at = torch.arange(LENGTH)
    env = {"b": torch.tensor(0), "h": torch.arange(3)[:, None, None], "q_idx": at[:, None]}
    kept = evaluate(bound.mod, env | {"kv_idx": at}, bound.tensors, ())
    kept = kept.expand(3, LENGTH, LENGTH)
    decided = 0
    for i in range(TILES):
        tile = kept[h[i], q_lo[i] : q_hi[i] + 1, kv_lo[i] : kv_hi[i] + 1]
        assert not must[i] or tile.all(), bound.mod.expr
        assert may[i] or not tile.any(), bound.mod.expr
        decided += int(must[i] or not may[i])
    return decided


@pytest.mark.parametrize("examples", [150, pytest.param(500, marks=pytest.mark.long)])
def test_no_verdict_on_a_random_mask_is_wrong(examples):
    pairs = decided = 0
    same = examples == 150  # in each run: a share of new draws is below its bound now and then

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=same,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(flags(depth=3), st.integers(0, 2**31))
    def each(expr, seed):
        nonlocal pairs, decided
        decided += assert_sound(bound_of(expr), seed)
        pairs += TILES

    each()
    assert pairs >= 40 * examples
    # Bounds that decide nothing are sound too.
    assert decided > pairs // 4 or not same


@pytest.mark.parametrize("entry", [c for c in CASES if c.make(1, 2, 1, 37, 53).mask_mod], ids=str)
def test_symbolic_work_is_done_once_for_a_mod_and_in_few_calls(entry, monkeypatch):
    mod = bind(entry.make(2, 3, 1, 61, 97).mask_mod, "mask").mod
    mod.expr.facts.clear()
    calls = 0

    def counted(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        first = bounds_of(mod)
    finally:
        sys.setprofile(before)
    assert calls < 30_000
    monkeypatch.setattr(bounds, "_Lowering", None)
    assert bounds_of(mod) is first


@pytest.mark.parametrize("values", [
    torch.arange(5000), -torch.arange(5000), torch.zeros(5000), torch.arange(5000) % 7,
    torch.rand(3, 5000) < 0.5, torch.arange(3)[:, None] * 5 + torch.arange(5000) // 9,
])  # fmt: skip
def test_the_ends_of_a_range_are_the_extremes_of_a_sorted_table(values):
    values = values if values.dtype == torch.bool else values.to(torch.int32)
    use = TableUse(0, values.dim() - 1)
    (table,) = tables_of((use,), (values,))
    steps = values.long().diff(dim=-1)
    assert table.ordered is bool((steps >= 0).all() or (steps <= 0).all())
    if not table.ordered:
        return
    first = torch.randint(0, values.shape[-1], (200,)).sort().values
    last = first.flip(0).maximum(first)
    row = [torch.ones(200, dtype=torch.int64)] * (values.dim() - 1)
    line = values[1] if row else values
    for greatest in (False, True):
        got = _read(table, [*row, first, last], use.dim, greatest)
        parts = [line[a : b + 1] for a, b in zip(first, last, strict=True)]
        assert got.tolist() == [int(x.max() if greatest else x.min()) for x in parts]
