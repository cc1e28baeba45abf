"""The pass that narrows products to the columns of a head, on the lines that Triton writes."""

import re

import pytest

from flexattn.errors import RenderError
from flexattn.kernels.ptx.narrow_products import announcement, block_warps, from_registers, merged

COMMIT = "\twgmma.commit_group.sync.aligned;\n"


def step(columns, sums, operands):
    registers = ",".join(f"%r{i}" for i in range(sums))
    return (
        f"\twgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        f"{{{registers}}}, {operands}, %p1, 1, 1, 1;\n"
    )


def product(columns, sums, steps, operands="%rd6, %rd7"):
    return step(columns, sums, operands) * steps + COMMIT


def says(*numbers):
    return f"\tmov.b32 %r1, 0; // {announcement(*numbers)}\n"


def bare(text):
    """Without announcements, which are said once, and lines that hold nothing."""
    text = re.sub(r"narrow_products 2: .* columns", "", text)
    return [line for line in text.splitlines() if line.strip()]


def test_each_product_is_as_narrow_as_it_says():
    """Those behind it are of other products, whose commits stand between."""
    registers = "{%r900,%r901,%r902,%r903}, %rd8"
    scores, sums = says((6, 8), (64, 64)), says((4, 4), (96, 128))
    other = product(128, 64, 4)
    text = scores + product(64, 32, 8) + other + sums + product(128, 64, 4, registers) + other
    found = scores + product(64, 32, 6) + other + sums + product(96, 48, 4, registers) + other
    assert bare(merged(text)) == bare(found)
    assert block_warps(found) is None


def test_what_does_not_ask_stays():
    assert merged(product(128, 64, 4)) == product(128, 64, 4)


@pytest.mark.parametrize("text", ["", product(64, 32, 8), product(128, 64, 3)])
def test_products_that_are_not_found_are_no_kernel(text):
    """In silence dq would lack columns that nobody multiplies."""
    with pytest.raises(RenderError, match="4 steps and 128 columns"):
        merged(says((4, 4), (96, 128)) + text)


IN_REGISTERS = "{%r900,%r901,%r902,%r903}, %rd7"
OF_P = f"\tmov.b32 %r1, 0; // {from_registers(80, 128)}\n"


def test_products_from_registers_are_narrowed():
    """Scores are as wide where a tile has 128 keys: their Q lies in shared memory."""
    scores, other = product(128, 64, 4), product(64, 32, 4, IN_REGISTERS)
    found = merged(OF_P + scores + product(128, 64, 2, IN_REGISTERS) + other)
    assert found == OF_P + scores + product(80, 40, 2, IN_REGISTERS) + other
    assert block_warps(found) is None


@pytest.mark.parametrize("text", ["", product(128, 64, 4), product(256, 128, 4, IN_REGISTERS)])
def test_no_product_from_registers_is_no_kernel(text):
    """Its tiles of V end where the products that Gluon writes do not."""
    with pytest.raises(RenderError, match="no product of 128 columns"):
        merged(OF_P + text)
