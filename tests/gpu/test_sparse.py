"""Sparse attention of published models on a GPU: each is its paper's formula, and trains."""

import pytest
import torch

from flexattn.sparse import dsa, moba, nsa, quest, vsa
from tests import sparse_formulas as papers

pytestmark = pytest.mark.usefixtures("poisoned")


def drawn(seed, *shapes):
    draw = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]


def assert_near(found, paper, given, leaves):
    """paper(*given) in float64 on the host, and its gradients in the leaves among given."""
    wide = [x.detach().double().cpu().requires_grad_() for x in given]
    right = paper(*wide)
    torch.testing.assert_close(found.double().cpu(), right, rtol=2e-2, atol=2e-2)
    dout = torch.randn(right.shape, generator=torch.Generator().manual_seed(0)).double()
    mine = torch.autograd.grad(found, [given[i] for i in leaves], dout.to(found))
    theirs = torch.autograd.grad(right, [wide[i] for i in leaves], dout)
    for ours, exact in zip(mine, theirs, strict=True):
        difference = (ours.double().cpu() - exact).norm()
        assert difference < 2e-2 * exact.norm()


def test_moba():
    given = drawn(1, (1, 4, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    found = moba(*given, unit=64, k=2)
    assert_near(found, lambda *x: papers.moba(*x, 64, 2), given, range(3))


def test_nsa():
    kv = (1, 1, 200, 64)
    q, *kvs, gates = drawn(2, (1, 4, 200, 64), *[kv] * 6, (1, 4, 200, 3))
    with torch.no_grad():
        made = torch.full((32,), 1 / 32, device="cuda", dtype=torch.bfloat16)
        coarse = [papers.compress(x, 32, 16, made) for x in kvs[:2]]
    given = [q, *[x.requires_grad_() for x in coarse], *kvs[2:], gates]
    found = nsa(q, coarse, kvs[2:4], kvs[4:], gates, k=3, last=1, window=50)

    def paper(q, *others):
        pairs = others[:2], others[2:4], others[4:6]
        return papers.nsa(q, *pairs, others[6], (32, 16, 64, 3, 1, 1, 50))

    assert_near(found, paper, given, range(8))


def test_dsa():
    given = drawn(
        3, (1, 4, 150, 64), (1, 1, 150, 64), (1, 1, 150, 64),
        (1, 16, 150, 32), (1, 150, 32), (1, 150, 16),
    )  # fmt: skip
    assert_near(dsa(*given, k=40), lambda *x: papers.dsa(*x, 40), given, range(3))


@pytest.mark.parametrize("page", [16, 64, 12])
def test_quest(page):
    given = [x.detach() for x in drawn(page, (2, 8, 1, 64), (2, 2, 1000, 64), (2, 2, 1000, 64))]
    found = quest(*given, page=page, k=5)
    right = papers.quest(*[x.double().cpu() for x in given], page, 5)
    torch.testing.assert_close(found.double().cpu(), right, rtol=2e-2, atol=2e-2)


def test_vsa():
    given = drawn(
        5, (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 1), (1, 2, 512, 64)
    )
    found = vsa(*given, canvas=(8, 8, 8), k=3)
    assert_near(found, lambda *x: papers.vsa(*x, (8, 8, 8), (4, 4, 4), 3), given, range(5))
