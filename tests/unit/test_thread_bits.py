"""What consumers of one program know of a thread: the last seven bits of its number."""

import pytest

from flexattn.thread_bits import strays

BEGIN = """\tmov.u32 \t%r1, %tid.x;
\tshr.u32 \t%r2, %r1, 5;
\tshfl.sync.idx.b32 \t%r3, %r2, 0, 31, -1;
\tsetp.lt.u32 \t%p1, %r3, 12;
\tshr.u32 \t%meeting, %r3, 2;
\tsetp.eq.b32 \t%p2, %r2, 0;
\t@%p2 mbarrier.init.shared::cta.b64 [%r9], 1;
\tbarrier.sync \t3;
\tsetmaxnreg.inc.sync.aligned.u32 \t160;
\tbarrier.sync \t3;
"""


def work(*lines):
    return BEGIN + "".join(f"\t{line}\n" for line in lines)


@pytest.mark.parametrize(
    "lines",
    [
        ("and.b32 \t%r4, %r1, 127;", "setp.eq.b32 \t%p3, %r4, 0;", "@%p3 bra \t$L;"),
        ("bfe.u32 \t%r4, %r1, 2, 5;", "add.s32 \t%r5, %r4, %r9;"),
        ("shl.b32 \t%r4, %r1, 7;", "and.b32 \t%r5, %r4, 16256;", "add.s32 \t%r6, %r5, %r9;"),
        # Bits that are joined first and masked at the end.
        (
            "shr.u32 \t%r4, %r1, 1;", "and.b32 \t%r5, %r1, 16;", "or.b32 \t%r6, %r5, %r4;",
            "shl.b32 \t%r7, %r6, 3;", "and.b32 \t%r8, %r7, 504;", "st.shared.b32 \t[%r8], %r9;",
        ),
        ("and.b32 \t%r4, %r3, 3;", "mul.lo.s32 \t%r5, %r4, 64;"),
        # As Triton 3.6 writes the parity of a key: a mask that looks at it was refused.
        (
            "cvt.u16.u32 \t%rs1, %r1;", "and.b16 \t%rs2, %rs1, 3;", "mul.wide.u16 \t%r4, %rs2, 2;",
            "cvt.u32.u16 \t%r5, %rs2;", "neg.s32 \t%r6, %r5;",
        ),
    ],
    ids=["masked", "taken", "moved", "joined", "warp of its own", "sixteen bits"],
)  # fmt: skip
def test_seven_bits_are_known(lines):
    assert strays(work(*lines)) == []


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (("add.s32 \t%r4, %r1, 1;",), 0),
        (("and.b32 \t%r4, %r1, 128;", "setp.eq.b32 \t%p3, %r4, 0;", "@%p3 bra \t$L;"), 1),
        (("bfe.u32 \t%r4, %r1, 3, 5;", "st.shared.b32 \t[%r4], %r9;"), 1),
        (("shl.b32 \t%r4, %r1, 4;", "st.shared.b32 \t[%r4], %r9;"), 1),
        (("shl.b32 \t%r4, %r1, %r9;", "and.b32 \t%r5, %r4, 1;", "cvt.u64.u32 \t%rd1, %r5;"), 2),
        (
            (
                "cvt.u16.u32 \t%rs1, %r1;",
                "and.b16 \t%rs2, %rs1, 255;",
                "mul.wide.u16 \t%r4, %rs2, 2;",
            ),
            2,
        ),
        (("setp.eq.b32 \t%p3, %r2, 0;", "@%p3 st.shared.b32 \t[%r9], %r9;"), 0),
    ],
    ids=[
        "whole",
        "eighth",
        "too many",
        "not masked",
        "by a register",
        "sixteen bits",
        "a warp of the block",
    ],
)
def test_more_bits_are_found(lines, number):
    assert strays(work(*lines)) == ["\t" + lines[number]]


def test_what_was_compared_before_is_not_asked_for_again():
    """A later Triton asks for the first warp where it writes barriers, which one consumer does."""
    assert strays(work("@%p2 cp.async.bulk.commit_group;")) == ["\tsetp.eq.b32 \t%p2, %r2, 0;"]


def test_a_loop_brings_bits_back():
    looped = ("or.b32 \t%r4, %r6, 1;", "mov.b32 \t%r6, %r1;", "add.s32 \t%r7, %r4, 1;")
    assert strays(work(*looped)) == ["\tadd.s32 \t%r7, %r4, 1;"]


def test_work_that_never_starts_is_no_kernel():
    assert strays("\tmov.u32 \t%r1, %tid.x;\n")
