"""Gradients by the real backward template, in the CPU interpreter, held to float64's."""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

import flexattn
from flexattn.catalogue import causal
from tests.cases import CASES
from tests.covering import each_choice
from tests.gradients import assert_gradients
from tests.support import DTYPES, LAYOUTS, inputs, sinks


@pytest.mark.parametrize("entry", CASES, ids=[entry.name for entry in CASES])
def test_every_mod_of_the_catalogue(entry):
    dtype = DTYPES["fp16" if len(entry.name) % 2 else "fp32"]
    # The worst of a few rows says little of a kernel, and rows of documents have few keys.
    batch = 6 if entry.name.startswith("document") else 2
    built = entry.make(batch, 2, 1, 37, 53, dtype=dtype)
    q, k, v = inputs(batch, 2, 1, 37, 53, dtype=dtype)
    make = None if built.score_mod is None else lambda: built.score_mod
    assert_gradients(q, k, v, make=make, mask_mod=built.mask_mod)


HEADS = [
    pytest.param((2, 2), id="mha"),
    pytest.param((6, 2), id="gqa"),
    pytest.param((3, 1), id="mqa"),
]


@pytest.mark.oldest
@each_choice(heads=HEADS, dtype=DTYPES)
def test_dtypes_and_heads(heads, dtype):
    q, k, v = inputs(2, *heads, 45, 61, dtype=DTYPES[dtype])
    assert_gradients(
        q, k, v, mask_mod=causal, make=lambda: lambda s, b, h, q, k: 3 * torch.tanh(s)
    )


@pytest.mark.parametrize(("D", "Dv"), [(8, 8), (16, 24), (48, 20), (72, 16), (16, 96)])
def test_head_dimensions(D, Dv):
    q, k, v = inputs(1, 2, 1, 35, 43, D, Dv)
    assert_gradients(q, k, v, mask_mod=causal)


@pytest.mark.parametrize("L, S", [(1, 1), (1, 50), (50, 1), (16, 16), (33, 130), (130, 33)])
def test_lengths(L, S):
    q, k, v = inputs(1, 2, 2, L, S)
    assert_gradients(q, k, v)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    q, k, v = (LAYOUTS[name](x) for x in inputs(2, 2, 1, 19, 35))
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    grads = torch.randn(2, 2, 19, 16)
    found = torch.autograd.grad(flexattn.flex_attention(*given, enable_gqa=True), given, grads)
    dense = [
        x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in given
    ]
    wanted = torch.autograd.grad(flexattn.flex_attention(*dense, enable_gqa=True), dense, grads)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_keys_and_values_of_one_batch():
    """Their gradient is the sum over the batches that read them, in one order."""
    q, k, v = inputs(3, 4, 2, 21, 37, Bkv=1)
    found = assert_gradients(q, k, v, mask_mod=causal)
    again = assert_gradients(q, k, v, mask_mod=causal)
    assert all(map(torch.equal, found, again))
    q, k, v = inputs(3, 2, 1, 21, 37, Bkv=1)
    assert_gradients(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))


def test_rows_without_a_key_have_no_gradient():
    """Nor have keys that no row keeps; what came back for an lse of -inf may be NaN."""
    q, k, v = inputs(1, 2, 1, 40, 48)
    mask = flexattn.create_block_mask(
        lambda b, h, q, k: (q > 20) & (k < 30) & (q >= k), 1, 2, 40, 48, "cpu", 16
    )
    given = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flexattn.flex_attention(*given, block_mask=mask, enable_gqa=True, return_lse=True)
    dlse = torch.where(lse.isfinite(), 1.0, torch.nan)
    dq, dk, dv = torch.autograd.grad([out, lse], given, [torch.ones_like(out), dlse])
    assert (dq[:, :, :21] == 0).all() and (dk[:, :, 30:] == 0).all() and (dv[:, :, 30:] == 0).all()
    assert dq.isfinite().all() and dk.isfinite().all() and dv.isfinite().all()
    assert dq[:, :, 21:].all() and dk[:, :, :30].all()


def test_removed_scores_have_no_gradient_whatever_the_derivative_is_there():
    """A square root below 0 is NaN, and so is its derivative; at 1 the oracle has both."""
    q, k, v = inputs(1, 2, 1, 33, 41)

    def root(s, b, h, q, k):
        return torch.sqrt(s * s + torch.where(q >= k, 1.0, -0.99))

    assert_gradients(q, k, v, make=lambda: root, mask_mod=causal)


