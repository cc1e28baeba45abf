"""Each sparse attention is its paper's formula, with autograd's gradients, in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexattn.errors import InputError
from flexattn.sparse import dsa, indexer_scores, moba, nsa, quest, text, vsa
from tests import sparse_formulas as papers

SIZES = (8, 4, 16, 4, 1, 2, 10)  # NSA's: length, stride, unit, k, first, last, window
NAMED = dict(zip("length stride unit k first last window".split(), SIZES, strict=True))


def drawn(seed, *shapes):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def assert_same(found, right, leaves):
    torch.testing.assert_close(found, right)
    dout = torch.randn_like(right)
    both = (torch.autograd.grad(x, leaves, dout, retain_graph=True) for x in (found, right))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("length", "unit", "k"), [(75, 16, 3), (64, 16, 1), (20, 32, 9)])
def test_moba(length, unit, k):
    leaves = drawn(k, (2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 6))
    assert_same(moba(*leaves, unit=unit, k=k), papers.moba(*leaves, unit, k), leaves)


@pytest.mark.parametrize("length", [90, 7])
def test_nsa(length):
    kv = (1, 2, length, 8)
    q, *kvs, gates = drawn(length, (1, 4, length, 8), *[kv] * 6, (1, 4, length, 3))
    made = torch.linspace(0.5, 1.5, 8, dtype=torch.float64, requires_grad=True)
    coarse = [papers.compress(x, 8, 4, made) for x in kvs[:2]]
    given = q, coarse, kvs[2:4], kvs[4:], gates.sigmoid()
    leaves = [q, *kvs[2:], gates] + [made, *kvs[:2]] * (length >= 8)
    assert_same(nsa(*given, **NAMED), papers.nsa(*given, SIZES), leaves)


def test_dsa():
    q, k, v, *indexer = drawn(
        3, (2, 4, 40, 12), (2, 1, 40, 12), (2, 1, 40, 8), (2, 16, 40, 5), (2, 40, 5), (2, 40, 16)
    )
    leaves = [q, k, v]
    assert_same(dsa(*leaves, *indexer, k=7), papers.dsa(*leaves, *indexer, 7), leaves)
    # An indexer learns by a loss of its own, of its scores.
    assert all(x is not None for x in torch.autograd.grad(indexer_scores(*indexer).sum(), indexer))


@pytest.mark.parametrize("keys", [16, 75])
def test_quest(keys):
    given = [x.detach() for x in drawn(keys, (2, 4, 1, 8), (2, 2, keys, 8), (2, 2, keys, 8))]
    torch.testing.assert_close(quest(*given, page=16, k=2), papers.quest(*given, 16, 2))


def test_vsa():
    canvas, cube = (4, 4, 6), (2, 2, 2)
    leaves = drawn(5, (1, 4, 96, 8), (1, 2, 96, 8), (1, 2, 96, 6), (1, 4, 96, 6), (1, 4, 96, 1))
    found = vsa(*leaves, canvas=canvas, cube=cube, k=3)
    assert_same(found, papers.vsa(*leaves, canvas, cube, 3), leaves)


def test_masks_that_inference_kept_serve_training():
    q, k, gates = drawn(2, (1, 2, 33, 8), (1, 1, 33, 8), (1, 2, 33, 3))
    given = q, (k[:, :, :7], k[:, :, :7]), (k, k), (k, k), gates
    with torch.inference_mode():
        kept = nsa(*given, **NAMED)
    assert torch.equal(nsa(*given, **NAMED), kept)
    assert torch.autograd.grad(nsa(*given, **NAMED).sum(), q)[0].any()


def window(length):
    return text._kept(text._window, torch.device("cpu"), length, 10)


def test_masks_of_a_trace_are_not_kept():
    """Later calls of the same sizes would read lists that have no numbers."""
    with FakeTensorMode():
        assert type(window(29).kv_indices) is not torch.Tensor
    assert type(window(29).kv_indices) is torch.Tensor


def test_few_masks_are_kept():
    masks = [window(length) for length in range(40, 50)]
    assert window(49) is masks[-1] and window(40) is not masks[0]


@pytest.mark.parametrize("at_once", [1, 100])
def test_scores_of_some_rows_at_a_time(at_once, monkeypatch):
    monkeypatch.setattr(text, "_AT_ONCE", at_once)
    test_nsa(21)
    test_dsa()


def test_sequences_of_no_rows():
    q, k, gates = drawn(1, (1, 2, 0, 8), (1, 1, 0, 8), (1, 2, 0, 3))
    assert nsa(q, (k, k), (k, k), (k, k), gates).shape == q.shape
    assert dsa(q, k, k, q, k[:, 0], q[:, 0, :, :2]).shape == q.shape
    assert moba(q, k, k).shape == q.shape


def test_what_does_not_fit_is_refused():
    q, k = drawn(1, (1, 2, 64, 8), (1, 2, 32, 8))
    with pytest.raises(InputError, match="whole cubes"):
        vsa(q, q, q, q, q, canvas=(4, 4, 3), k=1)
    with pytest.raises(InputError, match="as many keys as queries"):
        vsa(q, k, k, q, q, canvas=(4, 4, 4), k=1)
    for canvas, cube in (((8, 8), (4, 4, 4)), ((4, 4, 4), (4, 0, 4)), ((-4, -4, 4), (4, 4, 4))):
        with pytest.raises(InputError, match="frames, rows and columns, at least 1"):
            vsa(q, q, q, q, q, canvas=canvas, cube=cube, k=1)
    three = q.repeat(1, 2, 1, 1)[:, :3]
    with pytest.raises(InputError, match="multiple of the key heads"):
        vsa(three, q, q, three, three, canvas=(4, 4, 4), k=1)
    with pytest.raises(InputError, match="multiple of the key heads"):
        moba(three, q, q)
    with pytest.raises(InputError, match="one step"):
        quest(q, k, k)
    with pytest.raises(InputError, match="multiples of the stride"):
        nsa(q, (q, q), (q, q), (q, q), q[..., :3], unit=40)


def test_a_decode_step_is_refused_where_rows_are_at_their_keys():
    q, k, gates = drawn(1, (1, 2, 1, 8), (1, 2, 64, 8), (1, 2, 1, 3))
    one = k[:, :, :1]
    indexer = q, k[:, 0], q[:, 0, :, :2]
    for call in (
        lambda: moba(q, k, k),
        lambda: dsa(q, k, k, *indexer),
        lambda: dsa(q, one, one, *indexer),
        lambda: nsa(q, (k, k), (k, k), (one, one), gates),
        lambda: nsa(q, (k, k), (one, one), (k, k), gates),
    ):
        with pytest.raises(InputError, match=r"1 query rows and 64 keys\n.*\n.*`quest`"):
            call()
