"""How a serving kernel reads the tensors that its mods capture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flexattn.kernels.paged_decode.config import LINE
from flexattn.kernels.printers.mask_printer import MaskParts
from flexattn.kernels.printers.spelling import buffer_names, itemsize, triton_type
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES, Captures

# At most so many lines of memory are asked for along each dimension of a captured tensor.
AHEAD = 16


@dataclass(frozen=True, slots=True)
class PredicatedLoad:
    """A function of a kernel that reads elements of a dtype where they lie.

    read: PTX's load. register: the letter of what it fills, bits: how wide that is. value: the
    element that a register named `word` holds, as Triton's text.
    """

    dtype: str
    read: str
    register: str
    bits: int
    value: str


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Elements of a captured tensor whose lines of memory a kernel asks for at its start.

    Texts of the element's address and of whether it exists, for numbers named `line`.
    """

    address: str
    exists: str


def prefetched(captures: Captures | None) -> Iterator[Prefetched]:
    """The first elements along each dimension of what a mod captures: a line each, or a row.

    That is nearly all of a small tensor. Every address is that of an element, also of a view with
    gaps, so nothing but the tensor's own memory is touched.
    """
    if captures is None:
        return
    mod = captures.mod
    for slot, buffer in enumerate(mod.buffers):
        base, sizes, strides = buffer_names(mod.kind, slot, buffer.rank)
        for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            step = f"line * {stride}"
            index = "line"
            if dim == buffer.rank - 1 and captures.contiguous[slot]:
                step = index = f"line * {LINE // itemsize(buffer.dtype)}"
            others = [f"({each} > 0)" for each in sizes if each != size]
            exists = [f"(line < {AHEAD})", f"({index} < {size})", *others]
            yield Prefetched(f"{base} + {step}", " & ".join(exists))


def reads_last_keys(captures: Captures) -> bool:
    """Whether a mask reads memory for each key, and only for the last keys of a request."""
    form = mask_form(captures.mod.expr, INDEX_RANGES)
    free = form.free_edges
    return form.loads_by_key and free is not None and not any(edge.lowest for edge in free)


def predicated_loads(mask: MaskParts) -> tuple[PredicatedLoad, ...]:
    """The functions that a mask's statements call, printed with Traits.predicated_loads."""
    found = (re.findall(r"\bpredicated_load_(\w+)\(", line) for line in mask.lines)
    return tuple(
        _predicated_load(dtype) for dtype in dict.fromkeys(name for each in found for name in each)
    )


def _predicated_load(dtype: str) -> PredicatedLoad:
    size = itemsize(dtype)
    read, register, bits = {1: ("u8", "r", 32), 2: ("u16", "r", 32)}.get(
        size, (f"b{8 * size}", "l" if size == 8 else "r", 8 * size)
    )
    number = "word" if bits == 8 * size else f"word.to(tl.int{8 * size})"
    value = "word != 0" if dtype == "bool" else f"{number}.to({triton_type(dtype)}, bitcast=True)"
    return PredicatedLoad(dtype, read, register, bits, value)
