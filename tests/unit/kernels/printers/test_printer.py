"""A mod as Triton statements: what is hoisted, how wide integers are, and what is checked."""

import re

import pytest
import torch

from flexattn.catalogue import alibi, document, natten_2d, relative_bias, softcap
from flexattn.errors import UnsupportedError
from flexattn.kernels.hopper.source import HOPPER
from flexattn.kernels.paged_decode.engines import WARPS_DIALECT
from flexattn.kernels.printers.triton_printer import Traits, print_mod
from flexattn.mods import bind
from flexattn.problem import Captures
from tests.cases import CASES
from tests.printed_ops import mod

HARDWARE = Traits()
table = torch.zeros(9)


def printed(fn, kind="score", traits=HARDWARE):
    bound = bind(fn, kind)
    return print_mod(Captures(bound.mod, (True,) * len(bound.tensors)), traits)


def text(found):
    return "\n".join((*found.hoisted, *found.early, *found.body, found.result))


def loads(lines):
    return sum("tl.load" in line for line in lines)


def test_loads_of_rows_alone_come_before_the_loop():
    found = printed(alibi(8, "cpu"))
    assert loads(found.hoisted) == 1 and loads((*found.early, *found.body)) == 0


def test_loads_that_do_not_wait_for_the_score_come_before_it():
    """A gather after the product of Q and K, where all wait for it, took twice as long."""
    found = printed(document(torch.zeros(9).int()), "mask")
    assert [loads(lines) for lines in (found.hoisted, found.early, found.body)] == [1, 1, 0]
    found = printed(lambda s, b, h, q, k: s * table[k] * table[q - k] + q * k)
    assert [loads(lines) for lines in (found.hoisted, found.early, found.body)] == [0, 2, 0]
    assert "q_idx * kv_idx" not in "".join(found.early)
    found = printed(lambda s, b, h, q, k: table[s.to(torch.int32) % 9 + q])
    assert [loads(lines) for lines in (found.hoisted, found.early, found.body)] == [0, 0, 1]


def test_the_rows_part_of_an_address_comes_before_the_loop():
    found = printed(relative_bias(torch.zeros(8, 64), 32))
    assert any("score_buf0 + h * score_buf0_stride0" in line for line in found.hoisted)
    assert loads(found.hoisted) == 0 and loads(found.early) == 1
    assert "score_buf0_stride0" not in "".join(found.early + found.body)


def test_arithmetic_of_rows_alone_comes_before_the_loop():
    found = printed(natten_2d(64, 48, 5), "mask")
    assert any("q_idx // 48" in line for line in found.hoisted)
    assert "q_idx" not in "".join(found.body)
    assert all("kv_idx" not in line for line in found.hoisted)


def test_a_row_temperature_is_computed_once_a_tile():
    found = printed(lambda s, b, h, q, k: s * torch.log(q + 3.0))
    assert any("tl.log" in line for line in found.hoisted)
    assert "tl.log" not in "".join(found.body)


@pytest.mark.parametrize(
    ("mod", "wide"),
    [
        (lambda s, b, h, q, k: s + (q - k), False),
        (lambda s, b, h, q, k: s + (31 * q - k), False),
        (lambda s, b, h, q, k: s + (q - k) % 7, False),
        (lambda s, b, h, q, k: s + q * k, True),
        (lambda s, b, h, q, k: s + (q * 1000 + k), True),
        (lambda s, b, h, q, k: s + (q * k) % 7, True),
    ],
    ids=["difference", "stride", "remainder", "product", "large_factor", "remainder_of_product"],
)
def test_integers_are_as_wide_as_their_range(mod, wide):
    """Lengths go to 2**26: what can leave 32 bits there is computed in 64, all else in 32."""
    assert ("int64" in text(printed(mod))) is wide


def test_a_product_is_widened_before_it_is_made():
    found = text(printed(lambda s, b, h, q, k: s + q * k))
    assert re.search(r"\.to\(tl\.int64\) \*|\* \w+\.to\(tl\.int64\)", found)


