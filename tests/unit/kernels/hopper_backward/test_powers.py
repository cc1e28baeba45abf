"""Powers of 2 by multiply-adds: the instructions that a kernel holds, run on float32 numbers."""

import re

import numpy as np
import pytest

from flexattn.device import named
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from tests.problems import problem

H200 = named("nvidia-h200")
EIGHT = 8


def _rounded_down(x):
    near = x.astype(np.float32)
    return np.where(near > x, np.nextafter(near, np.float32(-np.inf)), near)


def _flushed(x):
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


FUNCTIONS = {
    "max.NaN.ftz.f32": lambda a, b: np.maximum(a, b),
    "add.rm.ftz.f32": lambda a, b: _rounded_down(a.astype(np.float64) + b),
    "sub.ftz.f32": lambda a, b: a - b,
    "mul.ftz.f32": lambda a, b: a * b,
    "fma.rn.ftz.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "ex2.approx.ftz.f32": np.exp2,
}


def power(statements, x):
    """What the first number of `statements` becomes of x."""
    values = {f"${EIGHT}": x}

    def read(name):
        if name.startswith("0f"):
            return np.array([int(name[2:], 16)], np.uint32).view(np.float32)
        return values[name]

    for statement in statements:
        name, _, rest = statement.partition(" ")
        into, *operands = rest.split(", ")
        if name == "mov.b32":
            values[into] = values[operands[0]]
        elif name == "shl.b32":
            values[into] = (values[operands[0]].view(np.uint32) << int(operands[1])).view(
                np.float32
            )
        else:
            values[into] = _flushed(FUNCTIONS[name](*map(read, operands)))
    return values["$0"]


@pytest.fixture(scope="module")
def statements():
    wanted = problem("backward")
    config = HopperBackwardConfig(64, 128, 2, ex2_emulated=1)
    text = family_of(config).render(wanted.structure, config, H200, "test").text
    body = text[text.index("POWERS = ") : text.index("def shared_exp2")]
    every = [each.strip(' "\n') for each in re.sub(r'"\s+"', "", body).split(";")]
    every = [each for each in every if each.split(" ")[0] in (*FUNCTIONS, "mov.b32", "shl.b32")]
    return every[: next(i for i, each in enumerate(every) if " $0," in each) + 1]


def test_weights_are_within_a_ten_thousandth(statements):
    x = np.linspace(-126, 1, 100_003, dtype=np.float32)
    with np.errstate(all="ignore"):
        found, wanted = power(statements, x), np.exp2(x.astype(np.float64))
    assert np.abs(found / wanted - 1).max() < 1e-4


def test_no_number_stays_none_and_far_below_is_nothing(statements):
    """A maximum that takes the number of the two made a weight of 2**-127 of a score of NaN."""
    x = np.array([np.nan, -np.inf, -1e30, -127.0, -126.5, 0.0], np.float32)
    with np.errstate(all="ignore"):
        found = power(statements, x)
    assert np.isnan(found[0]) and not found[1:4].any() and found[4] < 1e-37
    assert found[5] == 1.0
