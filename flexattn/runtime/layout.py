"""How tensors lie in memory: the strides and descriptors that a launch passes for them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from flexattn.kernels.base.binding import strides
from flexattn.problem import Problem


class DescriptorBox(NamedTuple):
    """What a tensor descriptor of q, k or v needs beside the address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def input_strides(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Strides of q, k and v: of the head dimension where it is not 1."""
    layout = problem.structure.layout
    return {
        **strides("stride_q", "bhm" if layout.q_contiguous else "bhmd", q),
        **key_strides(problem, k, v),
    }


def key_strides(problem: Problem, k: Tensor, v: Tensor) -> dict[str, int]:
    """Those of k and v alone."""
    layout = problem.structure.layout
    return {
        **strides("stride_k", "bhn" if layout.k_contiguous else "bhnd", k),
        **strides("stride_v", "bhn" if layout.v_contiguous else "bhnd", v),
    }


def strides_like(q: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for the output in the order of q's dimensions, the last one innermost.

    shape: of four dimensions; they are torch's strides for the output of flex_attention.
    """
    return _known_strides(q.stride(), shape)


def dense_strides(like: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same from q's strides; sizes may be symbols of a graph, which nothing can look up."""
    order = sorted(range(3), key=lambda dim: (like[dim], -dim), reverse=True)
    strides, step = [0, 0, 0, 1], shape[3]
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


_known_strides = lru_cache(maxsize=4096)(dense_strides)


def dense_box(shape: tuple[int, ...]) -> DescriptorBox:
    """Of what lies contiguous: scratch memory, and fp8's V in bfloat16 or with keys innermost."""
    _, heads, rows, width = shape
    return DescriptorBox(tuple(shape), (heads * rows * width, rows * width, width, 1))


def box_of(tensor: Tensor) -> DescriptorBox:
    """A descriptor's strides are above 0 and whole 16 bytes, also where they are never stepped."""
    span = max(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span += -span % (16 // tensor.element_size())
    b, h, n, _ = strides("", "bhnd", tensor).values()
    return DescriptorBox(tuple(tensor.shape), (b or span, h or span, n or span, 1))
