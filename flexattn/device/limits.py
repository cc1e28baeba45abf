"""Limits: what a device can do at best, peak rates as its vendor states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Dense peak rates in TFLOP/s by the type of the inputs, and memory bandwidth in TB/s.

    half: float16 and bfloat16 with fp32 sums. tf32: float32 inputs on matrix units. single:
    float32 without them. e4m3 is multiplied twice as fast as half, where it is at all.
    """

    half: float
    tf32: float
    single: float
    bandwidth: float

    def peak(self, dtype: str, products: str = "ieee") -> float:
        """TFLOP/s for inputs of a dtype; products: how those of float32 are multiplied."""
        if dtype == "float8_e4m3fn":
            return 2 * self.half
        if dtype != "float32":
            return self.half
        return {"tf32x3": self.tf32 / 3, "bf16x6": self.half / 6}.get(products, self.single)

    def ridge(self, dtype: str, products: str = "ieee") -> float:
        """FLOP per byte above which arithmetic is the limit."""
        return self.peak(dtype, products) / self.bandwidth
