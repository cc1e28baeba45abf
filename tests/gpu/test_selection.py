"""Keys that data choose on a GPU: other choices without a wait, replayed graphs, gradients."""

import pytest
import torch

from flexattn import Selection, flex_attention
from flexattn.catalogue import causal
from flexattn.settings import override
from tests.selections import assert_gradients, assert_right, drawn

pytestmark = pytest.mark.usefixtures("poisoned")


def made(seed, Hq=8, Hkv=2, length=1000, width=128, dtype=torch.bfloat16):
    draw = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(2, h, length, width, generator=draw, device="cuda", dtype=dtype)
        for h in (Hq, Hkv, Hkv)
    ]


def chosen(seed, unit, rows, mask_mod=causal, heads=2, length=1000, k=4):
    draw = torch.Generator("cuda").manual_seed(seed)
    shape = (2, heads, -(-length // rows), k)
    indices = torch.randint(-1, -(-length // unit) + 1, shape, generator=draw, device="cuda")
    return Selection(indices.int(), None, unit, rows, mask_mod)


@pytest.mark.parametrize("mask_mod", [None, causal], ids=["", "causal"])
@pytest.mark.parametrize(
    ("unit", "rows", "heads"),
    [(128, 128, 2), (64, 64, 8), (64, 128, 1), (128, 64, 2), (16, 192, 2), (64, 1, 2), (1, 1, 1)],
)
def test_forward(unit, rows, heads, mask_mod):
    q, k, v = made(unit)
    selection = chosen(rows, unit, rows, mask_mod, heads)
    assert_right(selection, q, k, v)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("unit", "rows"), [(128, 128), (64, 64), (64, 1)])
def test_gradients(unit, rows, width):
    given = made(unit, width=width)
    for seed in (1, 2):
        assert_gradients(chosen(seed, unit, rows), *given)


def test_thirty_drawn():
    """`python -m tests.random_mods selections` draws 500."""
    for seed in range(30):
        selection, (batch, Hq, Hkv, q_len, kv_len) = drawn(seed, (1, 16, 32, 64, 128))
        draw = torch.Generator("cuda").manual_seed(seed)
        q, k, v = (
            torch.randn(batch, h, n, 64, generator=draw, device="cuda", dtype=torch.bfloat16)
            for h, n in ((Hq, q_len), (Hkv, kv_len), (Hkv, kv_len))
        )
        counts = None if selection.counts is None else selection.counts.cuda()
        on_gpu = Selection(
            selection.indices.cuda(), counts, selection.unit, selection.rows, selection.mask_mod
        )
        assert_right(on_gpu, q, k, v)


def test_a_new_choice_waits_for_nothing():
    q, k, v = made(5)
    with override(check=False), torch.no_grad():
        flex_attention(q, k, v, block_mask=chosen(1, 64, 64), enable_gqa=True)
        selection = chosen(2, 64, 64)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_right(selection, q, k, v, (out, None, None))


def test_a_replayed_graph_reads_what_was_chosen_since():
    q, k, v = made(6)
    selection, other = chosen(1, 64, 128), chosen(2, 64, 128)
    flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    selection.indices.copy_(other.indices)
    graph.replay()
    assert_right(other, q, k, v, (out, None, None))


@pytest.mark.compiled
def test_a_compiled_graph():
    q, k, v = made(7)

    def attend(q, k, v, indices):
        mask = Selection(indices, None, 64, 64, causal)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True)
    for seed in (1, 2):
        selection = chosen(seed, 64, 64)
        out = compiled(q, k, v, selection.indices)
        assert_right(selection, q, k, v, (out.detach(), None, None))
