"""Heads of a group that share a tile, on a Hopper GPU: each consumer has a head of its own."""

from dataclasses import replace

import pytest
import torch

import flexattn
from flexattn.catalogue import alibi, causal
from flexattn.errors import ConfigError
from flexattn.kernels.choose.defaults import reasons
from tests.cases import CASES
from tests.gpu.test_hopper import prepared, run_with
from tests.support import ON_SM_90, assert_judged, block_mask, tensors

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
# Masks that know their head, and with it need other blocks.
OF_THEIR_OWN = ("head_windows", "random_blocks", "random_blocks_empty_rows")


def packed(made, **numbers):
    """The default config of a call with two heads in a tile."""
    launch = made.launch
    config = replace(
        launch.choice.config, consumers=2, consumer_regs=240, pack_gqa=True, **numbers
    )
    assert not reasons(config, launch.problem.structure, launch.choice.device)
    return config


def check(q, k, v, score_mod=None, mask=None, **numbers):
    made = prepared(q, k, v, score_mod, mask)
    got = run_with(made, packed(made, **numbers))
    assert_judged(got, q, k, v, score_mod=score_mod, block_mask=mask)


@pytest.mark.parametrize(
    "entry", [each for each in CASES if each.name not in OF_THEIR_OWN], ids=str
)
def test_every_case(entry):
    built = entry.make(2, 8, 2, 611, 747, device="cuda", dtype=torch.bfloat16)
    q, k, v = tensors(2, 8, 2, 611, 747, 128)
    check(q, k, v, built.score_mod, block_mask(built.mask_mod, q, k, per_head=False))


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_heads_with_lists_of_their_own_are_refused(name):
    entry = next(each for each in CASES if each.name == name)
    built = entry.make(2, 8, 2, 611, 747, device="cuda", dtype=torch.bfloat16)
    q, k, v = tensors(2, 8, 2, 611, 747, 128)
    launch = prepared(q, k, v, built.score_mod, block_mask(built.mask_mod, q, k)).launch
    config = replace(launch.choice.config, consumers=2, consumer_regs=240, pack_gqa=True)
    (said,) = reasons(config, launch.problem.structure, launch.choice.device)
    assert "lists of blocks of their own" in said


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("tile_scheduler", ["grid", "static", "dynamic"])
@pytest.mark.parametrize("length", [1, 17, 64, 65, 300])
def test_lengths_and_schedules(length, tile_scheduler, D):
    q, k, v = tensors(3, 12, 2, length, 1347, D)
    # What is kept of Q in registers leaves none for a walk over units.
    numbers = {"q_in_regs": 0, "cross_tile_pipeline": D != 256} if tile_scheduler != "grid" else {}
    check(q, k, v, tile_scheduler=tile_scheduler, **numbers)
    mask = block_mask(causal, q, k, per_batch=False, per_head=False)
    check(q, k, v, alibi(12, "cuda"), mask, tile_scheduler=tile_scheduler)


@pytest.mark.parametrize("order", ["last", "group", "heads", "sections"])
@pytest.mark.parametrize("heads", [(2, 1), (16, 4), (24, 4)], ids=str)
def test_orders_and_groups(heads, order):
    q, k, v = tensors(2, *heads, 611, 747, 128)
    check(q, k, v, alibi(heads[0], "cuda"), order=order)


def test_bits_stay_from_run_to_run():
    q, k, v = tensors(2, 16, 4, 61, 4096, 128)
    made = prepared(q, k, v)
    config = packed(made)
    wanted = run_with(made, config)
    for _ in range(50):
        got = run_with(made, config)
        assert torch.equal(got.out, wanted.out) and torch.equal(got.lse, wanted.lse)


def test_heads_of_other_groups_are_refused():
    q, k, v = tensors(1, 6, 2, 61, 512, 128)
    made = prepared(q, k, v)
    with pytest.raises(ConfigError, match="share one KV head"):
        run_with(made, packed(made))
    assert flexattn.flex_attention(q, k, v, enable_gqa=True).shape == q.shape
