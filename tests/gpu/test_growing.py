"""Caches that grow by a token on a GPU: launches made from the one before, plain and replayed."""

import pytest
import torch

import flexattn
from flexattn.catalogue import softcap
from flexattn.integrations.decode_masks import padded_mask, shared_mask
from tests.growing import numbers_admitted
from tests.support import assert_accurate

LENGTHS = (513, 514, 515, 640, 641, 700, 1023, 1024)


@pytest.fixture
def admitted(monkeypatch):
    return numbers_admitted(monkeypatch)


def tensors(keys, rows=1, D=64, dtype=torch.bfloat16):
    draw = torch.Generator("cuda").manual_seed(keys)

    def normal(heads, length):
        return torch.randn(2, heads, length, D, generator=draw, device="cuda", dtype=dtype)

    return normal(8, rows), normal(2, keys), normal(2, keys)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mod", [None, softcap(30.0)], ids=["plain", "softcap"])
def test_each_length_is_right(mod, D, rows, admitted):
    for keys in LENGTHS:
        assert_accurate(*tensors(keys, rows, D), score_mod=mod)
    assert admitted == [513]


def test_views_of_a_longer_cache(admitted):
    q, k, v = tensors(1024)
    for keys in LENGTHS:
        assert_accurate(q, k[:, :, :keys], v[:, :, :keys])
    assert admitted == [513]


def test_steps_of_a_padded_batch(admitted):
    with torch.no_grad():
        for keys in (513, 514, 640, 641, 642):
            seen = torch.rand(2, keys, device="cuda") < 0.7
            seen[:, -1] = True
            held = padded_mask(seen, keys)
            assert_accurate(*tensors(keys), block_mask=shared_mask(held))
            del held
    assert admitted == [513, 641]


def test_a_graph_of_a_length_that_was_not_called_before():
    """Under capture nothing may wait or allocate outside of the graph."""
    for keys in (900, 901):
        flexattn.flex_attention(*tensors(keys), enable_gqa=True)
    q, k, v = tensors(902)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexattn.flex_attention(q, k, v, enable_gqa=True)
    for seed in (1, 2):
        others = tensors(902 + seed)
        k.copy_(others[1][:, :, :902])
        v.copy_(others[2][:, :, :902])
        out.fill_(float("nan"))
        graph.replay()
        wanted = flexattn.flex_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
