"""Batch invariance: a row's bits are what they are alone, whatever is computed beside it."""

import random
from dataclasses import replace

import pytest
import torch

from flexattn import explain, flex_attention
from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.errors import ConfigError, UnsupportedError
from flexattn.serving import CascadePlan, DecodePlan, kernels
from flexattn.settings import override
from tests.invariance import (
    MASKS,
    Piece,
    assert_same_bits,
    plan_of,
    random_pieces,
    rows_of_attention,
    run_pieces,
    stories,
    whole,
)
from tests.support import inputs

MODS = {
    "causal": {"mask_mod": causal},
    "window, soft cap": {"mask_mod": sliding_window(100), "score_mod": softcap(20.0)},
    "ALiBi": {"mask_mod": causal, "score_mod": alibi(2, "cpu")},
}
FORMS = {
    "causal": {},
    "window, soft cap": {"sinks": True},
    "ALiBi": {"kv_dtype": torch.float8_e4m3fn, "scaled": True},
}


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of one or two tiles, so that short requests have several."""
    monkeypatch.setattr(kernels, "SPLIT_KEYS", 128)


def drawn(name):
    """Requests, the options of their plans, and what each run is given beside them."""
    form = dict(FORMS[name])
    told = stories([9, 130, 270], (2, 1), kv_dtype=form.pop("kv_dtype", None))
    call = {}
    if form.get("sinks"):
        call["sinks"] = torch.randn(2, generator=torch.Generator().manual_seed(1))
    if form.get("scaled"):
        call |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([1.25])}
    return told, form | MODS[name], call


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("name", MODS)
def test_rows_of_any_batch_have_the_bits_of_a_prefill_of_their_own(name):
    told, options, call = drawn(name)
    alone = whole(told, page=16, call=call, **options)
    draw = random.Random(name)
    for page in (0, 16):
        pieces = random_pieces(draw, told, [1, 1, 3, 17])
        plan = plan_of(told, pieces, page=page, more=draw.randint(0, 900), **options)
        assert_same_bits(run_pieces(plan, pieces, **call), pieces, told, alone)
        # As the next run must find it.
        assert bool((plan._workspace.view(torch.int32) == -1).all())


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("name", MODS)
def test_steps_of_decoding_have_the_bits_of_a_prefill(name):
    told, options, call = drawn(name)
    alone = whole(told, call=call, **options)
    every = [Piece(each, n - 1, n) for each in told for n in (1, len(each) // 2, len(each))]
    for pieces in (every, every[-1:], every[3:5]):
        plan = plan_of(told, pieces, page=16, ragged=False, **options)
        assert plan.config.BLOCK_M == 8, "a tile of its own, not that of chunks"
        assert_same_bits(run_pieces(plan, pieces, **call), pieces, told, alone)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("least", [2, 3, 20])
def test_programs_of_several_splits_hand_on_what_they_have_folded(least):
    told = stories([130, 600], (2, 1), D=128)
    alone = whole(told, mask_mod=causal)
    steps = [Piece(story, n - 1, n) for story in told for n in (1, 130, len(story))]
    for pieces in (steps, steps[::-1], steps[-1:]):
        options = {"page": 16, "ragged": False, "mask_mod": causal}
        config = replace(plan_of(told, pieces, **options).config, least=least)
        plan = plan_of(told, pieces, config=config, **options)
        assert_same_bits(run_pieces(plan, pieces), pieces, told, alone)
        assert bool((plan._workspace.view(torch.int32) == -1).all())


@pytest.mark.usefixtures("short_splits")
def test_rows_of_256_columns_in_tiles_of_4_and_of_8():
    told = stories([9, 150], (4, 2), D=256)
    alone = whole(told, page=16, mask_mod=causal)
    steps = [Piece(story, n - 1, n) for story in told for n in (1, len(story))]
    for pieces, ragged in ((steps, False), (steps, True), ([Piece(told[1], 130, 150)], True)):
        plan = plan_of(told, pieces, page=16, ragged=ragged, mask_mod=causal)
        assert plan.config.BLOCK_M == (8 if ragged else 4)
        assert_same_bits(run_pieces(plan, pieces), pieces, told, alone)


def test_a_split_has_many_tiles_where_nothing_is_shortened():
    told = stories([1100], (2, 2), D=128)
    for last in (511, 513, 1100):
        pieces = [Piece(told[0], last - 1, last), Piece(told[0], last - 5, last)]
        step, chunk = run_pieces(plan_of(told, pieces, page=16, mask_mod=causal), pieces)
        assert torch.equal(step[0][0], chunk[0][-1])
        (again,) = run_pieces(plan_of(told, pieces[:1], ragged=False), pieces[:1])
        assert torch.equal(step[0], again[0])


def test_what_cannot_be_invariant_is_refused():
    shape = {"batch": 2, "kv_len": 64, "heads": (4, 2), "device": "cpu"}
    for more in ({"dtype": torch.float32, "head_dim": 64}, {"head_dim": 96}):
        with pytest.raises(ConfigError, match="batch-invariant"):
            DecodePlan(batch_invariant=True, **more, **shape)
    cascade = {"batch": 2, "prefix_len": 64, "own_len": 64, "heads": (4, 2), "device": "cpu"}
    with override(batch_invariant=True), pytest.raises(ConfigError, match="prefix"):
        CascadePlan(head_dim=64, **cascade)


@MASKS
def test_rows_of_flex_attention_have_the_bits_of_a_prefill(mask):
    story = stories([333], (2, 1))[0]
    whole_one = rows_of_attention(story, 0, 333, mask)
    for first, last in ((0, 64), (100, 101), (90, 217), (332, 333)):
        found = rows_of_attention(story, first, last, mask)
        assert torch.equal(found, whole_one[:, first:last]), (first, last)


def test_a_bias_does_not_depend_on_where_a_tile_begins():
    """ALiBi was taken from a tile's first row on: 327 of 16256 numbers differed in a chunk."""
    story, slopes = stories([217], (2, 1))[0], alibi(2, "cpu")

    def rows(first, last):
        far = lambda s, b, h, m, n: slopes(s, b, h, m + first, n)  # noqa: E731
        return rows_of_attention(story, first, last, causal, score_mod=far)

    alone = rows(0, 217)
    for first, last in ((90, 217), (200, 201)):
        assert torch.equal(rows(first, last), alone[:, first:last]), (first, last)


