"""Inputs quantized to e4m3: their factors, what blocks and smoothing gain, and refusals."""

import pytest
import torch

import flexattn
from flexattn import create_block_mask, flex_attention
from flexattn.catalogue import causal, softcap
from flexattn.errors import InputError
from flexattn.reference import Precision, attention
from tests.support import inputs


def error(made, *given, score_mod=None, **call):
    """Of attention of the quantized tensors, beside that of the given ones in float64."""
    exact = attention(*given, score_mod=score_mod, precision=Precision.ORACLE, **call).out
    got = flex_attention(
        *made.tensors, made.score_mod(score_mod), enable_gqa=True, **made.descales, **call
    )
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("block", [None, 64, 128])
@pytest.mark.parametrize("lengths", [(1, 1), (65, 129), (200, 333)])
def test_the_numbers_come_back(lengths, block):
    q, k, v = inputs(2, 4, 2, *lengths, 64)
    made = flexattn.quantize(q, k, v, block=block)
    size = block or 10**6
    for x, eight, factor in ((q, made.q, made.q_factor), (k, made.k, made.k_factor)):
        back = eight.double() * factor.repeat_interleave(size, 2)[:, :, : x.shape[2], None]
        # Half of a unit in the last of four places.
        assert ((back - x.double()).abs() <= x.double().abs() / 16 + factor.max() * 2**-10).all()
        assert factor.shape[2] == -(-x.shape[2] // size)
    mask = create_block_mask(causal, None, None, *lengths, "cpu")
    call = {"block_mask": mask, "score_mod": softcap(20.0)}
    assert error(made, q, k, v, **call) < 0.06


@pytest.mark.parametrize("block", [64, 128])
def test_a_block_of_large_keys_does_not_cost_others_their_bits(block):
    q, k, v = (x.clone() for x in inputs(1, 2, 2, 40, 2000, 64))
    # No row sees this key, but the range of its head is its.
    q[..., 0], k[:, :, 7, 0] = 8.0, -(2.0**17)
    found = [error(flexattn.quantize(q, k, v, block=each), q, k, v) for each in (None, block)]
    assert found[1] < 0.4 * found[0]


def test_smoothing_takes_what_all_keys_have_in_common():
    q, k, v = inputs(1, 2, 1, 80, 500, 64)
    k = k + 20 * torch.randn(1, 1, 1, 64, dtype=torch.float64).to(k.dtype)
    plain, smooth = (flexattn.quantize(q, k, v, smooth=each) for each in (False, True))
    assert error(smooth, q, k, v) < 0.3 * error(plain, q, k, v)


def test_zeros_have_a_factor_of_one():
    made = flexattn.quantize(*(torch.zeros(1, 1, 3, 64) for _ in "qkv"), block=64)
    assert (made.q_factor == 1).all() and (made.k.float() == 0).all()


@pytest.mark.parametrize(("change", "said"), [({"block": 32}, "64 or 128"), ({"k": 3}, "k has 3")])
def test_what_is_refused(change, said):
    q = torch.zeros(1, 1, 3, 64)
    k = q[0] if change.pop("k", 0) else q
    with pytest.raises(InputError, match=said):
        flexattn.quantize(q, k, q, **change)
