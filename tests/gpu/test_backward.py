"""Gradients by kernels on a GPU, held to float64's over the catalogue, dtypes and shapes."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexattn
import flexattn.errors
from flexattn.catalogue import causal, softcap
from flexattn.problem.mask_lists import mask_class
from flexattn.runtime.key_lists import BothLists
from tests.cases import CASES
from tests.gradients import assert_gradients, assert_memory
from tests.support import DTYPES, LAYOUTS, block_mask, inputs, sinks


def on_gpu(*sizes, **more):
    return inputs(*sizes, device="cuda", **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", CASES, ids=[entry.name for entry in CASES])
def test_every_mod_of_the_catalogue(entry, dtype):
    B, Hq, Hkv, L, S = 2, 4, 2, 333, 401
    built = entry.make(B, Hq, Hkv, L, S, device="cuda", dtype=DTYPES[dtype])
    q, k, v = on_gpu(B, Hq, Hkv, L, S, 64, dtype=DTYPES[dtype])
    make = None if built.score_mod is None else lambda: built.score_mod
    assert_gradients(q, k, v, make=make, mask_mod=built.mask_mod, block=128)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(
    ("D", "Dv"), [(16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dimensions(dtype, D, Dv, heads):
    q, k, v = on_gpu(2, *heads, 517, 517, D, Dv, dtype=DTYPES[dtype])
    capped = softcap(20.0)
    assert_gradients(q, k, v, mask_mod=causal, make=lambda: capped, block=128)
    assert_gradients(q, k, v)


@pytest.mark.parametrize(("L", "S"), [(1, 777), (777, 1), (129, 2048), (2000, 300)])
def test_lengths(L, S):
    q, k, v = on_gpu(1, 4, 2, L, S, 128, dtype=torch.bfloat16)
    assert_gradients(q, k, v)


@pytest.mark.parametrize("block", [64, 96, 128, (128, 64), (64, 256)], ids=str)
def test_blocks(block):
    q, k, v = on_gpu(1, 4, 2, 700, 700, 128, dtype=torch.bfloat16)
    for mask in (
        lambda b, h, q, k: (q >= k) & (q - k < 200),
        lambda b, h, q, k: ((q // 64 + k // 64) % 2 == 0) | (q == k),
        lambda b, h, q, k: (q // 190 == k // 190) & (q >= k) & (q > 70),
    ):
        assert_gradients(q, k, v, mask_mod=mask, block=block)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    q, k, v = (LAYOUTS[name](x) for x in on_gpu(2, 4, 2, 300, 300, 64, dtype=torch.float16))
    assert_gradients(q, k, v, mask_mod=causal, block=128)


CAPTURED = {
    "by head": ((32,), lambda t: lambda s, b, h, q, k: s * t[h]),
    "by row": ((333,), lambda t: lambda s, b, h, q, k: s + t[q]),
    "by key": ((4, 401), lambda t: lambda s, b, h, q, k: s + t[h, k]),
    "by distance": ((4, 800), lambda t: lambda s, b, h, q, k: s + t[h, q - k + 400]),
    "dense": ((2, 4, 333, 401), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
    "a soft cap": ((), lambda t: lambda s, b, h, q, k: t * torch.tanh(s / t)),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", CAPTURED)
def test_what_a_score_mod_captures(name, dtype):
    """By row without a mask: of causal rows the first have few keys and the largest errors, so
    that the maximum is a draw or two of ours over as many of the reference run's. By head of 32
    heads: errors of four sums are four draws."""
    shape, make = CAPTURED[name]
    draw = torch.Generator().manual_seed(1)
    table = (torch.rand(shape, generator=draw) + 0.5).cuda()
    heads = 32 if name == "by head" else 4
    q, k, v = on_gpu(2, heads, 2, 333, 401, 64, dtype=DTYPES[dtype])
    mask = None if name == "by row" else causal
    assert_gradients(q, k, v, make=make, tensors=[table], mask_mod=mask, block=128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_and_keys_of_one_batch(dtype):
    """Of 32 heads: errors of four sinks are four draws, and three times other four by chance."""
    q, k, v = on_gpu(3, 32, 8, 333, 401, 64, Bkv=1, dtype=DTYPES[dtype])
    logits = sinks(32, device="cuda")
    assert_gradients(q, k, v, mask_mod=causal, block=128, sinks=logits)


DETERMINISTIC = {"DETERMINISTIC": True}


def test_every_run_gives_the_same_bits():
    q, k, v = (x.requires_grad_() for x in on_gpu(2, 8, 2, 1111, 1111, 128, dtype=torch.bfloat16))
    mask = block_mask(causal, q, k, 128, False, False)
    dout = torch.randn_like(q)

    def attend(q, k, v):
        return flexattn.flex_attention(
            q, k, v, softcap(30.0), mask, enable_gqa=True, kernel_options=DETERMINISTIC
        )

    def gradients():
        return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    first = gradients()
    for _ in range(5):
        assert all(map(torch.equal, gradients(), first))
    out = checkpoint(attend, q, k, v, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out, (q, k, v), dout), first))


def test_on_a_stream_of_its_own():
    q, k, v = (x.requires_grad_() for x in on_gpu(1, 4, 4, 2000, 2000, 64, dtype=torch.float16))

    def gradients():
        out = flexattn.flex_attention(q, k, v, kernel_options=DETERMINISTIC)
        return torch.autograd.grad(out.sum(), (q, k, v))

    plain = gradients()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = gradients()
    torch.cuda.current_stream().wait_stream(side)
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("ordered", [False, True])
def test_lists_by_key_made_on_a_busy_stream_serve_another(ordered):
    """Kept with the mask, they were read by the next stream before the first had made them."""
    options = DETERMINISTIC if ordered else None
    q, k, v = (x.requires_grad_() for x in on_gpu(1, 4, 4, 2000, 2000, 64, dtype=torch.bfloat16))

    def fresh():  # without runs: a read of these would have waited, as one of the class does
        mask = block_mask(lambda b, h, q, k: (q // 128 + k // 128) % 2 == 0, q, k, 128)
        mask_class(mask)
        return mask

    def gradients(mask):
        out = flexattn.flex_attention(q, k, v, None, mask, kernel_options=options)
        return torch.autograd.grad(out.sum(), (q, k, v))

    plain, mask, side = gradients(fresh()), fresh(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)
        BothLists.of(mask).read(False, ordered)
    found = gradients(mask)
    torch.cuda.synchronize()
    # Sums in another order round otherwise; lists that are not there yet give other numbers.
    assert all(
        torch.allclose(x, y, atol=1e-2, rtol=1e-2) for x, y in zip(found, plain, strict=True)
    )


def test_memory_grows_with_the_inputs_alone():
    """Gradients, lse, delta, and on Hopper one fp32 dq; nothing of the size of the scores."""
    assert_memory(*on_gpu(1, 8, 8, 8192, 8192, 128, dtype=torch.bfloat16))


def test_torch_func_is_refused_in_words():
    q, k, v = on_gpu(1, 2, 2, 33, 33, 64)
    with pytest.raises(flexattn.errors.UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: flexattn.flex_attention(x, k, v).sum())(q)
