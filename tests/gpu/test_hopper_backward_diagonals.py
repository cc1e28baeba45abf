"""Biases by distance in Hopper's backward on a GPU: their gradients, and those beside them."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, relative_bias, sliding_window, softcap, t5_bias
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from tests.gpu.test_hopper_backward import FORMS, TILES, forced, hopper, on_gpu  # noqa: F401
from tests.gradients import assert_gradients
from tests.support import block_mask


def by_distance(table):
    return relative_bias(table, 700)


def at_first(table):
    """Tiles that begin before the table's first place: what is negative counts from its end."""
    return relative_bias(table, 100)


def at_last(table):
    """The longest of the rows reads the table's last place, and its tile reads beyond."""
    return relative_bias(table, 799)


def capped(table):
    cap, bias = softcap(5.0), relative_bias(table, 700)
    return lambda score, *at: cap(bias(score, *at), *at)


def scaled(table):
    return lambda score, b, h, q_idx, kv_idx: score * (1 + 0.1 * table[h, kv_idx - q_idx + 700])


def wrapped(table):
    """Negative places count from the table's end. Only the farthest distances share one: where
    half of all scores do, what is left of their gradients is rounding, its largest of four luck.
    """
    return lambda score, b, h, q_idx, kv_idx: (
        score + table[h, torch.clamp(q_idx - kv_idx, -380, 320)]
    )


def buckets(table):
    return t5_bias(table, 100)


def table_of(make, heads, dtype):
    shape = (32, heads) if make is buckets else (heads, 1400)
    draw = torch.Generator("cuda").manual_seed(3)
    return torch.randn(shape, generator=draw, device="cuda", dtype=dtype)


def served_by(q, k, v, score_mod, mask_mod=None):
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    return flexattn.explain(
        *given, score_mod, block_mask(mask_mod, q, k, 128), enable_gqa=True
    ).backward.config


@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize(
    "make", [by_distance, at_first, at_last, capped, scaled, wrapped, buckets]
)
def test_gradients(make, D):
    for heads, L, S, dtype in (
        ((2, 2), 512, 640, torch.bfloat16),
        ((4, 2), 333, 401, torch.float32),
        ((3, 1), 601, 207, torch.bfloat16),
    ):
        q, k, v = on_gpu(2, *heads, L, S, D)
        table = table_of(make, heads[0], dtype)
        config = served_by(q, k, v, make(table.requires_grad_()), causal)
        # A factor's derivative takes registers that 128 columns do not leave: Triton's serves.
        theirs = D == 80 or (D == 128 and make is scaled)
        assert theirs or isinstance(config, HopperBackwardConfig), config
        for mask_mod in (causal, None, sliding_window(150)):
            assert_gradients(q, k, v, make=make, tensors=(table,), mask_mod=mask_mod, block=128)


WITHOUT = ("deterministic", "by_product")
EVERY = [
    (D, name) for D in TILES for name in FORMS
    if not FORMS[name].keys() & set(WITHOUT) and (D < 256 or "dq_tma" not in FORMS[name])
]  # fmt: skip


@pytest.mark.parametrize(("D", "name"), EVERY)
def test_forms(name, D, forced):  # noqa: F811
    for tile in TILES[D]:
        forced(HopperBackwardConfig(*tile, **FORMS[name]))
        for heads, mask_mod in (((4, 2), causal), ((2, 2), None)):
            given = on_gpu(1, *heads, 520, 601, D)
            table = table_of(by_distance, heads[0], torch.bfloat16)
            assert_gradients(
                *given, make=by_distance, tensors=(table,), mask_mod=mask_mod, block=128
            )


def test_beside_dropout():
    given = on_gpu(2, 4, 2, 333, 520, 128)
    table = table_of(by_distance, 4, torch.bfloat16)
    assert_gradients(*given, make=by_distance, tensors=(table,), dropout_p=0.3)


def test_a_bias_that_is_not_learned_has_the_same_gradients_beside_it():
    q, k, v = on_gpu(2, 4, 4, 520, 640, 128)
    table = table_of(by_distance, 4, torch.bfloat16)
    assert isinstance(served_by(q, k, v, by_distance(table), causal), HopperBackwardConfig)
    fixed = by_distance(table)
    assert_gradients(q, k, v, make=lambda: fixed, mask_mod=causal, block=128)
