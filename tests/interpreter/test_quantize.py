"""The kernel of quantize, whose numbers and factors are those of plain torch, bit for bit."""

import torch

import flexattn
from flexattn.frontend import quantize as module
from tests.covering import pairwise
from tests.support import DTYPES, heads_inside, inputs, spaced

LAID = {"dense": lambda x: x, "heads inside": heads_inside, "spaced": spaced}


@pairwise(
    dtype=list(DTYPES), block=[None, 64, 128], smooth=[False, True], D=[16, 40, 128, 256],
    lengths=[(1, 1), (65, 129), (200, 333)], laid=list(LAID),
)  # fmt: skip
def test_numbers_are_those_of_torch(dtype, block, smooth, D, lengths, laid, monkeypatch):
    q, k, v = inputs(2, 4, 2, *lengths, D, dtype=DTYPES[dtype])
    k[..., 3] += 20
    v[:, 1] = 0
    given = [LAID[laid](x) for x in (q, k, v)]
    asked = {"block": block, "smooth": smooth}
    kernels = []
    launched = module._launched
    monkeypatch.setattr(module, "_launched", lambda *a: kernels.append(a) or launched(*a))
    got = flexattn.quantize(*given, **asked)
    # Factors of heads come from a kernel of their own; V has no others.
    assert len(kernels) == (laid != "spaced") * (4 if block else 6)
    monkeypatch.setattr(module, "_by_kernel", lambda x: False)
    wanted = flexattn.quantize(*given, **asked)
    for one, other in zip(got.tensors, wanted.tensors, strict=True):
        assert one.dtype == torch.float8_e4m3fn
        assert torch.equal(one.view(torch.uint8) & 127, other.view(torch.uint8) & 127)
    for name in ("q_factor", "k_factor", "v_descale"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
