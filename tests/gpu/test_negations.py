"""ptxas loses negations that a minimum or maximum reads, and kernels of ours none."""

import pytest
import torch
import triton

from tests.gradients import assert_gradients
from tests.negations import KERNELS, loses, told
from tests.support import DECODE, ON_SM_90, PREFILL, assert_accurate, block_mask, inputs

pytestmark = pytest.mark.usefixtures("poisoned")
TEMPLATES = [pytest.param("GLUON", marks=ON_SM_90), "TRITON"]


@ON_SM_90
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_whether_this_release_is_mended(kernel):
    """The smallest kernels, as Triton compiles them by itself: it says when a release is right."""
    a, b, c = torch.randint(-99, 99, (3, 128), device="cuda", dtype=torch.int32)
    out = torch.empty_like(a)
    compiled = kernel[(1,)](a, b, c, out)
    right = a.abs().maximum(b) if kernel is KERNELS[0] else a.maximum(-b).maximum(c)
    ptxas = triton.backends.nvidia.compiler.get_ptxas(90).path
    wrong = not torch.equal(out, right)
    assert wrong == loses(compiled.asm["ptx"], ptxas), told(compiled.asm["ptx"], ptxas)


def tiled(b, h, q, k):
    near = (q // 16 // 4 - k // 16 // 4).abs() <= 1
    return near & ((q // 16 % 4 - k // 16 % 4).abs() <= 1)


def neighbours(b, h, q, k):
    """attention-gym's NATTEN: a distance of two coordinates."""
    return ((q // 32 - k // 32).abs() <= 3) & ((q % 32 - k % 32).abs() <= 3)


def farthest(b, h, q, k):
    return torch.maximum((q // 32 - k // 32).abs(), (q % 32 - k % 32).abs()) <= 5


def least(b, h, q, k):
    return torch.minimum(torch.minimum(q - 300, -(k // 3)), k - q) < -50


def by_distance(score, b, h, q, k):
    far = torch.maximum((q // 32 - k // 32).abs(), (q % 32 - k % 32).abs())
    return score - 0.125 * torch.maximum(far, -(h - 2))


MODS = [
    *({"mask_mod": mod} for mod in (tiled, neighbours, farthest, least)),
    {"score_mod": by_distance},
    {"score_mod": by_distance, "mask_mod": tiled},
]


def name(mods):
    return "-".join(mod.__name__ for mod in mods.values())


@pytest.mark.parametrize("backend", TEMPLATES)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mods", MODS, ids=name)
def test_forward(mods, D, backend):
    """`tiled` was wrong by half with Triton 3.8 in Triton's template, and in Hopper's at D 256."""
    q, k, v = inputs(2, 8, 2, 1031, 1031, D, dtype=torch.bfloat16, device="cuda")
    mask = block_mask(mods.get("mask_mod"), q, k)
    options = {**PREFILL, "BACKEND": backend}
    assert_accurate(
        q, k, v, score_mod=mods.get("score_mod"), block_mask=mask, kernel_options=options
    )


@pytest.mark.parametrize("mods", MODS, ids=name)
def test_decode_and_backward(mods):
    q, k, v = inputs(2, 8, 2, 3, 2047, 64, dtype=torch.bfloat16, device="cuda")
    mask = block_mask(mods.get("mask_mod"), q, k)
    assert_accurate(
        q, k, v, score_mod=mods.get("score_mod"), block_mask=mask, kernel_options=DECODE
    )
    q, k, v = inputs(2, 4, 2, 517, 517, 64, dtype=torch.bfloat16, device="cuda")
    score = mods.get("score_mod")
    make = None if score is None else lambda: score
    assert_gradients(q, k, v, make=make, mask_mod=mods.get("mask_mod"), block=128)
