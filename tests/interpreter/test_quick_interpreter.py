"""What the interpreter of the tests leaves out changes nothing that it says."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.interpreter


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _fourfold(X, OUT):
    at = tl.arange(0, 4)
    tl.store(OUT + at, _twice(_twice(tl.load(X + at))))


def test_sums_that_overflow_are_refused_in_every_call():
    out = torch.zeros(4, dtype=torch.int32)
    for _ in range(2):
        _fourfold[(1,)](torch.tensor([1, -2, 2**29 - 1, -(2**29)], dtype=torch.int32), out)
        assert out.tolist() == [4, -8, 2**31 - 4, -(2**31)]
        for wrong in (2**29, -(2**29) - 1):
            with pytest.raises(interpreter.InterpreterError, match="int32 overflow detected"):
                _fourfold[(1,)](torch.tensor([1, 2, 3, wrong], dtype=torch.int32), out)
        assert tl.arange.__module__ == "triton.language.core", "the language is as it was"


@pytest.mark.parametrize("dtype", [tl.int1, tl.uint8, tl.int64, tl.float16, tl.float32])
def test_dtypes_are_numpys(dtype):
    size = np.dtype(interpreter._get_np_dtype(dtype)).itemsize
    assert size == max(1, dtype.primitive_bitwidth // 8)
    assert interpreter._get_np_dtype(tl.block_type(dtype, [4])) == interpreter._get_np_dtype(dtype)
    assert interpreter._get_np_dtype(tl.pointer_type(dtype)) == np.uint64
