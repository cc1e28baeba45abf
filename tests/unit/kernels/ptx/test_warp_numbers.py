"""A warp's number is shuffled before it is divided, and read from one register."""

import hashlib

from flexattn.kernels.ptx.warp_numbers import WARP_NUMBERS_FORM, block_warps, merged

HEAD = "\t.reg .pred \t%p<3>;\n\t.reg .b32 \t%r<9>;\n\tmov.u32 \t%r1, %tid.x;\n"
DIVIDED = "\tshr.u32 \t%r2, %r1, 5;\n"


def read(into, number="%r2"):
    return f"\tshfl.sync.idx.b32 \t{into}, {number}, 0, 31, -1;\n"


def test_every_read_of_the_number_is_of_one_register():
    between, other = "\tsetp.lt.u32 \t%p1, %r3, 8;\n", read("%r5", "%r6")
    found = merged(HEAD + DIVIDED + read("%r3") + between + read("%r4") + other)
    assert found == (
        "\t.reg .b32 \t%warp_number;\n"
        + HEAD
        + DIVIDED
        + read("%warp_number", "%r1")
        + "\tshr.u32 \t%warp_number, %warp_number, 5;\n"
        + "\tmov.u32 \t%r3, %warp_number;\n"
        + between
        + "\tmov.u32 \t%r4, %warp_number;\n"
        + other
    )


def test_anything_else_stays():
    for text in ("", HEAD + DIVIDED, HEAD + read("%r3"), HEAD + DIVIDED + read("%r3", "%r1")):
        assert merged(text) == text
        assert block_warps(text) is None


def test_what_is_written_otherwise_has_another_number():
    """Triton 3.6 keeps kernels by their source, where WARP_NUMBERS_FORM alone tells of this."""
    found = merged(HEAD + DIVIDED + read("%r3") + read("%r4"))
    written = {"warp_numbers 1": "efa6258c3ca5021d"}
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == written[WARP_NUMBERS_FORM]
