"""How a serving kernel reads the tensors that its mods capture."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flexattn.problem import Captures
from flexattn.render.mask_parts import MaskParts
from flexattn.render.span import free_bounds_of
from flexattn.render.triton_ops import itemsize, triton_type

__all__ = ["Peek", "peeks_of", "reads_last_keys"]


@dataclass(frozen=True, slots=True)
class Peek:
    """A function of a kernel that reads elements of a dtype where they lie.

    read: PTX's load. register: the letter of what it fills, bits: how wide that is. value: the
    element that a register named `word` holds, as Triton's text.
    """

    dtype: str
    read: str
    register: str
    bits: int
    value: str


def reads_last_keys(captures: Captures | None, mask: MaskParts | None) -> bool:
    """Whether a mask reads memory for each key, and only for the last keys of a request."""
    if captures is None or mask is None:
        return False
    printed = [part.printed for part in mask.parts]
    reads = any("tl.load(" in line for each in printed for line in (*each.early, *each.body))
    free = free_bounds_of(captures.mod)
    return reads and free is not None and not any(lowest for lowest, *_ in free)


def peeks_of(mask: MaskParts) -> tuple[Peek, ...]:
    """The functions that a mask's statements call, printed with Traits.peeks."""
    found = (re.findall(r"\bpeek_(\w+)\(", line) for line in mask.lines)
    return tuple(_peek(dtype) for dtype in dict.fromkeys(name for each in found for name in each))


def _peek(dtype: str) -> Peek:
    size = itemsize(dtype)
    read, register, bits = {1: ("u8", "r", 32), 2: ("u16", "r", 32)}.get(
        size, (f"b{8 * size}", "l" if size == 8 else "r", 8 * size)
    )
    number = "word" if bits == 8 * size else f"word.to(tl.int{8 * size})"
    value = "word != 0" if dtype == "bool" else f"{number}.to({triton_type(dtype)}, bitcast=True)"
    return Peek(dtype, read, register, bits, value)
