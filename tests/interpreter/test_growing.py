"""A cache that grows by a token: each call is served from the one before, and stays right."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import flexattn
from flexattn.block_mask.lists import few_rows, relisted
from flexattn.errors import InputError, LayoutError, UnsupportedError
from flexattn.frontend import attention, launch_cache as cache
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.integrations.decode_masks import padded_mask, shared_mask
from flexattn.problem import facts, problem as problems
from tests.growing import numbers_admitted
from tests.support import assert_accurate


@pytest.fixture
def admitted(monkeypatch):
    return numbers_admitted(monkeypatch)


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
        call = attention.Call(q, k, v, enable_gqa=True)
        _, ours = cache.launch_cache.find(cache.call_key(call), call)
        whole = plan(make_call(q, k, v, enable_gqa=True)).launch
        alike = {"kernels": ()}
        assert replace(ours, **alike) == replace(whole, **alike)
        assert [x.bound for x in ours.kernels] == [x.bound for x in whole.kernels]
    assert admitted == [300]


def test_lengths_of_a_bucket_share_a_launch(admitted, monkeypatch):
    """Once each length behind the first bucket was prepared anew, which took twice as long."""
    prepared = []

    def seen(problem, *rest):
        prepared.append(problem.kv_len)
        return prepare_launch(problem, *rest)

    prepare_launch = cache.prepare_launch
    monkeypatch.setattr(cache, "prepare_launch", seen)
    for keys in (300, 301, 304, 305, 306, 320, 321, 322):
        assert_accurate(*tensors(keys))
    assert admitted == [300]
    assert prepared == [305, 321]


def test_keys_and_values_that_lie_otherwise(admitted):
    """Each has its own strides, which the number of keys changes."""
    q, k, _ = tensors(320)
    for keys in (305, 306, 310):
        assert_accurate(q, k[:, :, :keys], torch.randn(2, 2, keys, 8))
    assert admitted == [305]


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


def test_steps_of_a_padded_batch(admitted):
    """Masks of one table have the same lists up to another block of keys."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for keys in (300, 301, 302, 384, 385, 386):
            seen = torch.rand(2, keys, generator=draw) < 0.7
            seen[:, -1] = True
            held = padded_mask(seen, keys)
            assert_accurate(*tensors(keys), block_mask=shared_mask(held))
            del held  # as a step's mask is, before the next one
    assert admitted == [300, 385]


def late(table):
    def mask_mod(b, h, q_idx, kv_idx):
        return table[kv_idx]

    return mask_mod


def test_masks_of_other_lists_or_another_length_are_looked_at(admitted):
    table = torch.rand(600) < 0.5
    mask_mod = late(table)
    for keys in (300, 301):  # lists of its own each
        mask = few_rows(mask_mod, 2, 1, keys, torch.device("cpu"))
        assert_accurate(*tensors(keys), block_mask=mask)
    assert admitted == [300, 301]
    assert_accurate(*tensors(302), block_mask=relisted(mask, 302))
    assert admitted == [300, 301]
    with pytest.raises(InputError):
        flexattn.flex_attention(*tensors(303), block_mask=mask, enable_gqa=True)
    mask = relisted(mask, 304)
    mask.kv_num_blocks = mask.kv_num_blocks.clone()
    assert_accurate(*tensors(304), block_mask=mask)
    assert admitted == [300, 301, 303, 304]


def test_a_mask_s_end_frees_what_it_captured(admitted):
    table = torch.rand(600) < 0.5
    freed, mask_mod = weakref.ref(table), late(table)
    masks = [few_rows(mask_mod, 2, 1, 300, torch.device("cpu"))]
    for keys in (300, 301, 302):
        masks.append(relisted(masks[0], keys))
        flexattn.flex_attention(*tensors(keys), block_mask=masks[-1], enable_gqa=True)
    assert admitted == [300]
    del table, mask_mod, masks
    gc.collect()
    assert freed() is None


def test_a_mask_that_ends_while_a_launch_is_prepared_is_not_kept(monkeypatch):
    """Its end dropped an entry that was stored again afterwards, with nothing left to drop it."""
    table = torch.rand(600) < 0.5
    freed, mask_mod = weakref.ref(table), late(table)
    masks = [few_rows(mask_mod, 2, 1, 300, torch.device("cpu"))]
    flexattn.flex_attention(*tensors(300), block_mask=masks[0], enable_gqa=True)
    longer, prepare = relisted(masks[0], 305), cache.prepare_launch

    def ends(*given):
        made = prepare(*given)
        masks.clear()
        gc.collect()
        return made

    monkeypatch.setattr(cache, "prepare_launch", ends)
    flexattn.flex_attention(*tensors(305), block_mask=longer, enable_gqa=True)
    del table, mask_mod, longer
    gc.collect()
    assert freed() is None


def test_two_caches_in_turn(admitted):
    """Draft and target, or two requests: of each power of two the last call is known."""
    for keys in (300, 600, 301, 601, 302, 602):
        assert_accurate(*tensors(keys))
    assert admitted == [300, 600]


def test_a_nested_value_is_refused_in_words(admitted):
    q, k, v = tensors(300)
    flexattn.flex_attention(q, k, v, enable_gqa=True)
    nested = torch.nested.nested_tensor([torch.randn(2, 5, 16)] * 2, layout=torch.jagged)
    with pytest.raises(LayoutError, match="nested"):
        flexattn.flex_attention(q, tensors(301)[1], nested, enable_gqa=True)


@pytest.mark.parametrize("keys", [300, 301])
def test_a_traced_call_is_refused_after_one_that_ran(keys, admitted):
    """A launch is no operation of a trace: make_fx kept an output that nobody wrote."""
    flexattn.flex_attention(*tensors(300), enable_gqa=True)
    with pytest.raises(UnsupportedError, match="traced"):
        make_fx(lambda *x: flexattn.flex_attention(*x, enable_gqa=True))(*tensors(keys))


def test_a_cache_that_grows_beyond_2_gib_is_another_kernels(monkeypatch):
    """Offsets of 32 bits, as AMD's buffer instructions have them, end there; here at 312 keys."""
    for module in (facts, problems):
        monkeypatch.setattr(module, "NEAR_BYTES", 80_000)
    near = []
    for keys in (300, 310, 320, 330):
        q, k, v = tensors(keys)
        flexattn.flex_attention(q, k, v, enable_gqa=True)
        call = attention.Call(q, k, v, enable_gqa=True)
        _, launch = cache.launch_cache.find(cache.call_key(call), call)
        near.append(launch.problem.structure.layout.near)
    assert near == [True, True, False, False]
