"""torch's transforms around a call: which tensors have values that a kernel can read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flexattn.errors import UnsupportedError

functorch: Any = torch._C._functorch


def check_transforms(tensors: Sequence[Tensor | None]) -> None:
    """That tensors have values to read: raises UnsupportedError for those of torch.vmap, export.

    What torch.func differentiates is no matter of this check: plain torch can.
    """
    if get_proxy_mode() is not None or any(isinstance(x, FakeTensor) for x in tensors):
        raise UnsupportedError(
            "flex_attention is traced, as by torch.export or make_fx",
            "flexattn launches kernels of its own, which no graph of torch's holds",
            "export with strict=True, which leaves torch's own flex_attention in the program; "
            "torch.compile takes the call as it is",
        )
    for tensor in tensors:
        while isinstance(tensor, Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                raise UnsupportedError(
                    "flex_attention is called under torch.vmap",
                    "a kernel reads tensors as they lie in memory, and has one batch dimension",
                    "fold the mapped dimension into the batch: x.flatten(0, 1)",
                )
            tensor = functorch.get_unwrapped(tensor)


def check_memory(tensors: Iterable[Tensor | None]) -> None:
    """That kernels can read tensors where they lie: raises UnsupportedError for wrappers.

    A DTensor, and whatever else is made of other tensors, has the address 0, or none to ask for.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or type(tensor) is Tensor or not tensor.numel():
            continue
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            address = 0
        if not address:
            raise UnsupportedError(
                f"a {type(tensor).__name__} of shape {list(tensor.shape)}",
                "a kernel reads a tensor's own memory, and this one stands for others'",
                "pass the tensor that it wraps, as to_local() of a DTensor",
            )


def functionals(tensors: Iterable[Tensor | None]) -> str:
    """Words for a tensor that torch.func differentiates, or nothing."""
    for tensor in tensors:
        if tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            return "a tensor of this call"
    return ""


def in_forward_mode() -> bool:
    """Whether tensors may have tangents, as within torch.func.jvp."""
    return forward_ad._current_level >= 0


def tangent(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """The name of the first tensor with a tangent (torch.func.jvp, dual numbers), or nothing."""
    if not in_forward_mode():
        return ""
    for name, tensor in named:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            return name
    return ""
