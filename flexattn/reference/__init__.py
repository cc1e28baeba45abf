"""The float64 oracle, and the CPU path, in plain torch."""

from flexattn.reference.oracle import (
    Reference,
    SomeRows,
    attention,
    float_of_indices,
)
from flexattn.reference.rounding import Precision
