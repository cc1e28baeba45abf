"""Each number that a kernel is given has the type of its signature, in the interpreter, too."""

import mmap

import numpy as np
import pytest
import torch

from flexattn import flex_attention
from tests.support import PREFILL


def sparse(elements, dtype):
    """A tensor whose pages cost nothing until they are written."""
    size = elements * torch.empty(0, dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)).view(dtype)


@pytest.mark.oldest
@pytest.mark.parametrize("options", [None, PREFILL], ids=["decode", "prefill"])
def test_strides_beyond_32_bits(options):
    """A key's offset wrapped at 2^31 and the process ended: Triton takes a type from a value."""
    step, S = 2**27 + 128, 33
    k, v = (
        sparse(S * step, torch.int8).view(torch.bfloat16)
        .as_strided((1, 1, S, 16), (16, 16, step // 2, 1)).copy_(torch.randn(1, 1, S, 16))
        for _ in "kv"
    )  # fmt: skip
    q = torch.randn(1, 1, 1, 16).bfloat16()
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    out = flex_attention(q, k, v, kernel_options=options)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.02)


def test_a_captured_tensor_beyond_32_bits():
    table = sparse(3 * 2**30, torch.int8).view(3, 2**30)
    for h in range(3):
        table[h, :4] = h * torch.arange(4)
    q, k, v = (torch.randn(1, 3, 4, 16) for _ in "qkv")
    bias = table[:, :4].float()
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j])
    torch.testing.assert_close(out, (q @ k.mT / 4 + bias[:, None]).softmax(-1) @ v)


def test_captured_floats_are_doubles():
    """They became float32: 1e9 + 1 < 1e9 + 2 was false, and 0.1 was no longer itself."""
    q, k, v = (torch.randn(1, 1, 9, 16) for _ in "qkv")
    n, m = 1.0, 2.0

    def less(score, b, h, i, j):
        return score + (n < m) * j

    def equal(score, b, h, i, j):
        return score + (n == 0.1) * 2.0 * j

    for n, m in ((1.0, 2.0), (3.0, 2.0), (1e9 + 1, 1e9 + 2), (0.1, 0.2)):
        for mod, slope in ((less, float(n < m)), (equal, 2.0 * (n == 0.1))):
            want = (q @ k.mT / 4 + slope * torch.arange(9.0)).softmax(-1) @ v
            torch.testing.assert_close(flex_attention(q, k, v, score_mod=mod), want)
