"""What kernels depend on in a tensor beside its numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.problem.problem import Layout


class TensorFacts(NamedTuple):
    """How a tensor lies in memory.

    kind: its class. device: the index of its GPU, -1 for none. offset: bytes of its address above
    a multiple of 16. negated: it is a view that stands for the negative of its memory, as a
    conjugate's imaginary part is.
    """

    kind: type
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: int
    offset: int
    negated: bool

    @property
    def aligned(self) -> bool:
        """Whether the address and the strides but the last are multiples of 16 bytes.

        No stride is 0 but the batch's: kernels that read through tensor descriptors, which know
        none, ask for that one alone.
        """
        divisor = 16 // self.dtype.itemsize
        pairs = list(zip(self.shape, self.strides, strict=True))[:3]
        if self.offset or any(size > 1 and stride % divisor for size, stride in pairs):
            return False
        return all(size == 1 or stride > 0 for size, stride in pairs[1:])


def facts_of(tensor: Tensor | None) -> Any:
    """The values of TensorFacts, in their order, for keys: a plain tuple takes half the time."""
    if tensor is None:
        return None
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(),
        tensor.data_ptr() % 16, tensor.is_neg(),
    )  # fmt: skip


def layout_of(q: TensorFacts, k: TensorFacts, v: TensorFacts) -> Layout:
    """How query, key and value lie in memory, as far as a kernel's code depends on it."""
    whole = q.aligned and k.aligned and v.aligned and (q.shape[0] == 1 or q.strides[0] > 0)
    return Layout(q.strides[-1] == 1, k.strides[-1] == 1, v.strides[-1] == 1, whole)
