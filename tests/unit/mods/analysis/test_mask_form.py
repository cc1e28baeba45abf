"""What a mask_mod keeps, as one value: all of it is held to the dense mask, element by element."""

import operator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import causal, document, prefix_lm, sliding_window
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Mod, bind
from flexattn.mods.analysis.mask_form import documents_of, mask_form
from flexattn.mods.expr import const, fingerprint, pretty
from flexattn.mods.simplify import make
from flexattn.problem import INDEX_RANGES
from tests.cases import CASES

SIZES = {"b": 2, "h": 3, "q_idx": 37, "kv_idx": 53}
GRID = {
    name: torch.arange(size).view([-1 if name == other else 1 for other in SIZES])
    for name, size in SIZES.items()
}
OPS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq")}
KEYS, PARTS = GRID["kv_idx"], ("below", "above", "rest")


def values(mod, expr, tensors=(), scalars=()):
    """An Expr over a mod's captures at every (b, h, q_idx, kv_idx)."""
    inner = Mod(
        "mask", expr, mod.buffers, mod.scalars,
        fingerprint("mask", expr, mod.buffers, mod.scalars),
    )  # fmt: skip
    found = evaluate(inner, GRID, tensors, scalars)
    return found.expand(tuple(SIZES.values()))


def hold(mod, tensors=(), scalars=(), wraps=False):
    """What a MaskForm promises; returns it. wraps: of terms and edges nothing, where sums may."""
    form = mask_form(mod.expr, INDEX_RANGES)

    def at(expr):
        return True if expr is None else values(mod, expr, tensors, scalars)

    kept = at(mod.expr)
    span_is_the_mask(form.span, at, kept)
    if form.documents is not None:
        row, key = at(form.documents.row), at(form.documents.key)
        assert (row == row[..., :1]).all() and (key == key[:, :, :1]).all()
        assert ((row == key) & at(form.documents.rest)).equal(at(form.span.rest))
    joined = torch.ones_like(kept)
    for term in form.terms:
        expected = at(term.expr)
        joined &= expected
        if term.bound is not None and not wraps:
            got = OPS[term.bound.op](KEYS, at(term.bound.value))
            assert got.expand(kept.shape).equal(expected)
        if term.affine is not None and not wraps:
            got = OPS[term.affine.op](affine(term.affine.form, at), 0)
            assert got.expand(kept.shape).equal(expected)
    assert joined.equal(kept)
    if not wraps:
        edges_are_sound(form, at, kept)
    return form


def span_is_the_mask(span, at, kept):
    """low <= kept keys < high; below, above and rest together are the mask."""
    joined = torch.ones_like(kept)
    for name in PARTS:
        joined &= at(getattr(span, name))
    assert joined.equal(kept)
    sides = (("low", lambda x: KEYS < x, span.below), ("high", lambda x: KEYS >= x, span.above))
    for name, outside, part in sides:
        bound = getattr(span, name)
        if bound is None:
            assert part is None
            continue
        number = at(bound)
        assert (number.diff(dim=2) >= 0).all() and number.abs().max() <= 2**30
        assert not (kept & outside(number)).any()
        if part is not None:
            assert (outside(number) | at(part)).all()
    if span.is_prefix:
        assert (KEYS < at(span.high)).equal(kept)


def affine(form, at):
    """The numbers of an affine form."""
    rest = 0 if form.rest is None else at(form.rest)
    return form.q * GRID["q_idx"] + form.kv * KEYS + form.number + rest


def edges_are_sound(form, at, kept):
    """No key outside of an edge is kept, and within all free edges every one is."""

    def within(edge):
        bound = (
            edge.slope * GRID["q_idx"] + edge.offset + (0 if edge.rest is None else at(edge.rest))
        )
        return KEYS >= bound if edge.lowest else KEYS < bound

    for edge in form.edges:
        assert not (kept & ~within(edge)).any()
    free = torch.ones_like(kept)
    for edge in form.free_edges or ():
        free &= within(edge)
    assert form.free_edges is None or (kept | ~free).all()
    if form.gap_edges is not None:
        first, again = form.gap_edges
        assert not (kept & ~within(first) & ~within(again)).any()


