"""The inputs of a serving kernel beside Q, K and V: lengths, scales, and what its mods capture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, several
from flexattn.kernels.paged_decode.config import LINE
from flexattn.kernels.printers.mask_printer import MaskParts
from flexattn.kernels.printers.spelling import buffer_names, itemsize, triton_type
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES, Captures
from flexattn.problem.serving import ServingForm


def request_sizes(
    form: ServingForm, device: Device, num_warps: int, by_request: bool = False
) -> dict[str, int]:
    """Elements of a vector of requests, and of the one that is loaded where that is longer.

    Triton gives threads that a short vector leaves over copies of its elements, each of which is
    loaded at a time of its own. So no two threads have the same element of what is loaded. What
    fits in one warp is then copied to all, which need no other warp from there on.

    by_request: warps go their own ways, and load for themselves.
    """
    # The interpreter has no threads. As if it had 8, few requests are copied and many are not.
    threads = 8 if device.backend == "interpreter" else num_warps * device.warp_size
    if by_request or form.requests >= threads:
        return {"REQUESTS": form.requests}
    if form.requests > device.warp_size:
        return {"REQUESTS": threads}
    return {"REQUESTS": form.requests, "LOADERS": threads}


def located(form: ServingForm) -> tuple[tuple[str, str], ...]:
    """The values of a work tile's request, each with the vector of all requests it is from."""
    found = [("b", "requests"), ("ends_at", "ends"), ("kv_len", "kv_lens")]
    if form.ragged:
        found += [("row", "rows_at"), ("q_len", "q_lens")]
    if form.offset:
        found.append(("first_key", "first_keys"))
    return tuple(found)


# A row's weights reach to twice ROOM: below 65504, and far above the smallest float16 numbers.
ROOM = 2.0**14
# Weights are in units of at least so much: its inverse times ROOM is a float32 number.
LEAST_WEIGHT = 2.0**-110


def scale_arguments(form: ServingForm) -> list[Argument]:
    """Both tensors of scales, and the steps between pages (or requests), tokens and heads."""
    if not form.scales:
        return []
    axes = "p" + "n" * by_token(form) + "h" * by_head(form)
    tensors = several("*fp32", "K_SCALE", "V_SCALE", divisible_by=4)
    return tensors + [Argument(f"stride_s{axis}", "u32") for axis in axes]


def scale_context(form: ServingForm) -> dict[str, object]:
    """The templates' variables for the scales."""
    return {
        "scales": form.scales,
        "scale_by_token": by_token(form),
        "scale_by_head": by_head(form),
    }


def scale_constants(form: ServingForm) -> dict[str, float]:
    """Constants of a kernel that has them."""
    return {"ROOM": ROOM, "LEAST_WEIGHT": LEAST_WEIGHT} if form.scales else {}


def by_token(form: ServingForm) -> bool:
    """True if the tokens of a page have scales of their own."""
    return form.scales in ("token", "token_head")


def by_head(form: ServingForm) -> bool:
    """True if heads have scales of their own."""
    return form.scales in ("page_head", "token_head")


# At most so many lines of memory are asked for along each dimension of a captured tensor.
AHEAD = 16


class PredicatedLoad(NamedTuple):
    """A function of a kernel that reads elements of a dtype where they lie.

    read: PTX's load. register: the letter of what it fills, bits: how wide that is. value: the
    element that a register named `word` holds, as Triton's text.
    """

    dtype: str
    read: str
    register: str
    bits: int
    value: str


class Prefetched(NamedTuple):
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
    """True if a mask reads memory for each key, and only for the last keys of a request."""
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
