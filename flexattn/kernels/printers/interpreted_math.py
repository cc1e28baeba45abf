"""libdevice's functions for Triton's CPU interpreter, which has no extern calls: numpy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# Floats that numpy lacks, by Triton's name and torch's: the interpreter keeps their bits.
_NARROW = {"bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}


def _through_numpy(function: Callable[..., Any], result: str = "") -> Callable[..., Any]:
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
        arrays = np.broadcast_arrays(*values)
        with np.errstate(all="ignore"):
            dtype = np.dtype(result) if result else like
            data = np.asarray(function(*arrays)).astype(dtype)
        blocks = [each for each in tensors if each.type.is_block()]
        kind = block_type(scalar, list(data.shape)) if blocks else scalar
        return tensor(TensorHandle(data, scalar), kind)

    return call


def _erfc(x: Any) -> Any:
    import torch

    return torch.special.erfc(torch.from_numpy(np.array(x))).numpy()


def converted(x: Any, dtype: Any) -> Any:
    """x in another of Triton's dtypes, as torch converts it.

    The interpreter's own conversions truncate to a bfloat16 or take an integer's bits for one,
    lose the carry of what they round to eight bits, and halve what is subnormal.
    """
    import torch
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


tan, asin, acos, atan = map(_through_numpy, (np.tan, np.arcsin, np.arccos, np.arctan))
sinh, cosh, tanh = map(_through_numpy, (np.sinh, np.cosh, np.tanh))
expm1, log1p, log10 = map(_through_numpy, (np.expm1, np.log1p, np.log10))
rint, trunc = map(_through_numpy, (np.rint, np.trunc))
erfc = _through_numpy(_erfc)
pow, atan2, fmod = map(_through_numpy, (np.power, np.arctan2, np.fmod))
logical_and, logical_or = (_through_numpy(f, "bool") for f in (np.logical_and, np.logical_or))
logical_xor, logical_not = (_through_numpy(f, "bool") for f in (np.logical_xor, np.logical_not))
