"""Keys that data choose on a GPU: other choices without a wait, replayed graphs, gradients."""

import pytest
import torch

from flexattn import Selection, flex_attention
from flexattn.catalogue import causal
from flexattn.settings import override
from tests.selections import drawn, pairs

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


def oracle(q, k, v, kept):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~kept, -torch.inf)
    weights = torch.where(kept.any(-1, keepdim=True), scores, 0.0).softmax(-1)
    return weights.masked_fill(~kept, 0.0) @ v


def kept_by(selection, q, k):
    return pairs(selection, q.shape[0], q.shape[1], q.shape[2], k.shape[2]).cuda()


def close(found, right, rtol):
    error = (found.double() - right).abs().max() / right.abs().max()
    assert error < rtol


@pytest.mark.parametrize("mask_mod", [None, causal], ids=["", "causal"])
@pytest.mark.parametrize(
    ("unit", "rows", "heads"),
    [(128, 128, 2), (64, 64, 8), (64, 128, 1), (128, 64, 2), (16, 192, 2), (64, 1, 2), (1, 1, 1)],
)
def test_forward(unit, rows, heads, mask_mod):
    q, k, v = made(unit)
    selection = chosen(rows, unit, rows, mask_mod, heads)
    out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    close(out, oracle(q, k, v, kept_by(selection, q, k)), 1e-2)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("unit", "rows"), [(128, 128), (64, 64), (64, 1)])
def test_gradients(unit, rows, width):
    given = [x.requires_grad_() for x in made(unit, width=width)]
    weights = torch.randn_like(given[0])
    for seed in (1, 2):
        selection = chosen(seed, unit, rows)
        out = flex_attention(*given, block_mask=selection, enable_gqa=True)
        found = torch.autograd.grad((out * weights).sum(), given)
        right = oracle(*given, kept_by(selection, *given[:2]))
        for x, y in zip(found, torch.autograd.grad((right * weights).sum(), given), strict=True):
            close(x, y.double(), 2e-2)


def test_500_drawn():
    for seed in range(500):
        selection, (batch, Hq, Hkv, q_len, kv_len) = drawn(seed, (1, 16, 32, 64, 128))
        draw = torch.Generator("cuda").manual_seed(seed)
        q, k, v = (
            torch.randn(batch, h, n, 64, generator=draw, device="cuda", dtype=torch.bfloat16)
            for h, n in ((Hq, q_len), (Hkv, kv_len), (Hkv, kv_len))
        )
        kept = pairs(selection, batch, Hq, q_len, kv_len).cuda()
        counts = None if selection.counts is None else selection.counts.cuda()
        on_gpu = Selection(
            selection.indices.cuda(), counts, selection.unit, selection.rows, selection.mask_mod
        )
        out = flex_attention(q, k, v, block_mask=on_gpu, enable_gqa=True)
        assert (out.double() - oracle(q, k, v, kept)).abs().max() < 3e-2, seed


def test_a_new_choice_waits_for_nothing():
    q, k, v = made(5)
    with override(check=False), torch.no_grad():
        flex_attention(q, k, v, block_mask=chosen(1, 64, 64), enable_gqa=True)
        selection = chosen(2, 64, 64)
        kept = kept_by(selection, q, k)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    close(out, oracle(q, k, v, kept), 1e-2)


def test_a_replayed_graph_reads_what_was_chosen_since():
    q, k, v = made(6)
    selection, other = chosen(1, 64, 128), chosen(2, 64, 128)
    flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    selection.indices.copy_(other.indices)
    graph.replay()
    close(out, oracle(q, k, v, kept_by(other, q, k)), 1e-2)


def test_a_compiled_graph():
    q, k, v = made(7)

    def attend(q, k, v, indices):
        mask = Selection(indices, None, 64, 64, causal)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True)
    for seed in (1, 2):
        selection = chosen(seed, 64, 64)
        out = compiled(q, k, v, selection.indices)
        close(out, oracle(q, k, v, kept_by(selection, q, k)), 1e-2)
