"""Dropout on a GPU: every family and tile drops the reference's weights, forward and backward."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.reference.dropout import kept_weights
from tests.gradients import SEED, assert_gradients, drawn
from tests.support import DTYPES, assert_judged, block_mask, inputs, run, sinks

hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
TILES = [
    pytest.param({"BACKEND": "GLUON"}, marks=hopper, id="hopper"),
    pytest.param({"BACKEND": "GLUON", "BLOCK_N": 64}, marks=hopper, id="hopper 64"),
    pytest.param({"BACKEND": "TRITON", "BLOCK_M": 64, "BLOCK_N": 32}, id="triton 64x32"),
    pytest.param({"BACKEND": "TRITON", "BLOCK_M": 128, "BLOCK_N": 64}, id="triton 128x64"),
]


@pytest.mark.parametrize("options", TILES)
@pytest.mark.parametrize(("mask_mod", "p"), [(None, 0.3), (causal, 0.8)])
def test_the_mask_itself(options, mask_mod, p):
    """Values are the unit matrix, so that weights come out: 128 of the keys at a time."""
    q, k, _ = inputs(2, 4, 2, 333, 256, 128, dtype=torch.bfloat16, device="cuda")
    dropout, mask = drawn(p, "cuda"), block_mask(mask_mod, q, k)
    lanes = tuple(torch.arange(n, device="cuda") for n in (2, 4, 333, 256))
    wanted = kept_weights(dropout, lanes, 4)
    if mask_mod is not None:
        wanted &= lanes[3] <= lanes[2][:, None]
    for first in (0, 128):
        v = torch.zeros(2, 2, 256, 128, dtype=torch.bfloat16, device="cuda")
        v[:, :, first : first + 128] = torch.eye(128)
        torch.manual_seed(SEED)
        got = run(q, k, v, block_mask=mask, dropout_p=p, kernel_options=options, max_scores=False)
        assert torch.equal(got.out != 0, wanted[..., first : first + 128])


@pytest.mark.parametrize(
    ("dtype", "D"), [("bf16", 64), ("fp16", 96), ("bf16", 128), ("bf16", 256), ("fp32", 64)]
)
def test_outputs(dtype, D):
    q, k, v = inputs(2, 8, 2, 517, 517, D, dtype=DTYPES[dtype], device="cuda")
    logits, mask = sinks(8, device="cuda"), block_mask(causal, q, k)
    modded = {"score_mod": softcap(20.0), "sinks": logits}
    for p, more in ((0.1, {}), (0.5, {}), (0.1, {"block_mask": mask}), (0.1, modded)):
        dropout = drawn(p, "cuda")
        torch.manual_seed(SEED)
        got = run(q, k, v, dropout_p=p, max_scores=False, **more)
        assert_judged(got, q, k, v, dropout=dropout, **more)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("options", [TILES[0], TILES[2]])
@pytest.mark.parametrize(("mask_mod", "p"), [(None, 0.8), (causal, 0.3)])
def test_the_mask_of_a_backward(options, mask_mod, p, D):
    """The output's gradient is the unit matrix of D queries, so that dV is their weights."""
    given = inputs(2, 4, 4, 333, 401, D, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.requires_grad_() for x in given)
    dropout, mask = drawn(p, "cuda"), block_mask(mask_mod, q, k, 128)
    lanes = tuple(torch.arange(n, device="cuda") for n in (2, 4, 333, 401))
    wanted = kept_weights(dropout, lanes, 4)
    if mask_mod is not None:
        wanted &= lanes[3] <= lanes[2][:, None]
    torch.manual_seed(SEED)
    tile = {name: word for name, word in options.items() if name == "BACKEND"}
    found = flexattn.explain(q, k, v, None, mask, kernel_options=tile, dropout_p=p)
    assert found.backward.config.language == ("gluon" if tile["BACKEND"] == "GLUON" else "triton")
    torch.manual_seed(SEED)
    out = flexattn.flex_attention(q, k, v, None, mask, kernel_options=tile, dropout_p=p)
    for first in range(0, 333, D):
        dout, rows = torch.zeros_like(out), min(D, 333 - first)
        dout[:, :, first : first + rows] = torch.eye(D, device="cuda")[:rows]
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        assert torch.equal(dv[..., :rows].mT != 0, wanted[:, :, first : first + rows])


@pytest.mark.parametrize(
    ("dtype", "D"),
    [("bf16", 64), ("bf16", 96), ("bf16", 128), ("fp16", 128), ("bf16", 256), ("fp32", 64)],
)
def test_gradients(dtype, D):
    q, k, v = inputs(2, 8, 2, 333, 401, D, dtype=DTYPES[dtype], device="cuda")
    capped = softcap(20.0)
    assert_gradients(q, k, v, dropout_p=0.2)
    # A sink's gradient is one sum a head. Of 8 heads the largest error was above twice the
    # reference run's in 3 of 40 draws of another run that rounds as kernels do; of 32, in none.
    q, k, v = inputs(1, 32, 4, 333, 401, D, dtype=DTYPES[dtype], device="cuda")
    assert_gradients(
        q, k, v, dropout_p=0.2, mask_mod=causal, make=lambda: capped, block=128,
        sinks=sinks(32, device="cuda"),
    )  # fmt: skip


def test_gradients_of_blocks_cut_at_odd_places():
    q, k, v = inputs(1, 4, 2, 333, 333, 64, dtype=torch.bfloat16, device="cuda")
    assert_gradients(q, k, v, dropout_p=0.2, mask_mod=causal, block=40)


def test_the_share_that_is_dropped():
    q, k, _ = inputs(2, 8, 8, 512, 128, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.eye(128, dtype=torch.bfloat16, device="cuda").expand(2, 8, 128, 128).contiguous()
    for p in (0.01, 0.1, 0.5, 0.9):
        found = flexattn.flex_attention(q, k, v, dropout_p=p)
        deviation = math.sqrt(p * (1 - p) / found.numel())
        assert abs((found == 0).double().mean() - p) < 5 * deviation + 2**-16


def test_replays_of_a_graph_drop_other_weights():
    q, k, v = inputs(1, 4, 4, 256, 256, 64, dtype=torch.bfloat16, device="cuda")
    flexattn.flex_attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexattn.flex_attention(q, k, v, dropout_p=0.5)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(*found)


def test_checkpointing_gives_the_same_bits():
    """In order: three tiles of keys would add to a tile of dQ as they come."""
    given = inputs(1, 4, 4, 300, 300, 64, dtype=torch.bfloat16, device="cuda")
    given = [x.requires_grad_() for x in given]

    def attend(q, k, v):
        options = {"DETERMINISTIC": True}
        return flexattn.flex_attention(q, k, v, dropout_p=0.5, kernel_options=options)

    torch.manual_seed(7)
    plain = torch.autograd.grad(attend(*given).float().square().sum(), given)
    torch.manual_seed(7)
    checkpoint(attend, *given, use_reentrant=False).float().square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(given, plain, strict=True))
