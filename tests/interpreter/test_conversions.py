"""What a mod converts, in Triton's interpreter: each number becomes what torch makes of it."""

import math

import pytest
import torch

import flexattn
from tests.support import PREFILL

WHOLE = torch.tensor([0, 1, 3, 7, 100, 127, 129, 131, 255, 257, 385, 32767, -7, -129, -32768])
REAL = torch.tensor(
    [0.0, -0.0, 0.3, -1.0039, 1.0118, 127.9, -248.0, 464.0, 61440.0, 65519.0, 7e4, 1e-5, 2e-9,
     1e-38, 1e-39, 1e37, math.inf, -math.inf],
    dtype=torch.float64,
)  # fmt: skip
SOURCES = {
    "int64": torch.cat([WHOLE, torch.tensor([2**24 + 1, -(2**31), 2**53 + 1])]),
    "uint8": WHOLE[WHOLE.abs() < 256].abs(),
    "bool": torch.tensor([0, 1]),
    **{name: REAL for name in "float64 float32 float16 bfloat16 float8_e4m3fn".split()},
}
INTO = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "bool")


def as_scores(values, convert):
    """What a kernel makes of each value, as the score of a row with one key."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return convert(values[q_idx]).float()

    q, k = torch.ones(1, 1, len(values), 16), torch.ones(1, 1, 1, 16)
    asked = flexattn.AuxRequest(max_scores=True)
    _, aux = flexattn.flex_attention(
        q, k, k, score_mod=score_mod, return_aux=asked, kernel_options=PREFILL
    )
    return aux.max_scores.flatten()


@pytest.mark.oldest
@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("source", SOURCES)
def test_a_conversion_is_torchs(source, into):
    """The interpreter took the bits of an integer or a float64 for a bfloat16's, truncated floats
    to one, halved subnormal ones, and rounded 127.9 to 64 in eight bits: errors from 2 to NaN."""
    values = SOURCES[source].to(getattr(torch, source))
    got = as_scores(values, lambda x: x.to(getattr(torch, into)))
    exact = values.to(getattr(torch, into)).float()
    # Scores are kept in units of log2(e).
    torch.testing.assert_close(got, exact, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.pow(1.01, x),
        lambda x: torch.pow(x.abs(), 1.3),
        lambda x: torch.atan2(x, torch.tensor(0.5)),
        lambda x: torch.atan2(torch.tensor(-2.0), x),
        lambda x: (x > 0) ^ True,
        lambda x: torch.logical_xor(x > 0, torch.tensor(True)),
        lambda x: torch.logical_xor(torch.tensor(3), x),
    ],
    ids=["pow of", "pow by", "atan2 by", "atan2 of", "xor", "logical_xor", "logical_xor of"],
)
def test_a_constant_beside_a_tensor(compute):
    """`x ^ True` ended in "'bool' object has no attribute 'handle'": what stands for libdevice in
    the interpreter took tensors alone."""
    values = torch.tensor([0.0, -1.5, 0.25, 3.0])
    got = as_scores(values, compute)
    torch.testing.assert_close(got, compute(values).float(), rtol=1e-6, atol=1e-7)
