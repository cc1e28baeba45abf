"""The float64 oracle, and the CPU path, in plain torch."""

from flexattn.reference.oracle import Reference, at_points, attention
from flexattn.reference.rounding import Precision

__all__ = ["Precision", "Reference", "at_points", "attention"]
