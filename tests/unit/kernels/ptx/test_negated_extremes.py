"""Negations that a signed minimum or maximum reads are written so that ptxas keeps them."""

import pytest

from flexattn.kernels.ptx.negated_extremes import NEGATED_EXTREMES, block_warps, guarded, merged
from flexattn.kernels.ptx.stages import OWN_STAGES, Stages

NEGATED = "\tneg.s32 \t%r2, %r1;\n"
INVERTED = "\tnot.b32 \t%r2, %r1;\n\tadd.s32 \t%r2, %r2, 1;\n"
# What gives %r1 a value of its own.
READ = "\tld.global.b32 \t%r1, [%rd1];\n"


def most(to, one, other, name="max.s32"):
    return f"\t{name} \t{to}, {one}, {other};\n"


@pytest.mark.parametrize("order", [("%r1", "%r2"), ("%r2", "%r1")])
def test_the_maximum_of_x_and_minus_x_is_its_absolute_value(order):
    """Of Triton 3.8 and 3.9: a tiled neighbourhood, (abs(x) <= 1) & (abs(y) <= 1), lost half."""
    after = most("%r5", "%r3", "%r4")
    found = merged(READ + NEGATED + most("%r3", *order) + after)
    assert found == READ + NEGATED + "\tabs.s32 \t%r3, %r1;\n" + after


@pytest.mark.parametrize("name", ["max.s32", "min.s32"])
@pytest.mark.parametrize("order", [("%r4", "%r2"), ("%r2", "%r4"), ("%r2", "%r2")])
def test_other_negations_are_inverted(name, order):
    """Written by users in any release: torch.maximum(torch.maximum(a, -b), c) lost the minus.

    Whichever place it has: ptxas puts what all threads share second by itself.
    """
    more = most("%r5", *order, name)
    assert merged(READ + NEGATED + more) == READ + INVERTED + more
    assert merged(READ + NEGATED.replace("neg.s32 \t%r2,", "sub.s32 \t%r2, 0,") + more) == (
        READ + INVERTED + more
    )


def test_a_minimum_of_x_and_minus_x_is_no_absolute_value():
    more = most("%r3", "%r1", "%r2", "min.s32")
    assert merged(READ + NEGATED + more) == READ + INVERTED + more


@pytest.mark.parametrize("again", ["%r1", "%r2"])
def test_a_register_that_is_written_twice_may_hold_something_else(again):
    """A loop's: what was negated in one turn is another number in the next."""
    loop = f"\tmov.b32 \t{again}, %r9;\n" + most("%r3", "%r1", "%r2")
    assert merged(READ + NEGATED + loop) == READ + INVERTED + loop


def test_moves_and_guards_are_followed():
    text = "\t@%p1 neg.s32 \t%r2, %r1;\n\tmov.b32 \t%r6, %r2;\n" + most("%r3", "%r4", "%r6")
    guard = "\t@%p1 not.b32 \t%r2, %r1;\n\t@%p1 add.s32 \t%r2, %r2, 1;\n"
    assert merged(text) == guard + text[text.index("\tmov") :]


def test_sixteen_bits_are_the_same():
    text = "\tneg.s16 \t%rs2, %rs1;\n\tmax.s16 \t%rs3, %rs4, %rs2;\n"
    assert merged(text) == (
        "\tnot.b16 \t%rs2, %rs1;\n\tadd.s16 \t%rs2, %rs2, 1;\n\tmax.s16 \t%rs3, %rs4, %rs2;\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "", READ + NEGATED, most("%r3", "%r1", "%r2"), NEGATED + most("%r3", "%r4", "%r5"),
        NEGATED + most("%r3", "%r1", "%r2", "max.u32"),
        NEGATED + most("%r3", "%r1", "%r2", "add.s32"),
        "\tneg.f32 \t%r2, %r1;\n" + most("%r3", "%r1", "%r2", "max.f32"),
    ],
)  # fmt: skip
def test_anything_else_stays(text):
    assert merged(text) == text and block_warps(text) is None


def test_every_kernel_of_chips_that_fuse_passes():
    other = Stages(("ptx.narrow_products",), "ptxas")
    assert guarded(other, 90) == Stages(("ptx.narrow_products", NEGATED_EXTREMES), "ptxas")
    assert guarded(OWN_STAGES, 100).passes == (NEGATED_EXTREMES,)
    assert guarded(OWN_STAGES, 89) == guarded(OWN_STAGES, 0) == OWN_STAGES