@pytest.mark.parametrize("entry", [e for e in CASES if e.make(2, 3, 3, 37, 53).mask_mod], ids=str)
def test_the_catalogue(entry):
    bound = bind(entry.make(2, 3, 3, 37, 53).mask_mod, "mask")
    hold(bound.mod, bound.tensors, bound.scalars)


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (causal, ("None", "(q_idx + 1)", "None", "(kv_idx <= q_idx)", "None")),
        (
            sliding_window(9),
            ("(q_idx + -9)", "(q_idx + 1)", "((q_idx - kv_idx) <= 9)", "(kv_idx <= q_idx)",
             "None"),
        ),
        (
            lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 5,
            ("(q_idx + -4)", "(q_idx + 5)", "((q_idx + -4) <= kv_idx)", "(kv_idx < (q_idx + 5))",
             "None"),
        ),
        (
            lambda b, h, q_idx, kv_idx: (kv_idx < 3) | (q_idx >= kv_idx),
            ("None", "maximum(3, (q_idx + 1))", "None", "((kv_idx < 3) | (kv_idx <= q_idx))",
             "None"),
        ),
        (
            lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % 3 == q_idx % 3),
            ("None", "(q_idx + 1)", "None", "(kv_idx <= q_idx)",
             "((q_idx % 3) == (kv_idx % 3))"),
        ),
    ],
)  # fmt: skip
def test_what_is_found(mask_mod, expected):
    found = hold(bind(mask_mod, "mask").mod).span
    shown = [getattr(found, name) for name in ("low", "high", *PARTS)]
    assert tuple("None" if each is None else pretty(each) for each in shown) == expected


IDS = torch.arange(53) // 7
ONCE = torch.tensor(2)


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (document(IDS), ("buf0[q_idx]", "buf0[kv_idx]", "None")),
        (and_masks(causal, document(IDS)), ("buf0[q_idx]", "buf0[kv_idx]", "(kv_idx <= q_idx)")),
        (lambda b, h, q_idx, kv_idx: IDS[kv_idx] + b == IDS[q_idx + 1] * ONCE,
         ("(buf0[(q_idx + 1)] * buf1[])", "(b + buf0[kv_idx])", "None")),
        (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (IDS[kv_idx] == IDS[q_idx - kv_idx]), ()),
        (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (IDS[kv_idx] == 3), ()),
        (lambda b, h, q_idx, kv_idx: (IDS[kv_idx] == IDS[q_idx]) | (kv_idx < 2), ()),
        (lambda b, h, q_idx, kv_idx: kv_idx % 3 == q_idx % 3, ()),
    ],
)  # fmt: skip
def test_numbers_that_must_be_equal(mask_mod, expected):
    bound = bind(mask_mod, "mask")
    mod, captured = bound.mod, (bound.tensors, bound.scalars)
    found = documents_of(mod.expr)
    if found is None:
        assert not expected
        return
    shown = [found.row, found.key, found.rest]
    assert tuple("None" if each is None else pretty(each) for each in shown) == expected
    row, key = values(mod, found.row, *captured), values(mod, found.key, *captured)
    assert (row == row[..., :1]).all() and (key == key[:, :, :1]).all()
    rest = True if found.rest is None else values(mod, found.rest, *captured)
    assert ((row == key) & rest).equal(values(mod, mod.expr, *captured))


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0,
        lambda b, h, q_idx, kv_idx: kv_idx >= 40 - q_idx,  # it falls as q_idx grows
        lambda b, h, q_idx, kv_idx: 2 * kv_idx < q_idx,
        lambda b, h, q_idx, kv_idx: kv_idx.to(torch.int8) < q_idx,  # it wraps
        lambda b, h, q_idx, kv_idx: kv_idx.float() < q_idx,
        lambda b, h, q_idx, kv_idx: q_idx < 9,
        lambda b, h, q_idx, kv_idx: (kv_idx < 5) | (q_idx % 2 == 0),
    ],
)
def test_what_gives_no_bound(mask_mod):
    mod = bind(mask_mod, "mask").mod
    span = hold(mod).span
    assert span.low is span.high is None and span.rest is mod.expr


