"""Sparse attention of published models on a GPU: each is its paper's formula, and trains."""

from functools import partial

import pytest
import torch

from flexattn.sparse import dsa, moba, nsa, quest, vsa
from tests import sparse_formulas as papers
from tests.support import assert_close_as

pytestmark = pytest.mark.usefixtures("poisoned")


def drawn(seed, *shapes):
    draw = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]


def on_the_host(x):
    return x.detach().cpu().requires_grad_() if isinstance(x, torch.Tensor) else x


def assert_near(attend, paper, given, leaves):
    """Hold attend(*given), and its gradients in the leaves, to the accuracy rule.

    paper: the formula in float64. The other run of their dtype is plain torch's, on the host.
    """
    found, hosts = attend(*given), [on_the_host(x) for x in given]
    wide = [x.detach().double().requires_grad_() for x in hosts]
    right, other = paper(*wide), attend(*hosts)
    assert_close_as(found.detach().cpu(), right.detach(), other.detach())
    dout = torch.randn(right.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    mine = torch.autograd.grad(found, [given[i] for i in leaves], dout.to(found))
    exact = torch.autograd.grad(right, [wide[i] for i in leaves], dout.double())
    plain = torch.autograd.grad(other, [hosts[i] for i in leaves], dout)
    for each in zip(mine, exact, plain, strict=True):
        assert_close_as(*(x.cpu() for x in each))


def test_moba():
    given = drawn(1, (1, 4, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    attend = partial(moba, unit=64, k=2)
    assert_near(attend, lambda *x: papers.moba(*x, 64, 2), given, range(3))


def test_nsa():
    kv = (1, 1, 200, 64)
    q, *kvs, gates = drawn(2, (1, 4, 200, 64), *[kv] * 6, (1, 4, 200, 3))
    with torch.no_grad():
        made = torch.full((32,), 1 / 32, device="cuda", dtype=torch.bfloat16)
        coarse = [papers.compress(x, 32, 16, made) for x in kvs[:2]]
    given = [q, *[x.requires_grad_() for x in coarse], *kvs[2:], gates]

    def attend(q, *others):
        pairs = others[:2], others[2:4], others[4:6]
        return nsa(q, *pairs, others[6], k=3, last=1, window=50)

    def paper(q, *others):
        pairs = others[:2], others[2:4], others[4:6]
        return papers.nsa(q, *pairs, others[6], (32, 16, 64, 3, 1, 1, 50))

    assert_near(attend, paper, given, range(8))


def test_dsa():
    given = drawn(
        3, (1, 4, 150, 64), (1, 1, 150, 64), (1, 1, 150, 64),
        (1, 16, 150, 32), (1, 150, 32), (1, 150, 16),
    )  # fmt: skip
    assert_near(partial(dsa, k=40), lambda *x: papers.dsa(*x, 40), given, range(3))


@pytest.mark.parametrize("page", [16, 64, 12])
def test_quest(page):
    given = drawn(page, (2, 8, 1, 64), (2, 2, 1000, 64), (2, 2, 1000, 64))
    attend = partial(quest, page=page, k=5)
    assert_near(attend, lambda *x: papers.quest(*x, page, 5), given, range(3))


def test_vsa():
    given = drawn(
        5, (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 1), (1, 2, 512, 64)
    )
    attend = partial(vsa, canvas=(8, 8, 8), k=3)
    assert_near(attend, lambda *x: papers.vsa(*x, (8, 8, 8), (4, 4, 4), 3), given, range(5))
