"""A pass over PTX: all consumer warpgroups of a Hopper kernel run one copy of their code.

Triton compiles the code of a warp-specialised partition once for each partition, and a kernel with
two or three consumers is two or three times the code, and the compile time. Consumers differ by
their number alone, so a kernel that asks for this pass is written with one consumer, and says in
a comment of its inline assembly how many there are. The pass makes its PTX that of all:

* the first `consumers` warpgroups enter the consumer's code, each with the thread numbers 0 to 127
  and a hardware barrier of its own; the producer warps see the numbers they were compiled for;
* the block has the threads and the registers of all of them;
* between two waits at one mbarrier Triton makes all warps of a partition meet, so that none is a
  phase ahead. Where the producer fills a buffer again only when every thread has released it,
  none can be: there the kernel says so, and the meeting before that wait is taken out.

What the compiler places in shared memory by itself has one place for all consumers: such a kernel
allocates what its threads exchange, a place for each consumer.

Without it 21 forwards on an H200 with Triton 3.6 take 1.016 of the time in the mean: 0.99 at 80
columns, 1.00 to 1.01 at 128 and 256, 1.02 to 1.04 at 64, and 1.03 to 1.08 beside documents, a soft
cap, ALiBi and a bias by distance (`h200-ptx-merge-consumers.json` in bench/results).

The kernel's file, compiled without the pass, has one consumer and waits for the others for ever:
the same config with merge_consumers=False has a partition for each consumer, and needs no pass.
"""

from __future__ import annotations

import re

from flexattn.errors import RenderError

NAME = "merge_consumers"
WARPS, THREADS = 4, 128
# The consumers' hardware barriers are 0 to 2: all warps start and end their work at this one.
EVERY_WARP = 3
# What a kernel writes before a wait for which its warps need not meet.
ALONE = "waits alone"
# Of an SM, for the threads of one block.
REGISTERS = 65536
# Part of every announcement: a kernel that an older form of the pass made has another name.
FORM = 2

_ANNOUNCED = re.compile(
    rf"{NAME} {FORM}: (?P<consumers>\d+) consumers of (?P<registers>\d+) registers"
)
_START = re.compile(
    r"(\tmov\.u32 \t(?P<thread>%r\d+), %tid\.x;\n"
    r"\tshr\.u32 \t(?P<group>%r\d+), (?P=thread), 5;\n"
    r"\tshfl\.sync\.idx\.b32 \t(?P<warp>%r\d+), (?P=group), 0, 31, -1;\n)"
    rf"\tsetp\.lt\.u32 \t(?P<first>%p\d+), (?P=warp), {WARPS};\n"
)
_NUMBER = re.compile(r"^\tmov\.u32 \t%r\d+, %tid\.x;$", re.MULTILINE)
_MEETING = re.compile(rf"^(\tbar\.sync \t)0, {THREADS};$", re.MULTILINE)
_WAIT = "mbarrier.try_wait"
_EVERY_WARP = re.compile(r"^(\tbarrier\.sync \t)1;$", re.MULTILINE)
_TAKEN = r"\tsetmaxnreg\.inc\.sync\.aligned\.u32 \t\d+;\n"
_FIRST_TAKEN = re.compile(
    rf"(\tbarrier\.sync \t{EVERY_WARP};\n){_TAKEN}(?=\tbarrier\.sync \t{EVERY_WARP};\n)"
)
_EFFECTS = re.compile(r"\t(?:st|atom|red|bar|barrier|mbarrier|cp|fence|setmaxnreg)\b|inline asm")
_THREADS = re.compile(r"^\.reqntid \d+$", re.MULTILINE)
_REGISTERS = re.compile(r"^\.maxnreg \d+$", re.MULTILINE)
_NAMES = re.compile(r"^(?=\t\.reg \.pred \t%p<)", re.MULTILINE)


def announcement(consumers: int, registers: int) -> str:
    """The line about consumers in a kernel's assembly; registers: of each of their threads."""
    return f"{NAME} {FORM}: {consumers} consumers of {registers} registers"


def block_warps(text: str) -> int | None:
    """Warps of a block whose source or PTX asks for the pass, else None."""
    found = _ANNOUNCED.search(text)
    return None if found is None else WARPS * (int(found["consumers"]) + 1)