MASKS = {
    "causal": causal,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 23),
    "by head": lambda b, h, q, k: (q >= k) & (q - k < 9 * h + 5),
    "holes": lambda b, h, q, k: ((q // 16 + k // 16) % 2 == 0) | (q == k),
    "documents": lambda b, h, q, k: (q // 29 == k // 29) & (q >= k),
}


@pytest.mark.parametrize("block", [16, 24, (48, 16)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_masks(name, block):
    """Whole and ragged tiles of blocks, rows of blocks with and without gaps."""
    q, k, v = inputs(1, 2, 1, 87, 87)
    assert_gradients(q, k, v, mask_mod=MASKS[name], block=block)


def test_a_mask_without_lists_by_key():
    mask = flexattn.create_block_mask(MASKS["holes"], None, None, 87, 87, "cpu", 16)
    alone = flexattn.BlockMask(
        mask.seq_lengths, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks,
        mask.full_kv_indices, None, None, None, None, mask.BLOCK_SIZE, mask.mask_mod,
    )  # fmt: skip
    given = [x.requires_grad_() for x in inputs(1, 2, 1, 87, 87)]
    found, wanted = (
        torch.autograd.grad(
            flexattn.flex_attention(*given, block_mask=each, enable_gqa=True).sum(), given
        )
        for each in (alone, mask)
    )
    assert all(map(torch.equal, found, wanted))


def test_scores_of_one_sign_and_scale():
    q, k, v = inputs(1, 2, 1, 33, 41)
    for scale in (-0.5, 0.0, 2.0):
        assert_gradients(q, k, v, scale=scale, mask_mod=causal)


def test_a_score_that_is_not_read():
    q, k, v = inputs(1, 2, 1, 33, 41)
    table = torch.linspace(-2, 2, 41)
    found = assert_gradients(
        q, k, v, make=lambda t: lambda s, b, h, q, k: t[k] * 2.0, tensors=[table]
    )
    assert not found[0].any() and not found[1].any() and found[3].any()


DOCUMENT = torch.arange(53) // 20
CAPTURED = {
    "by head": ((2,), lambda t: lambda s, b, h, q, k: s * t[h]),
    "by row": ((37,), lambda t: lambda s, b, h, q, k: s + t[q]),
    "by key": ((2, 53), lambda t: lambda s, b, h, q, k: s + t[h, k]),
    "by key, added and multiplied": ((53,), lambda t: lambda s, b, h, q, k: s * t[k] + t[k - 1]),
    "by distance": ((2, 90), lambda t: lambda s, b, h, q, k: s + t[h, q - k + 52]),
    "by clamped distance": ((9,), lambda t: lambda s, b, h, q, k: s + t[(q - k).clamp(-4, 4) + 4]),
    "by key in steps": ((4,), lambda t: lambda s, b, h, q, k: s + t[k // 16]),
    "by row in steps": ((2, 7), lambda t: lambda s, b, h, q, k: s * t[h, q.clamp(max=6)]),
    "by tiles of both": ((3, 5), lambda t: lambda s, b, h, q, k: s * t[q // 16, k.clamp(max=4)]),
    "by triangles": ((2,), lambda t: lambda s, b, h, q, k: s + t[(q // 4 >= k // 4).long()]),
    "by documents": ((3, 3), lambda t: lambda s, b, h, q, k: s + t[DOCUMENT[q], DOCUMENT[k]]),
    "dense": ((2, 2, 37, 53), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
    "dense, one batch": ((1, 2, 37, 53), lambda t: lambda s, b, h, q, k: s + t[0, h, q, k]),
    "a number": ((), lambda t: lambda s, b, h, q, k: s * t),
    "a soft cap": ((2,), lambda t: lambda s, b, h, q, k: t[h] * torch.tanh(s / t[h])),
    "a gate": ((2, 37), lambda t: lambda s, b, h, q, k: s + torch.log(torch.sigmoid(t[h, q]))),
    "beyond the end": ((30,), lambda t: lambda s, b, h, q, k: s + t[k]),
    "rotated": ((4, 53), lambda t: lambda s, b, h, q, k: s + (t[:, k] * t[:, q]).sum()),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", CAPTURED)
def test_what_a_score_mod_captures(name):
    shape, make = CAPTURED[name]
    q, k, v = inputs(2, 2, 1, 37, 53)
    table = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    mask = (lambda b, h, q, k: k < 30) if name == "beyond the end" else None
    assert_gradients(q, k, v, make=make, tensors=[table], mask_mod=mask)


@pytest.mark.parametrize("name", ["by clamped distance", "by triangles", "by row in steps"])
def test_what_goes_to_one_place_is_summed_in_its_tile_first(name, monkeypatch):
    """Programs add in any order, and of many terms that cancel a clamp's end lost its digits."""
    added, create = [], InterpreterBuilder.create_atomic_rmw

    def counted(self, op, place, value, kept, *rest):
        added.append(int(np.broadcast_to(kept.data, np.shape(value.data)).sum()))
        return create(self, op, place, value, kept, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted)
    test_what_a_score_mod_captures(name)
    # A tile of a head has its two ends, and the diagonals between.
    assert 0 < sum(added) < 2 * 2 * 37 * 53 / 30


def test_tables_read_through_indices():
    """Buckets of distances, several loads of one table, and a table that is not contiguous."""
    q, k, v = inputs(1, 2, 1, 37, 53, dtype=torch.float16)
    buckets = (torch.arange(90) // 7) % 5
    table = torch.linspace(-1, 2, 20).reshape(2, 10)[:, ::2]
    assert_gradients(
        q, k, v, mask_mod=causal, tensors=[table],
        make=lambda t: lambda s, b, h, q, k: s + t[h, buckets[q - k + 52]] * t[h, buckets[k]],
    )  # fmt: skip


def test_captured_tensors_of_two_dtypes():
    """Their gradients are summed in float32 and rounded once."""
    q, k, v = inputs(1, 2, 1, 37, 53)
    scale, bias = torch.tensor([0.5, 1.25]).half(), torch.linspace(-1, 1, 53).bfloat16()
    given = [x.requires_grad_() for x in (q, k, v, scale, bias)]

    def call(scale, bias):
        out = flexattn.flex_attention(
            *given[:3], lambda s, b, h, q, k: s * scale[h] + bias[k], enable_gqa=True
        )
        return torch.autograd.grad(out.square().sum(), given[3:])

    found = call(scale, bias)
    wide = call(*(x.float() for x in (scale, bias)))
    for one, other, x in zip(found, wide, (scale, bias), strict=True):
        assert one.dtype == x.dtype
        torch.testing.assert_close(one, other.to(x.dtype), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype):
    """The reference run made their gradients of an output that was not rounded as it is saved."""
    q, k, v = inputs(2, 4, 2, 37, 53, dtype=DTYPES[dtype])
    logits = sinks(4)
    logits[0] = -torch.inf
    assert_gradients(q, k, v, mask_mod=MASKS["window"], sinks=logits)


TILES = [(16, 64, 64, 16), (64, 16, 16, 64), (32, 32, 16, 64), (16, 16, 64, 64)]


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_tiles(tiles):
    """Held and walked tiles of other heights than the mask's blocks, in runs and in lists."""
    options = dict(zip(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), tiles, strict=True))
    q, k, v = inputs(1, 2, 1, 87, 103)
    for name in ("window", "holes"):
        assert_gradients(q, k, v, mask_mod=MASKS[name], block=64, kernel_options=options)
    assert_gradients(q, k, v, kernel_options=options)


def test_scores_below_the_softmaxs_range():
    """Far keys' weights vanish; a score of -inf by the score_mod itself has no gradient."""
    q, k, v = inputs(1, 2, 1, 45, 61)

    def steep(s, b, h, q, k):
        return torch.where(k <= q, s - 40.0 * (q - k), -torch.inf)

    assert_gradients(q, k, v, make=lambda: steep)


def test_a_mask_that_lists_no_full_blocks():
    q, k, v = inputs(1, 2, 1, 45, 61)
    given = [x.requires_grad_() for x in (q, k, v)]
    wide = flexattn.create_block_mask(causal, None, None, 61, 61, "cpu", 16)
    alone = flexattn.create_block_mask(
        causal, None, None, 61, 61, "cpu", 16, separate_full_blocks=False
    )
    found, wanted = (
        torch.autograd.grad(
            flexattn.flex_attention(
                torch.nn.functional.pad(given[0], (0, 0, 0, 16)), *given[1:], block_mask=mask,
                enable_gqa=True,
            ).square().sum(),
            given,
        )
        for mask in (alone, wide)
    )  # fmt: skip
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
