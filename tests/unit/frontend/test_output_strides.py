"""The output lies in memory as the query does, on the paths of plain torch as in kernels."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import flexattn

B, H, L, D = 2, 3, 5, 16
# The dimensions of q from the outermost in memory to the innermost.
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)]


def ordered(order, dtype=torch.float32, *, length=L, width=D):
    """q [B, H, L, width] whose dimensions lie in memory in this order."""
    sizes = (B, H, length, width)
    dense = torch.randn([sizes[dim] for dim in order], dtype=dtype)
    return dense.permute([order.index(dim) for dim in range(4)])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_strides_are_torchs(order):
    """The CPU path gave a contiguous output, so viewing it as [B, L, H * D] copied or failed."""
    q, v = ordered(order), torch.randn(B, H, 7, 24)
    k = torch.randn(B, H, 7, D)
    out, theirs = flexattn.flex_attention(q, k, v), torch_flex_attention(q, k, v)
    assert out.stride() == theirs.stride()
    torch.testing.assert_close(out, theirs)


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
def test_the_head_dimension_is_the_innermost(order):
    q = ordered(order)
    assert flexattn.flex_attention(q, q, q).stride(-1) == 1


def test_with_sinks_gradients_and_no_keys():
    q = ordered((0, 2, 1, 3)).requires_grad_()
    out = flexattn.flex_attention(q, q, q, sinks=torch.zeros(H))
    out.sum().backward()
    nothing = flexattn.flex_attention(q.detach(), *(torch.randn(B, H, 0, D) for _ in "kv"))
    for each in (out, nothing):
        assert each.transpose(1, 2).is_contiguous()
    assert q.grad is not None and q.grad.abs().sum() > 0
