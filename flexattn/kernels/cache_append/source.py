"""The kernel that stores new keys and values in a cache, and the one that makes tensors e4m3.

What is stored is rotated, scaled and rounded. q, k or v of 16 or 32 bits become e4m3 with factors
of heads or of blocks.
"""

from __future__ import annotations

import struct

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, several, stride_arguments
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source, make_source
from flexattn.kernels.printers.spelling import itemsize, signature_type, triton_type
from flexattn.problem.serving import AXES, AppendForm

# What the kernel rounds to, by the cache's dtype: the largest number, bits of the mantissa, and
# the exponent's bias.
EIGHT_BITS = {"float8_e4m3fn": (448.0, 3, 7), "float8_e5m2": (57344.0, 2, 15)}


def search_steps(requests: int) -> int:
    """Halvings after which a search for a token's request, among so many, has one left."""
    return (requests - 1).bit_length()


# Elements of K that a program has at a time: a thread loads 16 bytes of 16-bit numbers at once.
_ELEMENTS = 1024
# Of a program that has all heads of a token, for one scale of them.
TOKEN_ELEMENTS = 8192
# Numbers that PTX rounds to 8 bits at a time; Triton refuses tensors of fewer.
ROUNDED = 4
# A computed scale is at least so much: its inverse, and what it scales, are float32 numbers.
LEAST_SCALE = 2.0**-100


