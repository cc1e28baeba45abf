"""A term is the text of an expression in torch, with its dtype and the interval of its values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

INTEGERS = ("int64", "int32", "int8", "uint8")
FLOATS = ("float32", "float16", "bfloat16")
# Lengths of up to this many rows and keys: what the intervals of q_idx and kv_idx say.
LONGEST = 8192
# Integers stay so small that float32 holds them, floats so small that a softmax means something.
WHOLE, MAGNITUDE = 2**20, 64.0


@dataclass(frozen=True, slots=True)
class Term:
    """dtype: "" of a Python number, which takes no part in torch's promotion."""

    text: str
    dtype: str
    low: float
    high: float

    @property
    def size(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def fits(self, dtype: str) -> bool:
        """Whether an integer dtype holds all values."""
        info = torch.iinfo(getattr(torch, dtype))
        return info.min <= self.low and self.high <= info.max

    def cast(self, dtype: str) -> Term:
        """In another dtype that holds all values; the text as users write it."""
        if not self.dtype or self.dtype == dtype:
            return self
        short = {"int64": ".long()", "int32": ".int()", "float32": ".float()"}
        text = self.text + short.get(dtype, f".to(torch.{dtype})")
        return replace(self, text=text, dtype=dtype)


VARIABLES = {
    "q_idx": Term("q_idx", "int64", 0, LONGEST - 1),
    "kv_idx": Term("kv_idx", "int64", 0, LONGEST - 1),
    "h": Term("h", "int64", 0, 63),
    "b": Term("b", "int64", 0, 63),
}
DISTANCE = Term("(q_idx - kv_idx)", "int64", 1 - LONGEST, LONGEST - 1)


def constant(value: float) -> Term:
    """A Python number."""
    return Term(repr(value) if value >= 0 else f"({value!r})", "", value, value)


def promoted(a: Term, b: Term) -> str:
    """torch's dtype of an operation on two 0-d tensors, or on one and a number."""
    if a.dtype and b.dtype:
        both = torch.promote_types(getattr(torch, a.dtype), getattr(torch, b.dtype))
        return str(both).removeprefix("torch.")
    return a.dtype or b.dtype


def integral(form: str, a: Term, b: Term, low: float, high: float) -> Term:
    """An operation on integers in a dtype that overflows nowhere; form: "({} + {})"."""
    dtype = promoted(a, b)
    result = Term("", dtype, low, high)
    if not all(each.fits(dtype) for each in (a, b, result)):
        a, b = a.cast("int64"), b.cast("int64")
        dtype = "int64"
    return Term(form.format(a.text, b.text), dtype, low, high)


def floating(form: str, a: Term, b: Term, low: float, high: float) -> Term:
    """An operation on floats, or on a float and an integer, that is finite in its dtype."""
    if max(a.size, b.size, abs(low), abs(high)) > 3e4:
        a, b = (each.cast("float32") if each.dtype == "float16" else each for each in (a, b))
    dtype = promoted(a, b)
    if dtype in INTEGERS:
        dtype = "float32"
    return Term(form.format(a.text, b.text), dtype, low, high)


def corners(combine, a: Term, b: Term) -> tuple[float, float]:
    """The interval of an operation that is monotone in each operand."""
    values = [combine(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(values), max(values)


def bits_of(a: Term, b: Term) -> tuple[float, float]:
    """An interval that holds a & b, a | b and a ^ b."""
    above = 2 ** math.ceil(math.log2(max(a.size, b.size) + 1))
    return (0 if min(a.low, b.low) >= 0 else -above), above - 1


def tamed(term: Term, limit: float = MAGNITUDE) -> Term:
    """A float scaled down until its magnitude is at most `limit`."""
    if term.size <= limit:
        return term
    factor = float(f"{limit / term.size:.2g}") * 0.9
    factor = float(f"{factor:.2g}")
    low, high = term.low * factor, term.high * factor
    return floating("({} * {})", term, constant(factor), low, high)
