"""How Triton spells dtypes and constants."""

from __future__ import annotations

import math
import re

# Computed in float32.
HALVES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Of these, what numpy has no dtype for.
NARROW = HALVES[1:]

# name in torch: (name in triton.language, name in a kernel's signature)
_TYPES = {
    "bool": ("int1", "i1"),
    "uint8": ("uint8", "u8"),
    "uint16": ("uint16", "u16"),
    "uint32": ("uint32", "u32"),
    "uint64": ("uint64", "u64"),
    "int8": ("int8", "i8"),
    "int16": ("int16", "i16"),
    "int32": ("int32", "i32"),
    "int64": ("int64", "i64"),
    "float16": ("float16", "fp16"),
    "bfloat16": ("bfloat16", "bf16"),
    "float32": ("float32", "fp32"),
    "float64": ("float64", "fp64"),
    "float8_e4m3fn": ("float8e4nv", "fp8e4nv"),
    "float8_e5m2": ("float8e5", "fp8e5"),
}


def triton_type(dtype: str, module: str = "tl") -> str:
    """`tl.float32` for "float32", in a module of that name."""
    return f"{module}.{_TYPES[dtype][0]}"


def signature_type(dtype: str) -> str:
    """`fp32` for "float32", as a kernel's signature names it."""
    return _TYPES[dtype][1]


def itemsize(dtype: str) -> int:
    """Bytes of an element in memory."""
    bits = re.search(r"\d+", signature_type(dtype))
    return max(1, int(bits[0]) // 8) if bits else 1


def literal(value: object, dtype: str) -> str:
    """A constant as Triton source, non-finite numbers included."""
    if dtype == "bool":
        return str(bool(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def is_literal(text: str) -> bool:
    """Whether a printed operand is a constant."""
    return text.replace(".", "").replace("-", "").replace("e", "").isdigit() or text.startswith(
        ("float(", "True", "False")
    )
