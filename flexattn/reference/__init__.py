"""The float64 oracle, and the CPU path, in plain torch."""

from flexattn.reference.oracle import Reference, SomeRows, at_points, attention
from flexattn.reference.rounding import Precision
