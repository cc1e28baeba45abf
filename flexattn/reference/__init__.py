"""The float64 oracle, and the CPU path, in plain torch."""

from flexattn.reference.mapped import at_points
from flexattn.reference.oracle import Reference, SomeRows, attention
from flexattn.reference.rounding import Precision
