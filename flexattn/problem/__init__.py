"""A call's request as one value, and the checks of it."""

from flexattn.problem.facts import kind_for
from flexattn.problem.problem import (
    DENSE,
    DTYPES,
    FP8,
    INDEX_RANGES,
    ITEMSIZE,
    MAX_HEADS,
    MAX_LENGTH,
    NARROWER,
    Captures,
    Fp8Weights,
    Fp32Products,
    Kind,
    Layout,
    Problem,
    Shape,
    Sparsity,
    Structure,
    Tanh,
    all_captures,
    captures_of,
    make_problem,
    out_dtype,
    rounded,
)
