"""Determinism: the same bits again, by torch's switch or by an option, or a refusal in words."""

import warnings

import pytest
import torch

import flexattn
from flexattn import explain, flex_attention
from flexattn.errors import UnsupportedError
from tests.support import inputs


def leaves():
    return [x.requires_grad_() for x in inputs(1, 2, 2, 21, 27)]


def attend(q, k, v, **more):
    return flex_attention(q, k, v, lambda s, b, h, i, j: 4.0 * torch.tanh(s / 4.0), **more)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_determinism_is_kept_or_refused(deterministic):
    given = leaves()
    table = torch.ones(2, requires_grad=True)
    one, other = (torch.autograd.grad(attend(*given).square().sum(), given) for _ in range(2))
    assert all(map(torch.equal, one, other))
    with pytest.raises(UnsupportedError, match="atomic"):
        flex_attention(*given, lambda s, b, h, q, k: s + table[h])
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        flex_attention(*given, lambda s, b, h, q, k: s + table[h])
    assert any("atomic" in str(each.message) for each in said)


def test_a_dense_bias_is_written_once_and_deterministic(deterministic):
    """Each score has an element of its own: nothing is added up, in lists of ragged blocks too."""
    given = leaves()
    table = torch.linspace(-1, 1, 2 * 21 * 30).reshape(1, 2, 21, 30).requires_grad_()

    def biased(s, b, h, q, k):
        return s + table[b, h, q, k]

    mask = flexattn.create_block_mask(
        lambda b, h, q, k: (q // 10 + k // 9) % 2 == 0, None, None, 21, 27, "cpu", (10, 9)
    )
    assert explain(*given, biased, mask).backward.captured == ()
    (found,) = torch.autograd.grad(flex_attention(*given, biased, mask).square().sum(), [table])
    kept = mask.mask_mod(0, 0, torch.arange(21)[:, None], torch.arange(27)[None, :])
    scores = (given[0] @ given[1].mT / 4 + table[..., :27]).masked_fill(~kept, -torch.inf)
    plain = (torch.softmax(scores, -1) @ given[2]).square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(plain, [table])[0], rtol=1e-4, atol=1e-5)


def test_determinism_by_an_option():
    given, table = leaves(), torch.ones(2, requires_grad=True)
    asked = {"DETERMINISTIC": True}
    attend(*given, kernel_options=asked).sum().backward()
    with pytest.raises(UnsupportedError, match=r"atomic(.|\n)*leave DETERMINISTIC out"):
        flex_attention(*given, lambda s, b, h, q, k: s + table[h], kernel_options=asked)
