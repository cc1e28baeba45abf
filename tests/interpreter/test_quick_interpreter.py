"""What the interpreter of the tests leaves out changes nothing that it says."""

import runpy

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


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


@pytest.mark.parametrize("dtype", [tl.int32, tl.float16, tl.pointer_type(tl.float16)])
def test_types_of_blocks_are_told_apart(dtype):
    """They share what they hold with equal ones alone."""
    made = [tl.block_type(dtype, shape) for shape in ([4], [4, 1], [tl.constexpr(4)], [8])]
    assert [made[0] == each for each in made] == [True, False, True, False]
    assert [str(each) for each in made[::2]] == [f"<{made[0].shape}, {dtype}>"] * 2
    assert [list(each.shape) for each in made] == [[4], [4, 1], [4], [8]]
    assert [each.numel for each in made] == [4, 4, 4, 8]
    others = (tl.float32, tl.pointer_type(dtype), tl.pointer_type(dtype, const=True))
    assert not any(made[0] == tl.block_type(other, [4]) for other in others)
    for wrong, error in (([], TypeError), ([3], ValueError)):
        for _ in range(2):
            with pytest.raises(error):
                tl.block_type(dtype, wrong)


@triton.jit
def _products(X, OUT):
    at = tl.arange(0, 4)
    row = tl.load(X + at)
    square = row[:, None] * row[None, :] + (row * 2)[None, :] + 0.5
    tl.store(OUT + at[:, None] * 4 + at[None, :], square)


def test_shapes_of_operands_that_differ_are_made_one():
    x = torch.tensor([1.0, -2.0, 3.0, 0.25])
    out = torch.full((4, 4), torch.nan)
    _products[(1,)](x, out)
    assert torch.equal(out, x[:, None] * x + 2 * x + 0.5)


@triton.jit
def _promoted(WHOLE, HALF, OUT):
    at = tl.arange(0, 2)
    whole, half = tl.load(WHOLE + at), tl.load(HALF + at)
    tl.store(OUT + at, whole / 4)
    tl.store(OUT + 2 + at, whole + half)
    tl.store(OUT + 4 + at, whole // 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes_of_operands_that_differ_are_made_one(dtype):
    """One table of result dtypes serves all operations; whether one divides is in its key."""
    whole, half = torch.tensor([6, 9], dtype=dtype), torch.tensor([0.5, 0.25], dtype=torch.half)
    out = torch.full((6,), torch.nan)
    _promoted[(1,)](whole, half, out)
    assert out.tolist() == [1.5, 2.25, 6.5, 9.25, 1.0, 2.0]


@triton.jit
def _widened(X, OUT, row, column):
    at = tl.arange(0, 4)
    x = tl.load(X + at)  # one pointer and a block of offsets
    first = tl.sum(tl.where(at == 0, x, 0), 0)  # a scalar of the dtype
    wide = (2 - x)[:, None] + x[None, :] * (x + first)[:, None]
    wide = first - tl.where(at[:, None] < column, wide, 1.5)
    inside = (at[:, None] < row) & (at[None, :] >= 1)
    tl.store(OUT + at[:, None] * 4 + at[None, :], wide, mask=inside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_numbers_scalars_and_blocks_meet(dtype):
    """Of whatever shape they are and on either side: a result's is the wider one."""
    x = torch.tensor([1.0, -2.0, 3.0, 0.25], dtype=dtype)
    out = torch.full((4, 4), torch.nan, dtype=dtype)
    _widened[(1,)](x, out, 3, 2)
    at = torch.arange(4)[:, None]
    wanted = x[0] - torch.where(at < 2, (2 - x)[:, None] + x * (x + x[0])[:, None], 1.5)
    wanted[3] = wanted[:, 0] = torch.nan
    assert torch.equal(out.nan_to_num(99), wanted.to(dtype).nan_to_num(99))


@triton.jit
def _minus(X, OUT, NUMBER: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(OUT + at, tl.load(X + at) - NUMBER)


@pytest.mark.parametrize(
    ("dtype", "number", "says"),
    [
        (torch.int32, 2**31, "out of range"),
        (torch.int8, 200, "out of range"),
        (torch.uint8, -1, "negative scalar|out of range"),
        (torch.int64, 2**31, None),
        (torch.int32, 0.5, None),
        (torch.bool, 3, None),
        (torch.float16, 2, None),
    ],
)
def test_numbers_that_a_dtype_does_not_hold(dtype, number, says):
    x, out = torch.ones(4, dtype=dtype), torch.full((4,), torch.nan, dtype=torch.float64)
    if says is None:
        _minus[(1,)](x, out, number)
        assert out.tolist() == [1 - number] * 4
    else:
        with pytest.raises(interpreter.InterpreterError, match=says):
            _minus[(1,)](x, out, number)


TEXT = """
import triton
import triton.language as tl

STEP = tl.constexpr({step})

@triton.jit
def stepped(x):
    return x + STEP

@triton.jit
def kernel(X, OUT):
    at = tl.arange(0, 4)
    tl.store(OUT + at, stepped(tl.load(X + at)))
"""


def test_functions_of_one_text_see_their_own_modules(tmp_path):
    """They are compiled once, and each reads the names of the file that it stands in."""
    x = torch.arange(4.0)
    for step in (1, 10):
        path = tmp_path / f"steps_{step}.py"
        path.write_text(TEXT.format(step=step))
        out = torch.full((4,), torch.nan)
        runpy.run_path(path)["kernel"][(1,)](x, out)
        assert torch.equal(out, x + step)
