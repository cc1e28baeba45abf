"""A pass over PTX: the number of a warp is one that ptxas knows to be the same in all its threads.

Triton shuffles the number of a thread over 32 from a warp's first lane. ptxas sees that all lanes
have the same, drops the shuffle, and in a loop whose length was read from memory computes the
number in each thread and turn. With it go the descriptors of all operands of wgmma that are the
warpgroup's own: each is then moved into uniform registers by itself, between the products. The
number of the thread shuffled first, and then divided, is one uniform register for the kernel.

A kernel that asks for this pass says so in a comment: Triton 3.6, and stores of binaries, find
kernels by their text alone. Another form of the pass has another number there.
"""

from __future__ import annotations

import re

# By which a kernel asks for this pass: its module in kernels/.
WARP_NUMBERS = "ptx.warp_numbers"
WARP_NUMBERS_FORM = "warp_numbers 1"

_READ = r"\tshfl\.sync\.idx\.b32 \t(%r\d+), {}, 0, 31, -1;\n"
# All warps start here, before those of a partition have numbers of their own.
_FIRST = re.compile(
    r"\tshr\.u32 \t(?P<number>%r\d+), (?P<thread>%r\d+), 5;\n(?="
    + _READ.format("(?P=number)")
    + ")"
)
_NAMES = re.compile(r"^(?=\t\.reg \.pred \t%p<)", re.MULTILINE)
_WARP = "%warp_number"


def block_warps(text: str) -> None:
    """A block keeps its warps."""


def merged(ptx: str) -> str:
    """The PTX in which every read of a warp's number reads one register."""
    first = _FIRST.search(ptx)
    if first is None:
        return ptx
    made = (
        f"\tshfl.sync.idx.b32 \t{_WARP}, {first['thread']}, 0, 31, -1;\n"
        f"\tshr.u32 \t{_WARP}, {_WARP}, 5;\n"
    )
    head = _NAMES.sub(f"\t.reg .b32 \t{_WARP};\n", ptx[: first.end()], count=1)
    read = re.compile(_READ.format(first["number"]))
    return head + made + read.sub(rf"\tmov.u32 \t\1, {_WARP};\n", ptx[first.end() :])
