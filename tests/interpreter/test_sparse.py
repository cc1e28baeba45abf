"""Sparse attention of published models by kernels: each is its paper's formula."""

import pytest
import torch

from flexattn.sparse import dsa, moba, nsa, quest, vsa
from tests import sparse_formulas as papers
from tests.support import assert_close_as

pytestmark = pytest.mark.usefixtures("poisoned")


def drawn(seed, *shapes):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def assert_near(found, paper, *given):
    """Hold a result to the accuracy rule, beside the formula in float32."""
    right = paper(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
    assert_close_as(found, right, paper(*given))


def test_moba():
    given = drawn(1, (1, 2, 45, 16), (1, 1, 45, 16), (1, 1, 45, 16))
    assert_near(moba(*given, unit=16, k=2), papers.moba, *given, 16, 2)


def test_nsa():
    q, *kvs, gates = drawn(2, (1, 2, 50, 16), *[(1, 1, 50, 16)] * 6, (1, 2, 50, 3))
    coarse = [papers.compress(x, 8, 4, torch.full((8,), 1 / 8)) for x in kvs[:2]]
    found = nsa(
        q, coarse, kvs[2:4], kvs[4:], gates,
        length=8, stride=4, unit=16, k=3, first=1, last=1, window=10,
    )  # fmt: skip

    def paper(q, *given):
        *kvs, gates = given
        pairs = kvs[:2], kvs[2:4], kvs[4:]
        return papers.nsa(q, *pairs, gates, (8, 4, 16, 3, 1, 1, 10))

    assert_near(found, paper, q, *coarse, *kvs[2:], gates)


def test_dsa_of_wide_keys():
    given = drawn(
        3, (1, 4, 40, 48), (1, 1, 40, 48), (1, 1, 40, 32), (1, 8, 40, 5), (1, 40, 5), (1, 40, 8)
    )
    assert_near(dsa(*given, k=7), papers.dsa, *given, 7)


@pytest.mark.parametrize("page", [16, 12])
def test_quest(page):
    given = drawn(page, (2, 4, 1, 16), (2, 2, 90, 16), (2, 2, 90, 16))
    assert_near(quest(*given, page=page, k=2), papers.quest, *given, page, 2)


def test_vsa():
    given = drawn(5, (1, 2, 96, 16), (1, 1, 96, 16), (1, 1, 96, 16), (1, 2, 96, 1), (1, 2, 96, 16))
    found = vsa(*given, canvas=(4, 4, 6), cube=(4, 2, 2), k=2)
    assert_near(found, papers.vsa, *given, (4, 4, 6), (4, 2, 2), 2)
