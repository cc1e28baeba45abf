"""Outputs that go from registers to memory, on a Hopper GPU: the bits of those through tiles."""

from dataclasses import replace
from functools import partial
from math import prod

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.space.rules import reasons
from tests.gpu.test_hopper import HOPPER, prepared, run_with, tensors
from tests.support import assert_judged, block_mask, heads_inside

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not HOPPER, reason="the Gluon template is Hopper's"),
]
LENGTH = 1347
IDS = (torch.arange(LENGTH) // 211).int()
BATCHES = torch.stack([torch.arange(LENGTH) // 211, torch.arange(LENGTH) // 77])


def of_batch():
    ids = BATCHES.cuda()
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)


MODS = {
    "noop": lambda: (None, None),
    "causal": lambda: (None, causal),
    "softcap": lambda: (softcap(30.0), causal),
    "alibi": lambda: (alibi(16, "cuda"), causal),
    "window": lambda: (None, sliding_window(100)),
    "documents of a batch": lambda: (None, of_batch()),
    "documents": lambda: (None, and_masks(document(IDS.cuda()), causal)),
    "relative": lambda: (relative_bias(torch.randn(16, 4096, device="cuda"), 2048), causal),
}
# What stands behind an output, and may not change.
GUARD = 77.0


@pytest.fixture
def guards(monkeypatch):
    """Outputs with rows behind their last one; poisoned as others are."""
    kept = []
    allocate = torch.empty_strided

    def guarded(shape, strides, **options):
        if len(shape) != 4:
            return allocate(shape, strides, **options)  # the tracer's
        size = prod(shape)
        whole = torch.full((size + 256 * shape[-1],), GUARD, **options)
        whole[:size] = torch.nan
        kept.append(whole[size:])
        return whole.as_strided(shape, strides)

    monkeypatch.setattr(torch, "empty_strided", guarded)
    return kept


def agree(made, judge):
    """Forms that add and round in the same order give the same bits, and the first is right.

    Through shared memory or not is no difference. One program or two is one: what rises with the
    keys is anchored at the first row of a program.
    """
    choice, wanted = made.launch.choice, {}
    for config in forms(choice.config):
        if reasons(config, choice.problem.structure, choice.device):
            continue
        got = run_with(made, config)
        order = config.watched, config.chained, config.together
        if order not in wanted:
            judge(got)
            wanted[order] = got
        first = wanted[order]
        assert torch.equal(got.out, first.out) and torch.equal(got.lse, first.lse), config


def forms(config):
    """Few of them: each is a kernel to compile."""
    for together in (False, True)[: 1 + (config.consumers == 2)]:
        each = replace(config, together=together)
        yield replace(each, direct=False)
        yield replace(each, direct=True, schedule="grid")
    last = replace(config, direct=True, together=config.consumers == 2, schedule="dynamic")
    yield last
    if config.consumers == 2 and config.BLOCK_N == 128:
        yield replace(last, chained=not config.chained)
        yield replace(last, watched=not config.watched)


# Whatever the head dimension; those that read in other ways, at 128 columns alone.
EVERYWHERE = ("noop", "causal", "window", "documents")
CASES = [(D, mods) for D in (64, 96, 256) for mods in EVERYWHERE] + [(128, mods) for mods in MODS]


@pytest.mark.parametrize(("D", "mods"), CASES)
def test_the_same_bits_as_through_shared_memory(D, mods, guards):
    score_mod, mask_mod = MODS[mods]()
    q, k, v = tensors(2, 16, 4, LENGTH, LENGTH, D)
    mask = block_mask(mask_mod, q, k, per_batch=mods == "documents of a batch", per_head=False)
    made = prepared(q, k, v, score_mod, mask)
    agree(made, lambda got: assert_judged(got, q, k, v, score_mod=score_mod, block_mask=mask))
    assert guards and all((each == GUARD).all() for each in guards)


@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 65, 127, 129, 200])
def test_every_end_of_a_tile(length, guards):
    """Rows behind the last are another head's, or nobody's."""
    for lay in (lambda x: x, heads_inside):
        q, k, v = (lay(x) for x in tensors(2, 6, 2, length, 345, 128))
        agree(prepared(q, k, v), partial(assert_judged, q=q, k=k, v=v))
    assert all((each == GUARD).all() for each in guards)


def test_bits_stay_from_run_to_run():
    """Consumers of one program that meet nowhere, at units of two tiles of keys."""
    q, k, v = tensors(2, 16, 4, 3011, 3011, 128)
    mask = block_mask(sliding_window(100), q, k, per_batch=False, per_head=False)
    made = prepared(q, k, v, None, mask)
    config = replace(made.launch.choice.config, direct=True, together=True)
    wanted = run_with(made, config)
    for _ in range(50):
        got = run_with(made, config)
        assert torch.equal(got.out, wanted.out) and torch.equal(got.lse, wanted.lse)
