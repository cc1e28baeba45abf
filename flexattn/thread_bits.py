"""What PTX of consumers that share a program may know of a thread: seven bits of its number.

A consumer's threads are 128 of a block's. What the compiler wrote for one consumer is right for
all of them where it depends on the last seven bits of a thread's number alone, which one_program
takes for granted. A compiler that let consumers and loading warps share a number of the whole
block would leave outputs unwritten: its kernels are refused here.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import or_

from flexattn.one_program import EVERY_WARP

__all__ = ["strays"]

# For each bit of a register, the bits of a thread's number that it may depend on.
Bits = tuple[int, ...]
WIDTH = 32
FEW = (1 << 7) - 1
WHOLE: Bits = tuple(1 << bit for bit in range(WIDTH))
NONE: Bits = (0,) * WIDTH

_NUMBER = re.compile(r"^\tmov\.u32 \t(%r\d+), %tid\.x;$")
# What keeps, moves or joins bits of registers of 32 or 16: its name, target and operands.
_MOVES = re.compile(
    r"^\t(and|or|xor|bfe|shl|shr|mov|shfl\.sync\.idx|cvt\.u16|cvt\.u32)\.(?:b|u)(?:32|16)"
    r" \t(%rs?\d+), (%rs?\d+)(?:, (%rs?\d+|-?\d+))?(?:, (-?\d+))?(?:, -1)?;$"
)
_COMPARED = re.compile(r"^\tsetp\.\S+ \t(%p\d+), ")
_READ = re.compile(r"%rs?\d+\b")
_BEGIN = re.compile(
    rf"\tbarrier\.sync \t{EVERY_WARP};\n\tsetmaxnreg\.inc[^\n]*\n\tbarrier\.sync \t{EVERY_WARP};\n"
)
# Who is a consumer, and at which barrier it meets its own.
_TOLD = re.compile(r"^\tsetp\.lt\.u32 \t%p\d+, %r\d+, (?:8|12);$|^\tshr\.u32 \t%meeting, ")


def strays(ptx: str) -> list[str]:
    """Lines that depend on more of a thread's number than consumers of one program share."""
    begin = _BEGIN.search(ptx)
    if begin is None:
        return ["no start of the consumers' work"]
    lines = ptx.splitlines()
    behind = set(re.findall(r"%p\d+\b", ptx[begin.end() :]))
    wide = {name for name, held in _held(lines).items() if any(bits & ~FEW for bits in held)}
    found = []
    for line in lines:
        if wide.isdisjoint(_READ.findall(line)):
            continue
        if _MOVES.match(line) or _NUMBER.match(line) or _TOLD.match(line):
            continue
        compared = _COMPARED.match(line)
        # What is compared before the work begins, and not asked for again, is the first one's own.
        if compared is None or compared[1] in behind:
            found.append(line)
    return found


def _held(lines: list[str]) -> dict[str, Bits]:
    """The registers that hold bits of a thread's number.

    A loop comes back with what it made: lines are read until nothing is added.
    """
    held: dict[str, Bits] = {}
    moves = [move for line in lines if (move := _MOVES.match(line))]
    held |= {move[1]: WHOLE for line in lines if (move := _NUMBER.match(line))}
    grown = True
    while grown:
        grown = False
        for move in moves:
            if held.keys().isdisjoint(move.group(3, 4)):
                continue
            made = _made(move, held)
            known = held.get(move[2], NONE)
            joined = tuple(a | b for a, b in zip(made, known, strict=True))
            if joined != known:
                held[move[2]], grown = joined, True
    return held


def _made(move: re.Match[str], held: dict[str, Bits]) -> Bits:
    """What an instruction makes of its operands' bits."""
    name, source, other = move[1], held.get(move[3], NONE), move[4]
    if name in ("mov", "shfl.sync.idx"):
        return source
    if name.startswith("cvt"):  # to a register of 16 bits, or from one
        return source[: WIDTH // 2] + (0,) * (WIDTH // 2)
    if other.startswith("%"):
        joined = held.get(other, NONE)
        whole = tuple(a | b for a, b in zip(source, joined, strict=True))
        # By how much a register is moved is not known.
        return whole if name in ("and", "or", "xor") else (reduce(or_, whole),) * WIDTH
    number = int(other)
    if name == "and":
        return tuple(bits if number >> bit & 1 else 0 for bit, bits in enumerate(source))
    if name == "shl":
        return ((0,) * number + source)[:WIDTH]
    if name in ("shr", "bfe"):
        kept = source[number:][: int(move[5]) if name == "bfe" else WIDTH]
        return kept + (0,) * (WIDTH - len(kept))
    return source
