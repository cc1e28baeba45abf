"""OPS: the pointwise operations of an Expr by name, and what dtypes are called."""

from __future__ import annotations

import torch

from flexattn.mods.ir.arithmetic import ARITHMETIC
from flexattn.mods.ir.functions import FUNCTIONS
from flexattn.mods.ir.logic import LOGIC

OPS = {op.name: op for op in (*ARITHMETIC, *LOGIC, *FUNCTIONS)}


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def is_float(dtype: str) -> bool:
    """Whether a dtype's name says floating point."""
    return dtype.startswith(("float", "bfloat"))


def is_int(dtype: str) -> bool:
    """Whether a dtype's name says integer; bool is none."""
    return dtype.startswith(("int", "uint"))
