"""The class of a mask on a GPU: one read back when it is first seen, none under capture."""

import pytest
import torch

from flexattn import create_block_mask, flex_attention
from flexattn.catalogue.masks import causal
from flexattn.problem.mask_lists import known_class, mask_class
from tests.support import assert_judged


def call(mask, q):
    return flex_attention(q, q, q, block_mask=mask)


@pytest.fixture
def q():
    return torch.randn(1, 2, 1000, 64, device="cuda", dtype=torch.bfloat16)


def made():
    return create_block_mask(causal, None, None, 1000, 1000, device="cuda")


def test_repeated_calls_do_not_wait_for_the_device(q):
    mask = made()
    call(mask, q)
    assert known_class(mask) == mask_class(made()) == "d1/2 i2 runs"
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(mask, q)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_mask_that_is_first_seen_under_capture_stays_unknown(q):
    warm, fresh = made(), made()
    call(warm, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(fresh, q)
    graph.replay()
    assert known_class(fresh) is None
    assert_judged((out, None, None), q, q, q, block_mask=fresh)
    call(fresh, q)
    assert known_class(fresh) == known_class(warm)
