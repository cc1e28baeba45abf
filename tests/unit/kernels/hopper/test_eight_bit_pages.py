"""Pages of eight bits: Hopper's forward, whose warps widen K and V to float16, in plain Python."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.kernels.base.ragged import PAGES
from flexattn.kernels.hopper.family import PREFILL
from tests.families import violated
from tests.problems import plan_of
from tests.unit.kernels.hopper.test_ragged import BATCHES, CONFIG, H200, check, prefix

EIGHT_BITS = {
    "no scale": {},
    "one scale": {"scales": (0.7, 1.9)},
    "scales of heads": {"scales": ([0.6, 1.7], [3.0, 0.2])},
    "a scale of 0, and one below": {"scales": ([0.0, -0.8], [1.0, -2.0]), "mask_mod": None},
    "e5m2": {"kv_dtype": torch.float8_e5m2, "scales": (0.5, 1.5)},
    "window": {"mask_mod": sliding_window(90)},
    "prefix by request": {"mask_mod": prefix, "scales": (0.7, 1.9)},
    "soft cap": {"score_mod": softcap(4.0), "scales": (0.7, 1.9)},
    "alibi": {"score_mod": alibi(4, "cpu"), "scales": (0.7, 1.9), "config": {"pack_gqa": True}},
    "sinks": {"sinks": [0.5, -1.0, 3.0, 0.0], "scales": ([0.6, 1.7], [3.0, 0.2])},
    "lazy, in turns": {"scales": (0.7, 1.9), "config": {"lazy_rescale": True, "ping_pong": True}},
    "heads in a tile": {"heads": (14, 2), "config": {"packed_heads": 8}, "scales": (0.7, 1.9)},
    "keys in parts": {"config": {"splits": True}, "parts": 3, "scales": ([0.6, 1.7], [3.0, 0.2])},
    "64 columns": {"dims": (64, 64), "scales": (0.7, 1.9)},
    "three consumers": {"config": {"consumers": 3, "consumer_regs": 160, "BLOCK_N": 64}},
    "80 columns": {"dims": (80, 80)},
    "192 and 128": {"dims": (192, 128), "config": {"BLOCK_N": 64}},
    "256 columns": {"dims": (256, 256), "config": {"BLOCK_N": 64}, "scales": (0.7, 1.9)},
}


@pytest.mark.parametrize("asked", EIGHT_BITS)
def test_eight_bits(asked):
    """Halves of tiles are widened in place of the copies that stages of 16 bits have."""
    more = {"kv_dtype": torch.float8_e4m3fn, **EIGHT_BITS[asked]}
    config = replace(CONFIG, **more.pop("config", {}))
    check(16, [70, 3, 0], [300, 40, 9], config=config, **more)


@pytest.mark.parametrize("page", [page for page in BATCHES if page in PAGES])
def test_pages_of_eight_bits(page):
    check(page, *BATCHES[page], seed=page, kv_dtype=torch.float8_e4m3fn)


def plan(kv=torch.float8_e4m3fn, **asked):
    return plan_of(4, total_q=2048, kv=kv, mask=causal, **asked)


@pytest.mark.parametrize("D", [64, 80, 96, 128, 192, 256])
def test_plans_choose_it(D):
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert next(PREFILL.able(plan(kv_dtype, D=D, scaled=True), H200), None)


def test_the_warps_that_widen_keep_their_registers():
    """Beside a soft cap, too, whose consumers of 16 bits take some of the producer's."""
    capped = plan(score=softcap(30.0), scaled=True)
    assert next(PREFILL.able(capped, H200)).producer_regs == 40


LEFT_TO_TRITON = {
    "scales of pages or tokens": {"scales": "token_head"},
    "a contiguous cache": {"page": 0},
    "pages without boxes": {"page": 24},
    "queries of eight bits": {"dtype": torch.float8_e4m3fn},
    "tiles of less than 64 keys": {"config": replace(CONFIG, BLOCK_N=32)},
}


@pytest.mark.parametrize("lacking", LEFT_TO_TRITON)
def test_what_is_left_to_triton(lacking):
    asked = dict(LEFT_TO_TRITON[lacking])
    config = asked.pop("config", CONFIG)
    (rule,) = violated(config, plan(**asked).structure, H200)
    assert rule.name == "serving"
