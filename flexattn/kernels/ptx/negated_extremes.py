"""A pass over PTX: no signed minimum or maximum reads a negation that ptxas can see.

On sm_90 and sm_100 ptxas makes one instruction (VIMNMX3) of a minimum of a minimum, or a maximum
of a maximum. That of CUDA 12.8 to 13.3 drops a negation on its way into it: `max(max(a, -b), c)`
becomes `max(max(a, b), c)`, in silence; that of 13.4 does not. Triton's releases up to 3.7 write
an absolute value as `abs.s32`; from 3.8 on it is `max(x, -x)`. With two side by side, as in
`(abs(x) <= 1) & (abs(y) <= 1)`, which is one comparison of their maximum, x lost its own.

The pass is for right numbers, whatever it costs. No form of a kernel's text does the same, because
the compiler makes such negations itself.

Where a maximum is that of x and -x, it is written as the absolute value. Every other negation that
a minimum or maximum reads is written as ~x + 1, which ptxas keeps. Either is right everywhere, and
an absolute value costs nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from flexattn.kernels.ptx.stages import Stages

NEGATED_EXTREMES = "ptx.negated_extremes"
# The first that has VIMNMX3.
_FUSES = 90

_NEGATED = re.compile(
    r"^(?P<head>[ \t]*(?:@!?%\w+\s+)?)(?:neg\.s(?P<bits>16|32)\s+(?P<to>%\w+),\s*"
    r"|sub\.[su](?P<bits_2>16|32)\s+(?P<to_2>%\w+),\s*0,\s*)(?P<of>%\w+);",
    re.MULTILINE,
)
_EXTREME = re.compile(
    r"^(?P<head>[ \t]*(?:@!?%\w+\s+)?)(?P<name>max|min)\.s(?P<bits>16|32)\s+"
    r"(?P<to>%\w+),\s*(?P<one>%\w+),\s*(?P<other>%\w+);",
    re.MULTILINE,
)
_MOVED = re.compile(r"^[ \t]*(?:@!?%\w+\s+)?mov\.[bsu](?:16|32)\s+(%\w+),\s*(%\w+);", re.MULTILINE)
_WRITTEN = re.compile(
    r"^[ \t]*(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%[\w|%]+)\s*,", re.MULTILINE
)


def guarded(stages: Stages, capability: int) -> Stages:
    """A kernel's stages, with this pass where an NVIDIA GPU of that compute capability fuses."""
    if capability < _FUSES:
        return stages
    return replace(stages, passes=(*stages.passes, NEGATED_EXTREMES))


def block_warps(text: str) -> None:
    """A block keeps its warps."""


def merged(ptx: str) -> str:
    """The PTX in which ptxas sees no negation that a signed minimum or maximum reads."""
    source = {found["to"] or found["to_2"]: found["of"] for found in _NEGATED.finditer(ptx)}
    if not source or not _EXTREME.search(ptx):
        return ptx
    writes = Counter(re.findall(r"%\w+", " ".join(_WRITTEN.findall(ptx))))

    def absolute(found: re.Match[str]) -> str:
        """`abs` in place of the maximum of x and -x, if each is written once; else the text."""
        for x, negated in (found.group("one", "other"), found.group("other", "one")):
            once = writes[x] == writes[negated] == 1
            if found["name"] == "max" and once and source.get(negated) == x:
                return f"{found['head']}abs.s{found['bits']} \t{found['to']}, {x};"
        return found[0]

    ptx = _EXTREME.sub(absolute, ptx)
    read = {each for found in _EXTREME.finditer(ptx) for each in found.group("one", "other")}
    moves, known = _MOVED.findall(ptx), -1
    while known != len(read):
        known = len(read)
        read |= {before for after, before in moves if after in read}

    def inverted(found: re.Match[str]) -> str:
        to, bits = found["to"] or found["to_2"], found["bits"] or found["bits_2"]
        if to not in read:
            return found[0]
        head = found["head"]
        return f"{head}not.b{bits} \t{to}, {found['of']};\n{head}add.s{bits} \t{to}, {to}, 1;"

    return _NEGATED.sub(inverted, ptx)