@pytest.mark.parametrize(
    ("mod", "helper"),
    [
        (lambda s, b, h, q, k: s + (q - k) // 7, "floor_div_int("),
        (lambda s, b, h, q, k: s + (q - k) % 7, "floor_mod_int("),
        (lambda s, b, h, q, k: s + (s - 1) // 0.5, "floor_div_float("),
        (lambda s, b, h, q, k: s + (s - 1) % 0.5, "floor_mod_float("),
        (lambda s, b, h, q, k: s + q // 7 + k % 5, None),
        (lambda s, b, h, q, k: s + (q + k) // 7, None),
    ],
    ids=["div", "mod", "float_div", "float_mod", "indices", "sum"],
)
def test_division_floors_only_where_something_is_negative(mod, helper):
    """Triton's // truncates, as C's does; torch's floors."""
    found = text(printed(mod))
    assert helper in found if helper else "floor_" not in found


def test_an_index_that_may_be_negative_wraps_and_is_checked():
    found = text(printed(lambda s, b, h, q, k: s + table[q - k]))
    assert "+ score_buf0_size0" in found
    # As unsigned numbers, those below 0 are above every size: one comparison checks both ends.
    assert ".to(tl.uint32) < score_buf0_size0.to(tl.uint32)" in found


def test_an_index_that_cannot_be_negative_is_checked_above_alone():
    found = text(printed(lambda s, b, h, q, k: s + table[k]))
    assert "tl.where" not in found and ">= 0)" not in found
    assert "kv_idx < score_buf0_size0" in found and "other=0" in found


@pytest.mark.parametrize(
    ("traits", "name"),
    [
        (Traits(fast_tanh=True, short_tanh=True), "fast_tanh("),
        (Traits(short_tanh=True), "short_tanh("),
        (Traits(), "libdevice.tanh("),
        (Traits(interpreted=True, fast_tanh=True), "libdevice.tanh("),
    ],
    ids=["hardware", "short", "exact", "interpreter"],
)
def test_tanh_is_as_exact_as_the_output_needs(traits, name):
    assert name in text(printed(softcap(50.0), traits=traits))


@pytest.mark.parametrize(
    ("mod", "rough"),
    [
        (lambda s, b, h, q, k: 20 * torch.tanh(s / 20) + table[k], True),
        (lambda s, b, h, q, k: torch.where(q > k, torch.tanh(s + table[k]), s) / 2, True),
        (lambda s, b, h, q, k: torch.tanh(torch.where(q > k, s, -s)).abs(), True),
        (lambda s, b, h, q, k: s + torch.tanh(table[k]), False),
        (lambda s, b, h, q, k: torch.tanh(torch.where(q == 6, s, -4.0) + table[k]), False),
        (lambda s, b, h, q, k: torch.tanh(s.clamp(-1, 1)), False),
        (lambda s, b, h, q, k: s + torch.atanh(torch.tanh(s) * 0.75), False),
        (lambda s, b, h, q, k: s + torch.log1p(-torch.tanh(s) * 0.999), False),
        (lambda s, b, h, q, k: s / (1.001 - torch.tanh(s)), False),
        (lambda s, b, h, q, k: torch.where(torch.log(torch.tanh(s)) > q, s, -s), False),
    ],
    ids=["cap", "biased", "chosen", "bias", "one row", "clamped", "atanh", "log1p", "div", "log"],
)
def test_the_hardwares_tanh_is_used_where_roundings_of_scores_hide_its_error(mod, rough):
    """Random mod 249 of seed 0 has the score in one row, and no score elsewhere; atanh reads tanh.

    Its scores were wrong by up to 2^-11, where the budget knows roundings of float32 alone. No
    kernel was right on an H200, and the call of e4m3 gave an error.
    """
    traits = Traits(fast_tanh=True, short_tanh=True)
    found = text(printed(mod, traits=traits))
    assert ("fast_tanh(" in found, "short_tanh(" in found) == (rough, not rough)
    assert "fast_tanh(" in text(printed(mod, traits=Traits(fast_tanh=True))), "it is forced"


def test_a_number_seen_twice_is_an_argument():
    def scaled(factor):
        return lambda s, b, h, q, k: s * factor

    first = printed(scaled(0.5))
    second = printed(scaled(0.75))
    assert "0.5" in text(first) and "score_scalar0" in text(second)


def test_integer_powers_need_a_constant():
    with pytest.raises(UnsupportedError, match="constant exponent"):
        printed(lambda s, b, h, q, k: s + q**k)


@pytest.mark.parametrize(
    "traits", [HARDWARE, Traits(interpreted=True)], ids=["gpu", "interpreter"]
)
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_every_case_prints_python_whose_lines_are_in_their_place(entry, traits):
    built = entry.make(2, 4, 2, 37, 53)
    for kind, fn in (("score", built.score_mod), ("mask", built.mask_mod)):
        if fn is None:
            continue
        found = printed(fn, kind, traits)
        compile(text(found), entry.name, "exec")
        for line in found.early:
            assert not re.search(r"\bscore\b", line)
        for line in found.hoisted:
            assert "kv_idx" not in line and not re.search(r"\bscore\b", line)


DIALECTS = {"hopper": (HOPPER, {"PropagateNan"}), "warps": (WARPS_DIALECT, None)}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_operations_are_printed_in_their_dialect(dtype, name):
    """Gluon's text was made of Triton's by regular expressions: each template missed others."""
    dialect, left = DIALECTS[name]
    found = text(printed(mod("score_mod", "key", dtype), traits=Traits(dialect=dialect)))
    named = set(re.findall(r"\btl\.(\w+)", found))
    assert "sigmoid" not in named and (left is None or named <= left)
    zeros = re.findall(r"\.zeros\((.*)\)", found)
    assert zeros and all(each.startswith(dialect.key.shape) for each in zeros)
    assert all(each.endswith(dialect.key.layout) for each in zeros)
