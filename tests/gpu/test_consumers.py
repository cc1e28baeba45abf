"""Consumers that run one program, on a Hopper GPU: each has its own rows, turns and hand-overs."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.kernels.choose.defaults import reasons
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS
from tests.gpu.test_hopper import prepared, run_with
from tests.support import ON_SM_90, assert_judged, block_mask, tensors

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
LENGTH = 1347
IDS = torch.arange(LENGTH) // 211
BATCHES = torch.stack([IDS, torch.arange(LENGTH) // 77])


def relative():
    return relative_bias(torch.randn(16, 4096, device="cuda"), 2048)


def of_batch():
    ids = BATCHES.cuda()
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)


def compares(dtype):
    """A mask that reads numbers of a dtype for each key."""
    numbers = (torch.arange(LENGTH) % 97).to("cuda", dtype)
    return lambda b, h, q_idx, kv_idx: numbers[q_idx] <= numbers[kv_idx]


def wide():
    """Numbers that differ in the upper half of their 64 bits alone."""
    ids = (IDS << 40).cuda()
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def two():
    kept, ids = (torch.arange(LENGTH) % 5 > 0).cuda(), IDS.int().cuda()
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & kept[kv_idx]


MODS = {
    "noop": lambda: (None, None),
    "causal": lambda: (None, causal),
    "softcap": lambda: (softcap(30.0), causal),
    "alibi": lambda: (alibi(16, "cuda"), causal),
    "window": lambda: (None, sliding_window(100)),
    "documents of a batch": lambda: (None, of_batch()),
    "documents": lambda: (None, and_masks(document(IDS.int().cuda()), causal)),
    "upper halves": lambda: (None, wide()),
    "two words": lambda: (None, two()),
    "bfloat16": lambda: (None, compares(torch.bfloat16)),
    "float32": lambda: (None, compares(torch.float32)),
    "uint8": lambda: (None, compares(torch.uint8)),
    "relative": lambda: (relative(), causal),
    "relative in documents": lambda: (relative(), document(IDS.int().cuda())),
}
# Whatever the head dimension; those that hand on other things, at 128 columns alone.
EVERYWHERE = ("noop", "causal", "window", "documents", "relative")
CASES = [(D, mods) for D in (64, 96, 256) for mods in EVERYWHERE] + [(128, mods) for mods in MODS]


def forms(config):
    """One consumer, two and three, with turns and without, compiled once or each for itself."""
    for consumers, registers in CONSUMER_REGISTERS.items():
        each = replace(
            config, consumers=consumers, consumer_regs=registers, cross_tile_pipeline=False
        )
        each = replace(each, ping_pong=False, ping_pong_softmax=False)
        yield each
        if consumers > 1:
            yield replace(each, ping_pong=True)
            yield replace(each, ping_pong=True, ping_pong_softmax=True, tile_scheduler="dynamic")
            yield replace(each, merge_consumers=not each.merge_consumers)


@pytest.mark.parametrize(("D", "mods"), CASES)
def test_any_number_of_consumers_is_right_and_turns_change_no_bit(D, mods):
    score_mod, mask_mod = MODS[mods]()
    q, k, v = tensors(2, 16, 4, LENGTH, LENGTH, D)
    mask = block_mask(mask_mod, q, k, per_batch=mods == "documents of a batch", per_head=False)
    made = prepared(q, k, v, score_mod, mask)
    choice, wanted = made.launch.choice, {}
    for config in forms(choice.config):
        if reasons(config, choice.problem.structure, choice.device):
            continue
        got = run_with(made, config)
        # A tile of keys that only another consumer's rows keep is walked where rows share a run.
        first = wanted.setdefault(config.consumers, got)
        if first is got:
            assert_judged(got, q, k, v, score_mod=score_mod, block_mask=mask)
        assert torch.equal(got.out, first.out) and torch.equal(got.lse, first.lse), config
    assert wanted


@pytest.mark.parametrize("mods", ["documents", "relative", "relative in documents", "window"])
def test_bits_stay_from_run_to_run(mods):
    """A word that another consumer, or the next tile, wrote over would show in some run."""
    score_mod, mask_mod = MODS[mods]()
    q, k, v = tensors(2, 16, 4, LENGTH, LENGTH, 128)
    mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
    made = prepared(q, k, v, score_mod, mask)
    wanted = run_with(made, made.launch.choice.config)
    for _ in range(50):
        got = run_with(made, made.launch.choice.config)
        assert torch.equal(got.out, wanted.out) and torch.equal(got.lse, wanted.lse)
