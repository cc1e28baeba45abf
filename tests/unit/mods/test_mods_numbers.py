"""What a kernel takes of captured numbers: divisors are constants for a while, then arguments."""

import pytest
import torch
from hypothesis import given, strategies as st

from flexattn.catalogue import dilated_window, natten_2d, sliding_tile_3d
from flexattn.kernels.base.arguments import captured_arguments, captured_values
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.kernels.printers.triton_printer import Traits, print_mod
from flexattn.mods import bind, site
from flexattn.mods.analysis.intervals import Intervals
from flexattn.mods.analysis.mask_form import key_span
from flexattn.mods.bind import clear, record, stats
from flexattn.mods.expr import Expr, walk
from flexattn.mods.numbers import (
    DIVISIONS,
    derived,
    divisor_of,
    divisors,
    invariant,
    number_of,
)
from flexattn.mods.simplify import make
from flexattn.mods.site import MAX_CONSTANT_DIVISORS
from flexattn.problem import INDEX_RANGES, Captures
from flexattn.settings import override
from tests.cases import checkerboard

Q, K = torch.arange(61)[:, None], torch.arange(67)[None, :]
LARGEST = 2**31 - 1


@pytest.fixture
def one_constant(monkeypatch):
    """The second value of a divisor is an argument: each value before it costs a trace."""
    monkeypatch.setattr(site, "MAX_CONSTANT_DIVISORS", 1)


def kept(bound):
    env = {"b": torch.tensor(0), "h": torch.tensor(0), "q_idx": Q, "kv_idx": K}
    return evaluate(bound.mod, env, bound.tensors, bound.scalars).expand(61, 67)


def divided(divisor):
    return lambda b, h, q, k: (q - k - 9) // divisor + (k - q) % divisor > 2