@pytest.mark.parametrize("lengths", [[0, 53], [-5, 2**62], [-(2**63), 2**63 - 1]])
def test_lengths_of_64_bits(lengths):
    """The largest number means "no limit" to many, and one more wraps to the smallest."""
    lengths = torch.tensor(lengths)
    mods = [
        prefix_lm(lengths),
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= lengths[b],
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < lengths[b],
        lambda b, h, q_idx, kv_idx: kv_idx >= lengths[b],
    ]
    for mask_mod in mods:
        bound = bind(mask_mod, "mask")
        span = hold(bound.mod, bound.tensors, bound.scalars, wraps=True).span
        assert span.low is not None or span.high is not None
    wrapping = bind(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + lengths[b], "mask")
    span = hold(wrapping.mod, wrapping.tensors, wrapping.scalars, wraps=True).span
    assert span.low is span.high is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_a_narrow_row_wraps_and_is_no_position(dtype):
    """kv_idx - int8(q_idx) > 5 was solved as kv_idx > q_idx + 5: at row 200 the number is -56."""
    bits = torch.iinfo(dtype).bits

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx - (q_idx * 2 ** (bits - 7)).to(dtype) > 5

    mod = bind(mask_mod, "mask").mod
    form = mask_form(mod.expr, INDEX_RANGES)
    rows = {**GRID, "q_idx": torch.tensor(200).view(1, 1, 1, 1)}
    kept = evaluate(mod, rows, (), ())
    assert kept.all() and form.edges == () and form.terms[0].affine is None
    if form.span.low is not None:
        low = Mod("mask", form.span.low, (), (), f"low of {dtype}")
        assert (evaluate(low, rows, (), ()) <= KEYS).all()
    value = Mod("mask", form.terms[0].bound.value, (), (), f"bound of {dtype}")
    assert (KEYS > evaluate(value, rows, (), ())).all()


Q, KV, B = (make("var", "int64", (), name) for name in ("q_idx", "kv_idx", "b"))


def whole_numbers(*variables):
    constants = st.integers(-40, 40).map(lambda n: const(n, "int64"))
    return st.recursive(
        st.sampled_from(variables) | constants,
        lambda inner: st.builds(
            lambda op, x, y: make(op, "int64", (x, y)),
            st.sampled_from(["add", "sub", "mul", "minimum", "maximum"]), inner, inner,
        )
        | st.builds(
            lambda op, x, n: make(op, "int64", (x, const(n, "int64"))),
            st.sampled_from(["floor_div", "floor_mod"]), inner, st.integers(1, 9),
        )
        | st.builds(lambda op, x: make(op, "int64", (x,)), st.sampled_from(["neg", "abs"]), inner)
        | st.builds(
            lambda dtype, x: make("cast", "int64", (make("cast", dtype, (x,)),)),
            st.sampled_from(["int8", "int32"]), inner,
        ),
        max_leaves=5,
    )  # fmt: skip


# Two of three tell something of the keys of a row.
comparisons = st.builds(
    lambda op, pair: make(op, "bool", pair),
    st.sampled_from(["lt", "le", "gt", "ge", "eq"]),
    st.tuples(whole_numbers(Q, KV, B), whole_numbers(Q, KV, B))
    | st.tuples(st.just(KV), whole_numbers(Q, B))
    | st.tuples(st.just(make("sub", "int64", (Q, KV))), whole_numbers(B)),
)
masks = st.recursive(
    comparisons,
    lambda inner: (
        st.builds(
            lambda op, x, y: make(op, "bool", (x, y)), st.sampled_from(["and", "or"]), inner, inner
        )
        | inner.map(lambda x: make("not", "bool", (x,)))
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(masks)
def test_any_mask(expr):
    hold(Mod("mask", expr, (), (), "any"))


@pytest.mark.parametrize("steps", [100, 300])
def test_a_sum_of_hundreds_of_terms_bounds_the_keys(steps):
    """Past a number of terms it is one: each step would copy those of all before it."""

    def mod(b, h, q, k):
        for i in range(steps):
            q = q + q // (i + 2)
        return k <= q

    assert mask_form(bind(mod, "mask").mod.expr, INDEX_RANGES).span.high is not None