def append_rows(form: AppendForm) -> int:
    """Rows, each a head of a token, that a program has at a time: a power of two."""
    width = _power(max(form.head_dim_qk, form.head_dim_v))
    if form.scales == "token":
        return min(_power(form.heads), max(1, TOKEN_ELEMENTS // width))
    return max(1, _ELEMENTS // width)


def append_programs(form: AppendForm, tokens: int) -> int:
    """Programs of a launch: a token's heads have one scale, so one program has them all."""
    return tokens if form.scales == "token" else -(-tokens * form.heads // append_rows(form))


def append_arguments(form: AppendForm) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order; none of them depends on a length."""
    tensors = "KV" if form.head_dim_v else "K"
    new, cached = form.dtype, form.kv_dtype
    found = [Argument(x, f"*{signature_type(new)}", _address(form, new)) for x in tensors]
    # Its code is of bytes: some compilers know no type of such numbers.
    bits = "uint8" if cached in EIGHT_BITS else cached
    kind, wide = f"*{signature_type(bits)}", _address(form, cached)
    found += [Argument(f"{x}_CACHE", kind, wide) for x in tensors]
    if form.by_table:
        found += several("*i32", "TABLE", "SEQ_LENS", divisible_by=4)
        if form.slots == "ragged table":
            found.append(Argument("CU_SEQLENS", "*i32", 4))
        found += several("i32", "stride_table", "table_width", "num_requests")
        found.append(Argument("steps" if form.slots == "ragged table" else "q_len", "i32"))
    else:
        found.append(Argument("SLOTS", f"*{signature_type(form.slots)}"))
        if form.rope is not None:
            found.append(Argument("POSITIONS", f"*{signature_type(form.slots)}"))
    found += several("i32", "num_tokens", "num_pages")
    for x in tensors.lower():
        found += stride_arguments(x, "th", _step(form, new))
        found += stride_arguments(f"{x}c", "pnh", _step(form, cached))
    if form.scales:
        found += [Argument(f"{x}_SCALE", "*fp32", 4) for x in tensors]
        found += stride_arguments("s", AXES[form.scales])
    if form.rope is not None:
        if form.rope.table:
            kind = f"*{signature_type(form.rope.table)}"
            found += [*several(kind, "COS", "SIN"), Argument("stride_cos", "i64")]
            found.append(Argument("num_positions", "i32"))
        else:
            found.append(Argument("INV_FREQ", "*fp32", 4))
    return tuple(found)


def render_append(form: AppendForm, device: Device) -> Source:
    """The kernel of a form for a device."""
    rows = append_rows(form)
    settings: dict[str, object] = {
        "ROWS": rows,
        "HEADS": form.heads,
        "PAGE": form.page,
        "LEAST_SCALE": LEAST_SCALE,
    }
    if form.rope is not None:
        settings |= {"ROTARY": form.rope.dim, "HALF": form.rope.dim // 2}
    eight = form.kv_dtype in EIGHT_BITS
    if eight:
        settings |= rounding(form.kv_dtype)
    pieces = [("k", form.head_dim_qk)] + [("v", form.head_dim_v)] * (form.head_dim_v > 0)
    fewest = rows * min(_power(dim) for _, dim in pieces)
    context: dict[str, object] = {
        "form": form,
        "constants": settings,
        "tensors": [(x, x.upper(), _power(dim), dim) for x, dim in pieces],
        "eight": eight,
        # Two numbers an instruction; where there is none, with integers.
        "cvt": rounding_instruction(form.kv_dtype, device) if fewest >= ROUNDED else "",
        "element": triton_type(form.kv_dtype),
        "same": form.dtype == form.kv_dtype,
        "scale_axes": AXES[form.scales],
        "several": form.scales == "token" and form.heads > rows,
    }
    title = (
        f"append to a cache {form.dtype} as {form.kv_dtype} "
        f"D={form.head_dim_qk}/{form.head_dim_v} page={form.page} for {device.arch}"
    )
    return make_source(
        "cache_append/cache_append.py.jinja", device, [title], context, append_arguments(form)
    )


def rounding_instruction(kv_dtype: str, device: Device) -> str:
    """The end of the name of an instruction that rounds to 8 bits; "" where there is none."""
    kinds = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}
    able = device.backend == "cuda" and device.capability >= 89
    return kinds.get(kv_dtype, "") if able else ""


def rounding(kv_dtype: str) -> dict[str, object]:
    """Constants of rounding float32 to 8 bits by its bits as an integer."""
    most, mantissa, bias = EIGHT_BITS[kv_dtype]
    shift = 23 - mantissa
    # The subnormal numbers are multiples of 2^(1 - bias - mantissa).
    magic = 2.0 ** (23 + 1 - bias - mantissa)
    return {
        "MOST": most,
        "MOST_BITS": _bits(most),
        "SHIFT": shift,
        "HALF_UNIT": (1 << (shift - 1)) - 1,
        "REBIAS": (127 - bias) << mantissa,
        "LEAST_NORMAL_BITS": _bits(2.0 ** (1 - bias)),
        "MAGIC": magic,
        "MAGIC_BITS": _bits(magic),
    }


def _address(form: AppendForm, dtype: str) -> int:
    return 16 if form.aligned else itemsize(dtype)


def _step(form: AppendForm, dtype: str) -> int:
    return 16 // itemsize(dtype) if form.aligned else 1


def _bits(number: float) -> int:
    """A float32 number's bits."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


# Numbers that a program has at a time, and a warp: 32 a thread. With 128 a thread they spill.
_MOST, _OF_WARP = 8192, 1024


def rows_at_once(head_dim: int, rows: int) -> int:
    """Rows of a head, at most `rows`, that a program has at a time."""
    return min(rows, _MOST // power_above(head_dim))


def render_quantize(
    dtype: str,
    head_dim: int,
    rows: int,
    aligned: bool,
    by_block: bool,
    smooth: bool,
    stores: bool,
    device: Device,
) -> Source:
    """The kernel of tensors of a dtype, a program for each block of rows of a head.

    rows: of a block; where heads have factors, as many as a program has at a time. aligned:
    addresses and strides are multiples of 16 bytes. by_block: blocks have factors, which it
    computes. smooth: a mean is taken off first. stores: whether it makes numbers, or only finds
    the largest magnitudes.
    """
    wide = 16 if aligned else 1
    found = [
        Argument("X", f"*{signature_type(dtype)}", wide),
        *[Argument("OUT", "*u8", 16)] * stores,
    ]
    found += several("*fp32", *("MEAN",) * smooth, "FACTOR", divisible_by=4)
    found += stride_arguments("x", "bhn", 16 // itemsize(dtype) if aligned else 1)
    found += several("i32", "heads", "length", "num_tiles")
    width, at_once = power_above(head_dim), rows_at_once(head_dim, rows)
    elements = at_once * width
    settings = {"BLOCK_N": rows, "ROWS": at_once, "HEAD_DIM": head_dim, "TILE_D": width}
    large = elements >= ROUNDED
    context = {
        "parts": rows // at_once,
        "constants": settings | rounding("float8_e4m3fn"),
        "by_block": by_block,
        "smooth": smooth,
        "stores": stores,
        "cvt": rounding_instruction("float8_e4m3fn", device) if large else "",
    }
    header = [f"{dtype} of {head_dim} columns in e4m3 for {device.arch}"]
    name = "cache_append/quantize.py.jinja"
    warps = max(4, elements // _OF_WARP)
    return make_source(name, device, header, context, found, warps)