def by_twos(divisor, limit):
    return lambda b, h, q, k: (q // divisor - k // divisor).abs() <= limit


@given(st.integers(1, LARGEST), st.integers(0, LARGEST), st.integers(0, 20))
def test_a_product_and_a_shift_divide_exactly(divisor, numerator, near):
    """Every numerator of 31 bits; a product could be too small where a quotient begins."""
    multiplier, shift = invariant(divisor)
    assert 2**31 <= multiplier < 2**32 and 0 <= shift <= 31
    begins, last = numerator // divisor * divisor, LARGEST // divisor * divisor
    for n in (numerator, begins, max(begins - 1, 0), last, last - 1, LARGEST - near, near):
        assert ((2 * n * multiplier) >> 32) >> shift == n // divisor


@pytest.mark.parametrize(
    "made",
    [lambda i: divided(3 + i), lambda i: by_twos(3 + i, 2 * i)],
    ids=["alone", "beside another number"],
)
def test_ever_changing_divisors_have_few_mods(made):
    """The second value of a divisor made it an argument: the loops of its kernel then spilt."""
    mods = []
    for i in range(20):
        fn = made(i)
        bound = bind(fn, "mask")
        mods.append(bound.mod)
        assert torch.equal(kept(bound), fn(0, 0, Q, K))
        by_argument = [
            node for node in walk(bound.mod.expr)
            if node.op in DIVISIONS and node.args[1].op != "const"
        ]  # fmt: skip
        assert bool(by_argument) is (i >= MAX_CONSTANT_DIVISORS)
    assert len(set(mods)) == MAX_CONSTANT_DIVISORS + 1
    assert len(set(mods[MAX_CONSTANT_DIVISORS:])) == 1
    before = stats().traces
    for i in (*range(1, MAX_CONSTANT_DIVISORS), 19):
        assert bind(made(i), "mask").mod is mods[i]
    assert stats().traces == before


def test_a_number_that_divides_nothing_is_an_argument_at_once():
    bind(by_twos(4, 3), "mask")
    bound = bind(by_twos(4, 5), "mask")
    assert bound.scalars == (5,) and not divisors(bound.mod.expr)


@pytest.mark.parametrize("made", [dilated_window, lambda n, m: by_twos(m, n)])
def test_a_divisor_of_zero_or_below_keeps_its_meaning(one_constant, made):
    bind(made(7, 7), "mask")
    general = bind(made(40, 40), "mask")
    assert divisors(general.mod.expr)
    below = bind(made(40, -3), "mask")
    assert below.mod is not general.mod and not divisors(below.mod.expr)
    assert torch.equal(kept(below), made(40, -3)(0, 0, Q, K))
    assert bind(made(40, 0), "mask").mod is below.mod
    assert bind(made(41, 41), "mask").mod is general.mod


@pytest.mark.parametrize("divisor", [1, 2, 64, 97, 2**20 + 7, 2**28 + 1, LARGEST, 2**31, 2**40])
def test_divisors_of_any_size_beyond_the_constants(one_constant, divisor):
    bind(divided(1000), "mask")
    bound = bind(divided(divisor), "mask")
    assert torch.equal(kept(bound), divided(divisor)(0, 0, Q, K))
    assert bool(divisors(bound.mod.expr)) is (divisor <= LARGEST)


def test_what_follows_from_numbers_alone_is_one_number_of_the_host(one_constant):
    """A product of two captured numbers had 64 bits, and so had all that it divided."""

    def tiles(width, tile):
        return lambda b, h, q, k: q // (width // tile * tile) == k % (width - 1) + tile // 2

    for i in (0, 11):
        bound = bind(tiles(40 + 3 * i, 4 + i), "mask")
    width, tile = 40 + 33, 15
    assert sorted(bound.scalars) == sorted([width // tile * tile, width - 1, tile // 2])
    assert torch.equal(kept(bound), tiles(width, tile)(0, 0, Q, K))


def test_what_torch_computes_of_numbers_alone_is_the_kernels(one_constant):
    """A divisor of 0 and one above it have Mods of their own, whatever is divided."""

    def quotient(n, m):
        return lambda b, h, q, k: q < torch.full_like(q, n) // m + k

    for n, m in ((7, 2), (9, 3), (-40, 5), (2**40, 2), (50, 1), (50, -3)):
        bound = bind(quotient(n, m), "mask")
        assert torch.equal(kept(bound), quotient(n, m)(0, 0, Q, K).expand(61, 67))
    bare = Expr("scalar", "int64", (), 0), Expr("scalar", "int64", (), 1)
    quotients = make("floor_div", "int64", bare), Expr("var", "int64", (), "q_idx")
    expr = make("le", "bool", quotients)
    _, numbers = derived(expr, (7, 2), ())
    assert [number.value((9, 4)) for number in numbers] == [9, 4]
    assert numbers[1].value((9, 0)) is None
    _, numbers = derived(expr, (7, 0), numbers)
    assert [number.value((9, 0)) for number in numbers] == [9, 0]


@pytest.mark.parametrize(
    "made",
    [
        lambda i: natten_2d(20 + i, 21 + 2 * i, 3 + 2 * i),
        lambda i: sliding_tile_3d((6 + i, 6 + 2 * i, 5 + i), (2 + i, 3, 2 + i), (3, 2 + i, 1 + i)),
        lambda i: dilated_window(100 + i, 3 + i),
        lambda i: checkerboard(3 + i),
    ],
    ids=["natten", "sliding tiles", "dilated", "checkerboard"],
)
def test_positions_are_computed_in_32_bits_whatever_the_numbers(one_constant, made):
    """Beside a number of unknown size whole tiles were of 64 bits, which no loop has room for."""
    for i in (0, 3):
        bound = bind(made(i), "mask")
        text = print_mod(Captures(bound.mod, ()), Traits()).lines
        assert "int64" not in "\n".join(text)
        assert torch.equal(kept(bound), made(i)(0, 0, Q, K).expand(61, 67))
    assert "fast_" in "\n".join(text) and "//" not in "".join(text).replace("// 3)", "")


def test_one_end_of_a_clamp_is_an_argument_beside_a_constant():
    """torch.clamp refuses a number beside a tensor: every width of a canvas compiled a kernel."""
    for which in range(2):
        clear()
        mods = set()
        for i in range(13):
            bound = bind(natten_2d(20 + i * which, 21 + i * (1 - which), 5), "mask")
            mods.add(bound.mod)
        wanted = natten_2d(20 + 12 * which, 21 + 12 * (1 - which), 5)
        assert torch.equal(kept(bound), wanted(0, 0, Q, K)) and bound.scalars
        assert len(mods) == (2 if which else MAX_CONSTANT_DIVISORS + 1)


def test_a_number_past_its_limits_has_a_mod_of_its_own():
    def near(n):
        return lambda b, h, q, k: q - k <= n

    bind(near(1), "mask")
    small, large = bind(near(2), "mask"), bind(near(2**40), "mask")
    assert small.mod.scalars == ("int32",) and large.mod.scalars == ("int64",)
    assert bind(near(-7), "mask").mod is small.mod and bind(near(2**35), "mask").mod is large.mod
    assert kept(large).all() and not kept(bind(near(-(2**35)), "mask")).any()


def test_a_factor_of_positions_grows_by_steps():
    """So that a product with a small one stays in 32 bits; every step is one more Mod."""

    def scaled(n):
        return lambda b, h, q, k: q * n > k

    bind(scaled(1), "mask")
    mods = [bind(scaled(n), "mask").mod for n in (2, 5, 31, 32, 1000, 2**15, 2**16, 7, 40)]
    assert len(set(mods)) == 3 and mods[0] is mods[1] is mods[2] is mods[7]
    assert mods[3] is mods[4] is mods[5] is mods[8]
    assert "int64" not in "".join(print_mod(Captures(mods[0], ()), Traits()).lines)


def test_an_offset_beside_a_product_still_moves_freely():
    """What is only added has one range of limits: a moving offset compiles at most twice."""

    def strided(step, offset):
        return lambda b, h, q, k: q * step + offset >= k

    bind(strided(4, 1), "mask")
    found = {bind(strided(5, n), "mask").mod for n in (2, 40, 2**15 + 1, 2**20)}
    assert len(found) == 1


def test_the_launch_gives_the_multiplier_and_the_shift(one_constant):
    for n in (2, 12):
        bound = bind(by_twos(n, n), "mask")
    captures = Captures(bound.mod, ())
    (slot,) = divisors(bound.mod.expr)
    given = captured_values(captures, bound)
    assert list(given) == [argument.name for argument in captured_arguments(captures)]
    name = f"mask_scalar{slot}"
    multiplier, shift = invariant(12)
    assert given[name] == 12 and given[f"{name}_shift"] == shift
    assert given[f"{name}_multiplier"] % 2**32 == multiplier
    assert -(2**31) <= given[f"{name}_multiplier"] < 2**31
    assert {argument.type for argument in captured_arguments(captures)} == {"i32"}


def test_a_numerator_of_unknown_size_is_divided_as_ever(one_constant):
    def mod(n):
        return lambda s, b, h, q, k: s + (s * 1e12).to(torch.int64) // n

    for n in (2, 12):
        bound = bind(mod(n), "score")
    text = "\n".join(print_mod(Captures(bound.mod, ()), Traits()).lines)
    assert divisors(bound.mod.expr) and "fast_" not in text and "floor_div_int(" in text


def test_what_a_callable_clamps_itself_is_no_number_with_limits(one_constant):
    """Only a scalar of 32 bits is one, which nothing captures."""

    def mod(n):
        return lambda b, h, q, k: q // (torch.zeros_like(q) + n).clamp(1, 5) > k

    for n in (2, 12):
        bound = bind(mod(n), "mask")
        assert torch.equal(kept(bound), mod(n)(0, 0, Q, K))
    for node in walk(bound.mod.expr):
        found = number_of(node)
        assert found is None or Intervals(INDEX_RANGES)(node) == found[1]
        assert divisor_of(node) is None or node.op in DIVISIONS


def test_a_block_of_unknown_size_bounds_the_keys_too(one_constant):
    """Blocks of a causal mask rise with the row whatever their size: the loop ends there."""

    def blocks(n):
        return lambda b, h, q, k: k < (q // n + 1) * n

    for n in (2, 12):
        bound = bind(blocks(n), "mask")
    found = key_span(bound.mod.expr, Intervals(INDEX_RANGES))
    assert divisors(bound.mod.expr) and found.high is not None


def test_recorded_values_stay_constants_beside_new_ones(tmp_path):
    """Every value that was exported keeps its kernel when another one comes."""
    for n in range(2, 14):
        assert record(by_twos(n, 3), "mask", tmp_path)
    clear()
    with override(binaries=tmp_path):
        recorded = [bind(by_twos(n, 3), "mask").mod for n in range(2, 14)]
        assert stats().traces == 0 and len(set(recorded)) == 12
        for n in range(50, 60):
            beyond = bind(by_twos(n, 3), "mask")
        assert beyond.scalars == (59,) and divisors(beyond.mod.expr)
        traces = stats().traces
        assert [bind(by_twos(n, 3), "mask").mod for n in range(2, 14)] == recorded
        assert bind(by_twos(61, 3), "mask").mod is beyond.mod and stats().traces == traces