def merged(ptx: str) -> str:
    """The PTX of all consumers, from that of one which says how many there are.

    Raises RenderError where the compiler wrote something else than is known here.
    """
    found = _ANNOUNCED.search(ptx)
    if found is None:
        return ptx
    consumers, threads = int(found["consumers"]), THREADS * (int(found["consumers"]) + 1)
    ptx = _once(_NAMES, "\t.reg .b32 \t%meeting, %place;\n", ptx)
    ptx = _enter(ptx, consumers)
    ptx = _without_meetings(ptx)
    ptx = _found(_MEETING, rf"\1%meeting, {THREADS};", ptx)
    ptx = _found(_EVERY_WARP, rf"\g<1>{EVERY_WARP};", ptx)
    # A block starts with as many registers for each thread. When work starts, the producer warps
    # give some of theirs and the consumers take them; all end with what they have.
    ptx = _once(_THREADS, f".reqntid {threads}", ptx)
    ptx = _once(_REGISTERS, f".maxnreg {REGISTERS // threads // 8 * 8}", ptx)
    ptx = _once(_FIRST_TAKEN, r"\1@\n", ptx)
    ptx = re.sub(_TAKEN, "", ptx)
    return ptx.replace("@\n", f"\tsetmaxnreg.inc.sync.aligned.u32 \t{found['registers']};\n", 1)


def _enter(ptx: str, consumers: int) -> str:
    """With every warp on its way, and every thread under the number that its code expects."""
    start = _START.search(ptx)
    if start is None or len(_NUMBER.findall(ptx)) != 1:
        raise _unknown("a block's start", "it reads the number of a thread once")
    thread, group, warp, first = start.group("thread", "group", "warp", "first")
    ptx = _once(
        _START,
        rf"\1\tsetp.lt.u32 \t{first}, {warp}, {WARPS * consumers};" + "\n"
        f"\tshr.u32 \t%meeting, {warp}, 2;\n",
        ptx,
    )
    split = re.compile(
        r"\tshr\.u32 \t%meeting, .*\n(?P<between>(?:\t(?!@).*\n)*)"
        rf"(?:\t@{first} bra \t(?P<consume>\$\w+);\n\tbra\.uni \t(?P<load>\$\w+);\n"
        rf"|\t@!{first} bra \t(?P<load_behind>\$\w+);\n)"
    ).search(ptx)
    numbers = re.compile(rf"{thread}\b|{group}\b|{warp}\b")
    if split is None:
        raise _unknown("a block's first branch", "its warps part where their number is known")
    # What is computed of a number before the warps part is computed behind it, on both ways.
    between = split["between"] if numbers.search(split["between"]) else ""
    if _EFFECTS.search(between):
        raise _unknown("a block's first branch", "what stands before it only computes")
    more = consumers - 1
    consume = (
        f"\tand.b32 \t{thread}, {thread}, {THREADS - 1};\n"
        f"\tand.b32 \t{group}, {group}, {WARPS - 1};\n{between}"
    )
    load = (
        f"\tsub.s32 \t{thread}, {thread}, {THREADS * more};\n"
        f"\tsub.s32 \t{group}, {group}, {WARPS * more};\n{between}"
    )
    if split["consume"] is None:
        ptx = ptx[: split.end()] + consume + ptx[split.end() :]
    else:
        ptx = _behind(split["consume"], consume, ptx)
    ptx = _behind(split["load"] or split["load_behind"], load, ptx)
    # What a warp is to do is written where it was behind one consumer's. Computed anew, its number
    # takes none of the producer's registers.
    told = re.compile(rf"^(\tadd\.s32 \t%r\d+, %r\d+, ){warp};$", re.MULTILINE)
    return _once(
        told,
        "\tmov.u32 \t%place, %tid.x;\n\tshr.u32 \t%place, %place, 5;\n"
        rf"\tsub.u32 \t%place, %place, {WARPS * more};" + "\n" + r"\1%place;",
        ptx,
    )


def _behind(label: str, text: str, ptx: str) -> str:
    if len(re.findall(rf"\bbra(?:\.uni)? \t{re.escape(label)};", ptx)) != 1:
        raise _unknown(f"other ways to {label}", "the warps come to their work once")
    return _once(re.compile(rf"^({re.escape(label)}:.*\n)", re.MULTILINE), rf"\g<1>{text}", ptx)


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


def _found(pattern: re.Pattern[str], text: str, ptx: str, once: bool = False) -> str:
    ptx, count = pattern.subn(text, ptx)
    if not count or (once and count > 1):
        raise _unknown(f"{pattern.pattern!r}, found {count} times", "it is found")
    return ptx


def _once(pattern: re.Pattern[str], text: str, ptx: str) -> str:
    return _found(pattern, text, ptx, once=True)


def _unknown(what: str, rule: str) -> RenderError:
    return RenderError(
        f"PTX with {what}",
        f"{rule} where Triton writes PTX as its releases 3.6 to 3.9 do",
        'take the kernel without the pass: kernel_options={"MERGE_CONSUMERS": False}',
    )
