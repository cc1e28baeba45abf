"""A cache that grows by a token: each call is served from the one before, and stays right."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import flexattn
from flexattn.errors import InputError
from flexattn.frontend import attention, guards
from flexattn.frontend.admission import make_call
from flexattn.frontend.plan import plan
from tests.support import assert_accurate

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned")]


@pytest.fixture
def admitted(monkeypatch):
    """Numbers of keys of the calls that were looked at whole."""
    guards._seen.clear()
    guards._decoded.clear()
    lengths = []
    made = attention.admit

    def counted(given):
        lengths.append(given.k.shape[2])
        return made(given)

    monkeypatch.setattr(attention, "admit", counted)
    return lengths


def tensors(keys, rows=1, heads=(4, 2), D=16, seed=0):
    torch.manual_seed(seed + keys)
    q = torch.randn(2, heads[0], rows, D)
    return (q, *(torch.randn(2, heads[1], keys, D) for _ in "kv"))


def capped(bias):
    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    return mod


@pytest.mark.parametrize("rows", [1, 3])
def test_lengths_up_to_a_power_of_two_are_admitted_once(rows, admitted):
    mod = capped(torch.linspace(-1, 1, 600))
    for more in ({}, {"score_mod": mod}, {"sinks": torch.randn(4)}):
        admitted.clear()
        for keys in (257, 258, 300, 384, 385, 511, 512, 513):
            assert_accurate(*tensors(keys, rows), **more)
        assert admitted == [257, 513], more


def test_a_launch_is_the_one_that_the_long_way_makes(admitted):
    """Config, programs and everything but the launchers, which hold what they were bound to."""
    for keys in (300, 301, 383, 384, 400, 500):
        q, k, v = tensors(keys)
        flexattn.flex_attention(q, k, v, enable_gqa=True)
        key = guards.guard_key(attention.Call(q, k, v, enable_gqa=True))
        ours = guards._seen.get(key)[0].launch
        whole = plan(make_call(q, k, v, enable_gqa=True)).launch
        alike = {"attend": None, "combine": None}
        assert replace(ours, **alike) == replace(whole, **alike)
        assert ours.attend.bound == whole.attend.bound
        assert (ours.combine is None) == (whole.combine is None)
    assert admitted == [300]


def test_caches_that_are_views_of_a_longer_one(admitted):
    q, k, v = tensors(512)
    for keys in (400, 401, 450):
        assert_accurate(q, k[:, :, :keys], v[:, :, :keys])
    assert admitted == [400]


def test_what_lies_otherwise_is_looked_at(admitted):
    q, k, v = tensors(300)
    assert_accurate(q, k, v)
    odd = torch.randn(2, 2, 301, 17)[..., 1:]
    assert_accurate(q, odd, odd)
    turned = torch.randn(2, 2, 16, 302).mT
    assert_accurate(q, turned, turned)
    assert_accurate(*tensors(303, heads=(4, 4)))
    assert admitted == [300, 301, 302, 303]


def test_a_mod_that_captures_another_number_is_seen(admitted):
    scale = 2.0

    def mod(score, b, h, q_idx, kv_idx):
        return score * scale

    for keys, number in ((300, 2.0), (301, 2.0), (302, 0.5), (303, 0.5), (304, 3.0)):
        scale = number
        assert_accurate(*tensors(keys), score_mod=mod)
    assert admitted == [300, 302, 304]


def test_gradients_and_masks_are_served_as_before(admitted):
    q, k, v = tensors(300)
    assert_accurate(q, k, v)
    q, k, v = tensors(301)
    out = flexattn.flex_attention(q.requires_grad_(), k, v, enable_gqa=True)
    assert out.requires_grad
    q, k, v = tensors(302)
    mask = flexattn.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx > 9, None, None, 1, 302,
                                      device="cpu")  # fmt: skip
    assert_accurate(q, k, v, block_mask=mask)
    assert admitted == [300, 301, 302]


def test_a_value_of_another_length_is_refused(admitted):
    q, k, v = tensors(300)
    flexattn.flex_attention(q, k, v, enable_gqa=True)
    with pytest.raises(InputError, match="301"):
        flexattn.flex_attention(q, tensors(301)[1], v, enable_gqa=True)


def test_a_mod_s_end_frees_what_it_captured(admitted):
    bias = torch.zeros(400)
    freed, mod = weakref.ref(bias), capped(bias)
    for keys in (300, 301, 302):
        q, k, v = tensors(keys)
        flexattn.flex_attention(q, k, v, score_mod=mod, enable_gqa=True)
    del bias, mod
    gc.collect()
    assert freed() is None
