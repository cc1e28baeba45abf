"""The pass that narrows products of P and V, on the lines that Triton writes."""

import pytest

from flexattn.errors import RenderError
from flexattn.kernels.hopper.unpadded_values import announcement, block_warps, merged


def product(columns, weights, accumulators):
    sums = ",".join(f"%r{i}" for i in range(accumulators))
    return (
        f"\twgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        f"{{{sums}}}, {weights}, %rd7, %p1, 1, 1, 1;\n"
    )


REGISTERS, DESCRIPTOR = "{%r900,%r901,%r902,%r903}", "%rd6"
SAYS = f"\tmov.b32 %r1, 0; // {announcement(80, 128)}\n"


def test_products_of_p_alone_are_narrowed():
    """Scores are as wide where a tile has 128 keys: their Q lies in shared memory."""
    scores, other = product(128, DESCRIPTOR, 64), product(64, REGISTERS, 32)
    found = merged(SAYS + scores + product(128, REGISTERS, 64) + other)
    assert found == SAYS + scores + product(80, REGISTERS, 40) + other
    assert block_warps(found) is None


def test_what_does_not_ask_stays():
    text = product(128, REGISTERS, 64)
    assert merged(text) == text


@pytest.mark.parametrize("text", ["", product(128, DESCRIPTOR, 64), product(256, REGISTERS, 128)])
def test_products_that_are_not_found_are_no_kernel(text):
    """Its tiles of V end where the products that Gluon writes do not."""
    with pytest.raises(RenderError, match="wgmma of 128 columns"):
        merged(SAYS + text)
