"""libdevice's functions for Triton's CPU interpreter, which has no extern calls: torch's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flexattn.mods.ops import OPS

# Floats that numpy lacks, by Triton's name and torch's: the interpreter keeps their bits.
_NARROW = {"bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}


def _through_torch(function: Callable[..., Any], result: str = "") -> Callable[..., Any]:
    """result: numpy's name of what comes out, "bool", or "" for the operands' dtype."""

    def call(*operands: Any) -> Any:
        from triton.language import block_type, int1, tensor
        from triton.runtime.interpreter import TensorHandle

        tensors = [each for each in operands if isinstance(each, tensor)]
        handles = [each.handle for each in tensors]
        like = handles[0].data.dtype
        # A number in the kernel's text takes the dtype of the tensors beside it.
        values = [x.handle.data if isinstance(x, tensor) else like.type(x) for x in operands]
        # The handle of a comparison has its operands' dtype there, and loaded bools are int8.
        scalar = int1 if result else handles[0].dtype.scalar
        arrays = (torch.from_numpy(np.array(each)) for each in np.broadcast_arrays(*values))
        data = function(*arrays).numpy().astype(np.dtype(result) if result else like)
        blocks = [each for each in tensors if each.type.is_block()]
        kind = block_type(scalar, list(data.shape)) if blocks else scalar
        return tensor(TensorHandle(data, scalar), kind)

    return call


def converted(x: Any, dtype: Any) -> Any:
    """x in another of Triton's dtypes, as torch converts it.

    The interpreter's own conversions truncate to a bfloat16 or take an integer's bits for one,
    lose the carry of what they round to eight bits, and halve what is subnormal.
    """
    from triton.language import block_type, tensor
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    data, source = np.ascontiguousarray(x.handle.data), x.dtype.scalar
    stored = _get_np_dtype(dtype)
    if source.name in _NARROW:
        values = torch.from_numpy(data.view(np.int8)).view(getattr(torch, _NARROW[source.name]))
    else:
        values = torch.from_numpy(data)
    if dtype.name in _NARROW:
        made = values.to(getattr(torch, _NARROW[dtype.name])).view(torch.int8).numpy().view(stored)
    else:
        made = values.to(torch.from_numpy(np.empty(0, stored)).dtype).numpy()
    kind = block_type(dtype, list(made.shape)) if x.type.is_block() else dtype
    return tensor(TensorHandle(made, dtype), kind)


# What rows of OPS spell as one of libdevice's functions, by its name.
_ROWS = {
    called[1]: _through_torch(op.function)
    for op in OPS.values()
    if (called := re.fullmatch(r"libdevice\.(\w+)\(\{0\}(, \{1\})?\)", op.triton))
}


def __getattr__(name: str) -> Callable[..., Any]:
    """A function that a row names."""
    if name not in _ROWS:
        raise AttributeError(name)
    return _ROWS[name]


# torch's vectors on a CPU are NaN where the quotient has too many bits; C's function is exact.
fmod = _through_torch(lambda x, y: torch.from_numpy(np.asarray(np.fmod(x.numpy(), y.numpy()))))
logical_and, logical_or, logical_xor, logical_not = (
    _through_torch(function, "bool")
    for function in (torch.logical_and, torch.logical_or, torch.logical_xor, torch.logical_not)
)
