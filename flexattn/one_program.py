"""Consumer warpgroups of a Hopper kernel that run one program.

Triton compiles a program for each warpgroup of a block that does not load. Consumers differ by
their number alone, so a kernel is written as if it had one of them, and says in a comment of its
assembly how many there are. Here its PTX becomes that of the whole block: each consumer's threads
take their place among its own 128 and meet at a hardware barrier of its own, and the block has the
threads and the registers of all. Three consumers compile in the time of one.

What the compiler places in shared memory by itself has one place for all consumers: such a kernel
names the place of all that its threads exchange, one for each consumer.

Between two waits at one barrier of shared memory Triton has all warps of a program meet, so that
none is a phase ahead when another still waits. Where the loading warp fills a tile again only when
every thread has given it back, none can be: there the kernel says that it waits alone, and the
meeting that the compiler put before that wait is taken out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from flexattn.errors import RenderError

__all__ = ["ALONE", "block_warps", "hook", "in_one_block", "shared_program"]

WARPS, THREADS = 4, 128
# The consumers' hardware barriers are 0 to 2: all warps start and end their work at this one.
EVERY_WARP = 3
# What a kernel writes before a wait for which its warps need not meet.
ALONE = "waits alone"
# Of an SM, for the threads of one block.
REGISTERS = 65536
# Kernels that were compiled before a change of what is written here are not found again.
FORM = 1

_SAID = re.compile(r"one program \(\d+\) of (?P<consumers>\d+) consumers with (?P<registers>\d+)")
_START = re.compile(
    r"(\tmov\.u32 \t(?P<thread>%r\d+), %tid\.x;\n"
    r"\tshr\.u32 \t(?P<shifted>%r\d+), (?P=thread), 5;\n"
    r"\tshfl\.sync\.idx\.b32 \t(?P<warp>%r\d+), (?P=shifted), 0, 31, -1;\n)"
    rf"\tsetp\.lt\.u32 \t(?P<first>%p\d+), (?P=warp), {WARPS};\n"
)
_MEETING = re.compile(rf"^(\tbar\.sync \t)0, {THREADS};$", re.MULTILINE)
_WAIT = "mbarrier.try_wait"
_EVERY_WARP = re.compile(r"^(\tbarrier\.sync \t)1;$", re.MULTILINE)
_TAKEN = r"\tsetmaxnreg\.inc\.sync\.aligned\.u32 \t\d+;\n"
_FIRST_TAKEN = re.compile(
    rf"(\tbarrier\.sync \t{EVERY_WARP};\n){_TAKEN}(?=\tbarrier\.sync \t{EVERY_WARP};\n)"
)
_THREADS = re.compile(r"^\.reqntid \d+$", re.MULTILINE)
_REGISTERS = re.compile(r"^\.maxnreg \d+$", re.MULTILINE)
_NAMES = re.compile(r"^(?=\t\.reg \.pred \t%p<)", re.MULTILINE)


def shared_program(consumers: int, registers: int) -> str:
    """What a kernel's assembly says of its consumers; registers: of each of their threads."""
    return f"one program ({FORM}) of {consumers} consumers with {registers} registers"


def block_warps(text: str) -> int | None:
    """Warps of a block whose source or PTX says that consumers share a program, else None."""
    said = _SAID.search(text)
    return None if said is None else WARPS * (int(said["consumers"]) + 1)


def in_one_block(ptx: str) -> str:
    """The PTX of all consumers, from that of one which says how many there are.

    Raises RenderError where the compiler wrote something else than is known here.
    """
    said = _SAID.search(ptx)
    if said is None:
        return ptx
    consumers, threads = int(said["consumers"]), THREADS * (int(said["consumers"]) + 1)
    ptx = _once(_NAMES, "\t.reg .b32 \t%meeting, %place;\n", ptx)
    # A consumer's threads compute with the last seven bits of their number, all others in a warp.
    begun = _START.search(ptx)
    ptx = _once(
        _START,
        rf"\1\tsetp.lt.u32 \t\g<first>, \g<warp>, {WARPS * consumers};" + "\n"
        "\tshr.u32 \t%meeting, \\g<warp>, 2;\n",
        ptx,
    )
    assert begun is not None
    # What a warp is to do is written where it was behind one consumer's. Computed anew, its number
    # takes none of the loading warp's registers.
    told = re.compile(rf"^(\tadd\.s32 \t%r\d+, %r\d+, ){begun['warp']};$", re.MULTILINE)
    ptx = _once(
        told,
        "\tmov.u32 \t%place, %tid.x;\n\tshr.u32 \t%place, %place, 5;\n"
        rf"\tsub.u32 \t%place, %place, {WARPS * (consumers - 1)};" + "\n" + r"\1%place;",
        ptx,
    )
    ptx = _without_meetings(ptx)
    ptx = _found(_MEETING, rf"\1%meeting, {THREADS};", ptx)
    ptx = _found(_EVERY_WARP, rf"\g<1>{EVERY_WARP};", ptx)
    # A block starts with as many registers for each thread. When work starts, the loading warps
    # give some of theirs and the consumers take them; all end with what they have.
    ptx = _once(_THREADS, f".reqntid {threads}", ptx)
    ptx = _once(_REGISTERS, f".maxnreg {REGISTERS // threads // 8 * 8}", ptx)
    ptx = _once(_FIRST_TAKEN, r"\1@\n", ptx)
    ptx = re.sub(_TAKEN, "", ptx)
    return ptx.replace("@\n", f"\tsetmaxnreg.inc.sync.aligned.u32 \t{said['registers']};\n", 1)


def _without_meetings(ptx: str) -> str:
    """Without those between what says ALONE and the wait meant."""
    kept, before_wait = [], False
    for line in ptx.splitlines(keepends=True):
        if ALONE in line:
            before_wait = True
        elif _WAIT in line:
            before_wait = False
        if not (before_wait and _MEETING.match(line)):
            kept.append(line)
    return "".join(kept)


def hook(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Triton's hook of a compile's stages that does so, behind the one there was before.

    Later releases call it without arguments too, for words that belong into the key of a cache.
    """

    def inspect(*given: Any) -> Any:
        found = before(*given) if before is not None else None
        if not given:
            return tuple(f"{each} one program {FORM}" for each in found or ("", ""))
        stages = given[1]
        make = stages.get("ptx")
        if make is not None:
            stages["ptx"] = lambda source, metadata: _made(make(source, metadata), metadata)
        return found

    return inspect


def _made(ptx: str, metadata: dict[str, Any]) -> str:
    warps = block_warps(ptx)
    if warps is not None:
        metadata["num_warps"] = warps
    return in_one_block(ptx)


def _found(pattern: re.Pattern[str], text: str, ptx: str, once: bool = False) -> str:
    ptx, count = pattern.subn(text, ptx)
    if not count or (once and count > 1):
        raise RenderError(
            f"PTX in which {pattern.pattern!r} is found {count} times",
            "consumers share a program where Triton writes it as its releases 3.6 to 3.9 do",
            'take another kernel: kernel_options={"BACKEND": "TRITON"}',
        )
    return ptx


def _once(pattern: re.Pattern[str], text: str, ptx: str) -> str:
    return _found(pattern, text, ptx, once=True)
