"""Arguments of templates/base/delta.jinja, which makes delta of a tile of rows.

delta is rowsum(O * dO), less the gradient of lse (FlashAttention-2, arXiv 2307.08691, algorithm 2,
line 4): what a backward subtracts from dP, the products of dO and V.
"""

from __future__ import annotations

from math import gcd

from flexattn.kernels.base.arguments import Argument, output_strides
from flexattn.kernels.printers.triton_ops import signature_type
from flexattn.problem import Structure


def delta_arguments(structure: Structure, through_lse: bool) -> list[Argument]:
    """The output, its gradient, lse, delta and strides; through_lse: lse has a gradient, too."""
    element = f"*{signature_type(structure.dtype)}"
    found = [Argument("OUT", element, 16), Argument("DO", element, 16)]
    found += [Argument("LSE", "*fp32", 16)]
    found += [Argument("DLSE", "*fp32", 16)] * through_lse
    found += [Argument("DELTA", "*fp32", 16)]
    found += output_strides(structure)
    return found + dense_stride_arguments("do", "bhm", structure.head_dim_v)


def dense_stride_arguments(tensor: str, axes: str, head_dim: int) -> list[Argument]:
    """Strides of what is dense, all multiples of its rows."""
    return [Argument(f"stride_{tensor}{axis}", "i64", gcd(16, head_dim)) for axis in axes]
