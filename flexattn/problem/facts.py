"""The facts of tensors, beside their numbers, that decide kernels; and float32's products."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexattn.problem.problem import NEAR_BYTES, Fp32Products, Layout


class TensorFacts(NamedTuple):
    """The layout of a tensor in memory.

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
        """True if the address and the strides but the last are multiples of 16 bytes.

        No stride is 0 but the batch's: kernels that read through tensor descriptors, which know
        none, ask for that one alone.
        """
        divisor = 16 // self.dtype.itemsize
        pairs = list(zip(self.shape, self.strides, strict=True))[:3]
        if self.offset or any(size > 1 and stride % divisor for size, stride in pairs):
            return False
        return all(size == 1 or stride > 0 for size, stride in pairs[1:])

    @property
    def near(self) -> bool:
        """True if no element lies 2 GiB or more behind the first one."""
        pairs = zip(self.shape, self.strides, strict=True)
        last = sum(max(0, size - 1) * stride for size, stride in pairs)
        return (last + 1) * self.dtype.itemsize <= NEAR_BYTES


def facts_of(tensor: Tensor | None) -> Any:
    """The values of TensorFacts, in their order, for keys: a plain tuple takes half the time."""
    if tensor is None:
        return None
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(),
        tensor.data_ptr() % 16, tensor.is_neg(),
    )  # fmt: skip


def layout_of(q: TensorFacts, k: TensorFacts, v: TensorFacts) -> Layout:
    """The layout of query, key and value in memory, as far as a kernel's code depends on it."""
    whole = q.aligned and k.aligned and v.aligned and (q.shape[0] == 1 or q.strides[0] > 0)
    near = q.near and k.near and v.near
    return Layout(q.strides[-1] == 1, k.strides[-1] == 1, v.strides[-1] == 1, whole, near)


# What is asked: no tf32 and no parts of numbers, tf32's accuracy, parts wherever they compile, or
# the best that holds float32's budget.
Fp32Setting = Literal["ieee", "tf32", "bf16x6", "auto"]
_TORCHS: dict[str, Fp32Setting] = {"ieee": "ieee", "tf32": "tf32"}
# Of sm_90, where six products of bfloat16 ran on a GPU within float32's budget, forward and
# backward: of kinds of kernels, and of head dimensions.
_MEASURED_KINDS, _MEASURED = ("prefill", "backward"), (32, 64, 128)


def torch_setting() -> Fp32Setting:
    """torch's setting of float32 products; "none", its default, leaves the choice to a library."""
    return _TORCHS.get(torch.backends.cuda.matmul.fp32_precision, "auto")


def setting_of(q: Tensor, asked: Fp32Setting | None = None) -> Fp32Setting:
    """The setting as asked, else torch's; "ieee" where NVIDIA's units do not multiply q."""
    if q.dtype != torch.float32 or not q.is_cuda or torch.version.hip is not None:
        return "ieee"
    return torch_setting() if asked is None else asked


def products_for(
    setting: Fp32Setting, kind: str, head_dims: tuple[int, int], capability: int, narrower: bool
) -> Fp32Products:
    """The products of float32 that a setting means for a kind of kernel on a device.

    head_dims: of q and k, and of v. capability: 90 for sm_90, 0 for what is not NVIDIA's.
    narrower: k and v have another dtype than q.

    Six products of bfloat16 are the default where they were measured. Where asked for, they serve
    up to 128 columns: parts of wider tiles fill more registers than there are. sm_100 keeps sums
    of 64 rows in tensor memory, which is too small for theirs.
    """
    if setting == "ieee" or capability < 80:
        return "ieee"
    qk, v = head_dims
    measured = capability == 90 and kind in _MEASURED_KINDS and not narrower and qk == v
    if measured and qk in _MEASURED:
        return "bf16x6"
    if setting == "tf32":
        return "tf32x3"
    fits = max(head_dims) <= 128 and capability not in range(100, 120)
    return "bf16x6" if setting == "bf16x6" and fits else "ieee"