def test_a_batch_of_flex_attention_has_the_bits_of_each_alone():
    told = stories([150, 150, 150], (2, 1), dtype=torch.float16)
    q, k, v = (torch.stack([getattr(x, n).transpose(0, 1) for x in told]) for n in "qkv")
    call = {"score_mod": softcap(20.0), "enable_gqa": True}
    with override(batch_invariant=True):
        found = flex_attention(q, k, v, **call)
        for b in range(3):
            alone = flex_attention(q[b : b + 1, :, 7:9], k[b : b + 1], v[b : b + 1], **call)
            assert torch.equal(alone[0], found[b, :, 7:9])
    # Outside, and where the call says so itself, it is another kernel again.
    call["kernel_options"] = {"BATCH_INVARIANT": True}
    assert torch.equal(flex_attention(q, k, v, **call), found)
    told = explain(q[:, :, :1], k, v, **call)
    assert (told.template, told.template_why) == ("prefill", "prefill alone is batch-invariant")


def test_options_that_choose_a_tile_are_refused_beside_it():
    q = torch.zeros(1, 1, 16, 16)
    for more in ({"BLOCK_M": 32}, {"BACKEND": "TRITON_DECODE"}, {"BACKEND": "GLUON"}):
        with pytest.raises(ConfigError, match="batch-invariant"):
            flex_attention(q, q, q, kernel_options={"BATCH_INVARIANT": True, **more})


def test_what_no_kernel_computes_is_refused():
    q = torch.zeros(1, 1, 16, 16)
    options = {"BATCH_INVARIANT": True}
    with pytest.raises(UnsupportedError, match="BATCH_INVARIANT"):
        torch.func.jvp(lambda x: flex_attention(x, x, x, kernel_options=options), (q,), (q,))


@pytest.mark.parametrize(("L", "S"), [(5, 0), (0, 5)])
def test_nothing_to_attend_to_is_invariant_in_training_too(L, S):
    """It was refused, with the advice to pass tensors on a GPU."""
    q, k, v = inputs(1, 2, 1, L, S)
    v.requires_grad_()
    out = flex_attention(q, k, v, enable_gqa=True, kernel_options={"BATCH_INVARIANT": True})
    assert not out.any() and not torch.autograd.grad(out.sum(), v)[0].any()
