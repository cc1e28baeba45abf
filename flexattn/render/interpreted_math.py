"""libdevice's functions for Triton's CPU interpreter, which has no extern calls: numpy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _through_numpy(function: Callable[..., Any], result: str = "") -> Callable[..., Any]:
    """result: numpy's name of what comes out, "bool" or "float32"; "" for the operands' dtype."""

    def call(*tensors: Any) -> Any:
        from triton.language import block_type, float32, int1, tensor
        from triton.runtime.interpreter import TensorHandle

        handles = [each.handle for each in tensors]
        # The handle of a comparison has its operands' dtype there, and loaded bools are int8.
        scalar = {"bool": int1, "float32": float32}.get(result, handles[0].dtype.scalar)
        arrays = np.broadcast_arrays(*(handle.data for handle in handles))
        with np.errstate(all="ignore"):
            dtype = np.dtype(result) if result else handles[0].data.dtype
            data = np.asarray(function(*arrays)).astype(dtype)
        blocks = [each for each in tensors if each.type.is_block()]
        kind = block_type(scalar, list(data.shape)) if blocks else scalar
        return tensor(TensorHandle(data, scalar), kind)

    return call


def _erfc(x: Any) -> Any:
    import torch

    return torch.special.erfc(torch.from_numpy(np.array(x))).numpy()


def _nearest_bfloat16(x: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(x, dtype=np.float32)).bfloat16().float().numpy()


tan, asin, acos, atan = map(_through_numpy, (np.tan, np.arcsin, np.arccos, np.arctan))
sinh, cosh, tanh = map(_through_numpy, (np.sinh, np.cosh, np.tanh))
expm1, log1p, log10 = map(_through_numpy, (np.expm1, np.log1p, np.log10))
rint, trunc = map(_through_numpy, (np.rint, np.trunc))
erfc = _through_numpy(_erfc)
pow, atan2, fmod = map(_through_numpy, (np.power, np.arctan2, np.fmod))
logical_and, logical_or = (_through_numpy(f, "bool") for f in (np.logical_and, np.logical_or))
logical_xor, logical_not = (_through_numpy(f, "bool") for f in (np.logical_xor, np.logical_not))
# Integers come here too: as a float32, which the cast that follows takes by its value.
nearest_bfloat16 = _through_numpy(_nearest_bfloat16, "float32")
