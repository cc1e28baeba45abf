"""Which tiles a backward leaves out: none with a key that a window of a row's kept key holds."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import AuxRequest, and_masks

import flexattn
from flexattn import create_block_mask
from flexattn.catalogue import (
    causal,
    causal_offset,
    document,
    padding,
    prefix_lm,
    sliding_window,
)
from flexattn.device import detect, named
from flexattn.errors import BuildError
from flexattn.frontend.gradients import AskedGradients, _problem
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.decay_skip.source import PLACES, render_blocks
from flexattn.mods import bind
from flexattn.problem.mask_lists import mask_class
from flexattn.runtime.build import builder
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import Lists
from flexattn.runtime.outcomes import Outcome
from flexattn.settings import override
from tests.gradients import cotangents
from tests.support import DTYPES, block_mask, inputs, random_runs

H200, CPU = named("nvidia-h200"), detect(torch.device("cpu"))
HEADS = 4
SLOPES = torch.ones(HEADS)
MASKS = {
    "none": None,
    "causal": causal,
    "ahead": causal_offset(129),
    "behind": causal_offset(-221),
    "window": sliding_window(343),
    "prefix": prefix_lm(torch.tensor([470])),
    "padding": padding(torch.tensor([461])),
    "documents": and_masks(document(torch.arange(1200) // 257), causal),
    "parity": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx + kv_idx) % 2 == 0),
}


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def tiles_of(mask_mod, mask, lengths, windows, tile):
    """M_BLOCK_MAX [HEADS, n_blocks] and N_BLOCK_MIN [HEADS, m_blocks] of one batch."""
    q, k = (torch.zeros(1, HEADS, n, 64, dtype=torch.bfloat16) for n in lengths)
    if mask is not None:
        mask_class(mask)  # finds its runs
    # Those by key may be no runs, in masks that nothing but a test makes.
    lists = None if mask is None else BothLists(*[Lists.of(mask)] * 2)
    score, bound = bind(alibi, "score"), mask_mod and bind(mask_mod, "mask")
    asked = AskedGradients(score, bound, mask, 1.0, NONE, ())
    structure = _problem(asked, (q, k, k), lists, H200).structure
    source = render_blocks(structure, *tile, CPU)
    sizes = [-(-n // block) for n, block in zip(lengths, tile, strict=True)]
    first, last = (torch.full((HEADS, n), -7, dtype=torch.int32) for n in sizes)
    fixed = {
        "DECAY_WINDOW": windows, "N_BLOCK_MIN": first, "M_BLOCK_MAX": last, "Hq": HEADS,
        "kv_len": lengths[1], "m_blocks": sizes[0], "n_blocks": sizes[1],
        "stride_kv_mask_b": 0, "stride_kv_mask_h": 0, "KV_RUNS": None,
        **captured_values(structure.mask, bound),
    }  # fmt: skip
    if lists is not None:
        fixed["KV_RUNS"] = runs = lists.by_query.runs
        fixed["stride_kv_mask_h"] = runs.shape[2] if runs.shape[1] > 1 else 0
    given = [each.name for each in source.arguments]
    launcher = builder().kernel(source, CPU, -1).prepare(HEADS, {}, given)
    launcher.launch(-1, [fixed[name] for name in given])
    return last, first


def check(mask_mod, mask, lengths, windows, tile, listed):
    """listed: which scores are of blocks that a mask lists, and are kept by it."""
    last, first = tiles_of(mask_mod, mask, lengths, windows, tile)
    assert (first.diff(dim=1) >= 0).all()
    tiles = torch.arange(last.shape[1])
    assert torch.equal(last, (first[:, :, None] <= tiles).sum(1).int())
    rows = torch.arange(lengths[0]) // tile[0]
    keys = torch.arange(lengths[1])
    kept = torch.where(listed, keys, -1).amax(-1)
    left_out = keys // tile[1] < first[:, rows, None]
    near = keys >= kept[..., None] - windows[:, None, None]
    assert not (left_out & listed & near).any()
    return first


TILE = 64, 128


@pytest.mark.parametrize("lengths", [(610, 890), (1000, 640)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_keys_in_a_window_are_visited(name, lengths):
    mask_mod = MASKS[name]
    mask = mask_mod and create_block_mask(mask_mod, None, None, *lengths, device="cpu")
    listed = torch.ones(lengths, dtype=torch.bool)
    if mask_mod is not None:
        zero, rows, keys = torch.tensor(0), *map(torch.arange, lengths)
        listed &= mask_mod(zero, zero, rows[:, None], keys[None, :])
    windows = torch.tensor([0.0, 77.0, 300.0, 2.0**27])
    first = check(mask_mod, mask, lengths, windows, TILE, listed)
    if name == "causal":
        kept = (torch.arange(first.shape[1]) * 64).clamp(max=lengths[1] - 1)
        wanted = (kept - windows[:, None]).clamp(min=0) // 128
        assert torch.equal(first, wanted.int())
    elif name == "none":
        assert torch.equal(first[:, 0], ((lengths[1] - 1 - windows).clamp(min=0) // 128).int())
    elif name in ("ahead", "padding", "documents"):
        assert first[0].any()
    assert not first[3].any() or name in ("window", "documents")


@pytest.mark.parametrize("mask_mod", [causal, MASKS["parity"], None], ids=["upto", "rest", "all"])
def test_a_block_that_is_not_listed_is_no_anchor(mask_mod):
    """The mask keeps a row's key, but its blocks end before it: those keys are all there is."""
    mask = random_runs(mask_mod, HEADS, 128, 256, torch.Generator().manual_seed(11))
    rows, keys = torch.arange(128)[:, None], torch.arange(256)[None, :]
    kept = torch.ones(128, 256, dtype=torch.bool)
    if mask_mod is not None:
        kept = mask_mod(torch.tensor(0), torch.tensor(0), rows, keys)
    ends = Lists.of(mask).runs[0].repeat_interleave(16, 1)[..., None]
    first, full, full_end, end = ends.unbind(2)
    block = keys // 16
    whole = (block >= full) & (block < full_end)
    listed = (block >= first) & (block < end) & (kept | whole)
    windows = torch.tensor([0.0, 20.0, 50.0, 2.0**27])
    check(mask_mod, mask, (128, 256), windows, (16, 16), listed)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 40000), st.integers(1, 40000), st.floats(0, 50000), st.sampled_from([64, 128])
)
def test_long_heads(q_len, kv_len, window, keys):
    """More tiles than a program looks at at once."""
    windows = torch.tensor([window, 0.0, 1e3, 2.0**27]).ceil()
    mask = create_block_mask(causal, None, None, q_len, kv_len, device="cpu")
    last, first = tiles_of(causal, mask, (q_len, kv_len), windows, (64, keys))
    kept = (torch.arange(first.shape[1]) * 64).clamp(max=kv_len - 1)
    assert torch.equal(first, ((kept - windows[:, None]).clamp(min=0) // keys).int())
    tiles = torch.arange(last.shape[1]).expand_as(last).contiguous()
    wanted = torch.searchsorted(first, tiles, right=True)
    assert torch.equal(last, wanted.int())
    assert PLACES < 40000 // 64


@pytest.fixture
def short_calls_too(monkeypatch):
    """The lengths of tests are those where three kernels more do not pay."""
    for name in ("LEAST_KEYS", "LEAST_ROWS", "LEAST_SCORES"):
        monkeypatch.setattr(f"flexattn.runtime.decay_skip.{name}", 0)
    monkeypatch.setattr("flexattn.runtime.decay_skip.LEAST_BACKWARD_KEYS", 0)
    launch_cache.clear()
    yield
    launch_cache.clear()


SMALL = {"bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 16}
STEEP = torch.tensor([8.0, 2.0, -1.0, 0.0])


def differentiated(q, k, v, mask, dout, learned=False, dlse=None, **options):
    """Gradients of q, k and v, and of the slopes where they are learned."""
    slopes = STEEP.clone().requires_grad_(learned)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out, aux = flexattn.flex_attention(
        *given, score_mod, mask, enable_gqa=True, kernel_options={**SMALL, **options},
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    results, grads = ((out, aux.lse), (dout, dlse)) if dlse is not None else ((out,), (dout,))
    return torch.autograd.grad(results, [*given, *[slopes] * learned], grads)


SHORT = {
    "none": None,
    "causal": causal,
    "behind": causal_offset(-21),
    "window": sliding_window(43),
    "padding": padding(torch.tensor([61, 30])),
    "documents": and_masks(document(torch.arange(140) // 57), causal),
}


@pytest.mark.usefixtures("short_calls_too")
@pytest.mark.parametrize(
    ("name", "lengths", "dtype", "form", "batches"),
    [
        ("none", (69, 97), "fp32", "learned", 2),
        ("causal", (97, 97), "bf16", "lse", 1),
        ("behind", (97, 69), "fp32", "", 2),
        ("window", (97, 97), "fp32", "learned", 1),
        ("padding", (69, 97), "bf16", "", 2),
        ("documents", (97, 97), "fp32", "lse", 2),
    ],
)
def test_gradients_are_the_same_bits(name, lengths, dtype, form, batches):
    q, k, v = inputs(2, 4, 2, *lengths, Bkv=batches, dtype=DTYPES[dtype])
    dout, dlse = cotangents(q, v, form == "lse")
    call = {"mask": block_mask(SHORT[name], q, k, 32), "dout": dout, "dlse": dlse}
    found, whole = (
        differentiated(q, k, v, learned=form == "learned", RULES_OFF=off, **call)
        for off in ("", "decay_skip")
    )
    for ours, wanted in zip(found, whole, strict=True):
        assert ours.isfinite().all() and torch.equal(ours, wanted)


@pytest.mark.usefixtures("short_calls_too")
def test_far_rows_are_not_read():
    """Rows from 64 on have no weights of the first keys in steep heads, whatever is in them."""
    q, k, v = inputs(1, 4, 4, 97, 97)
    dout, _ = cotangents(q, v, False)
    dout[:, :, 64:] = math.nan
    mask = block_mask(causal, q, k, 32)
    _, dk, dv = differentiated(q, k, v, mask, dout)
    for each in (dk, dv):
        assert each[0, 0, :32].isfinite().all() and each[0, 2:, :32].isnan().all()
    _, _, dv = differentiated(q, k, v, mask, dout, RULES_OFF="decay_skip")
    assert dv[0, :, :32].isnan().all()


def test_a_short_call_has_the_same_kernel_and_visits_all_tiles(short_calls_too, monkeypatch):
    q, k, v = inputs(1, 4, 4, 97, 97)
    dout, _ = cotangents(q, v, False)
    dout[:, :, 64:] = math.nan
    mask, before = block_mask(causal, q, k, 32), builder().compiled
    differentiated(q, k, v, mask, dout)
    for name, value in (("decay_skip.LEAST_BACKWARD_KEYS", 98), ("decay_skip.LEAST_KEYS", 98)):
        compiled = builder().compiled
        with monkeypatch.context() as here:
            here.setattr(f"flexattn.runtime.{name}", value)
            launch_cache.clear()
            _, _, dv = differentiated(q, k, v, mask, dout)
        assert dv[0, :, :32].isnan().all() and builder().compiled == compiled >= before


@pytest.mark.parametrize("written", ["NORMS", "N_BLOCK_MIN"])
def test_where_its_kernels_do_not_build_all_tiles_are_visited(
    written, short_calls_too, monkeypatch, caplog
):
    q, k, v = inputs(1, 4, 4, 97, 97)
    dout, _ = cotangents(q, v, False)
    mask = block_mask(causal, q, k, 32)
    wanted = differentiated(q, k, v, mask, dout)

    def refused(source, *args):
        if written in {each.name for each in source.arguments}:
            raise BuildError("a check refused it")
        return builder().kernel(source, *args)

    launch_cache.clear()
    double = SimpleNamespace(kernel=refused, sources=builder().sources)
    monkeypatch.setattr("flexattn.runtime.decay_skip.builder", lambda: double)
    with override(strict=False):
        found = differentiated(q, k, v, mask, dout)
    assert all(map(torch.equal, found, wanted)) and "are not left out" in caplog.text


def test_a_kernel_that_was_refused_before_is_not_built_again(short_calls_too, monkeypatch):
    q, k, v = inputs(1, 4, 4, 97, 97)
    dout, _ = cotangents(q, v, False)
    dout[:, :, 64:] = math.nan
    refused = SimpleNamespace(find=lambda source, target: Outcome("compiler", "a register short"))
    monkeypatch.setattr("flexattn.runtime.decay_skip.memory", lambda: refused)
    double = SimpleNamespace(sources=builder().sources)  # it builds nothing
    monkeypatch.setattr("flexattn.runtime.decay_skip.builder", lambda: double)
    with override(strict=False):
        _, _, dv = differentiated(q, k, v, block_mask(causal, q, k, 32), dout)
    assert dv[0, :, :32].isnan().all()
