"""Caches of eight bits, whose pages, tokens or heads may have scales of their own, interpreted."""

import math
import random
from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.errors import ConfigError, InputError, InputTypeError
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.serving import CascadePlan, DecodePlan, flex_decode, kernels
from tests import serving
from tests.covering import each_choice, pairwise
from tests.invariance import (
    Piece,
    assert_same_bits,
    plan_of,
    random_pieces,
    run_pieces,
    stories,
    whole,
)
from tests.serving import (
    EIGHT_BITS,
    assert_right,
    batch,
    check_finely_scaled,
    finely_quantized,
    plan_for,
    poisoned_pages,
    quantized,
    run,
    scale_tensors,
    with_rows,
)

TILE = ServingConfig(16, 16, 4, 2)
WARPS = ServingConfig(8, 32, 2, 1, combine="await", split_policy="heads")
WALKS = {"tile": TILE, "warp": WARPS}
LENGTHS = [53, 0, 1, 70]
SCALES = ["tensor", "head", "page", "page_head", "token", "token_head"]
E4M3 = EIGHT_BITS[0]


def check(each, scales, *, dtype=E4M3, config=TILE, page=16, **more):
    about = {"page": page, "config": config, "kv_dtype": dtype, **more}
    if scales not in ("tensor", "head"):
        check_finely_scaled(each, scales, **about)
        return
    few, wide, *both = quantized(each, dtype, scales == "head")
    given = dict(zip(("k_scale", "v_scale"), both, strict=True))
    serving.check(few, exact=wide, scaled=True, given=lambda plan: given, **about)


def requests(D=64, Dv=None, dtype=torch.bfloat16, lengths=LENGTHS, q_len=1):
    lengths = with_rows(lengths, q_len)
    return batch([q_len] * len(lengths), lengths, 8, 2, D, Dv, dtype=dtype)


@pytest.mark.parametrize("layout", ["NHD", pytest.param("HND", marks=pytest.mark.long)])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("walk", WALKS)
def test_scales_of_pages_and_tokens(walk, scales, layout):
    check(requests(), scales, config=WALKS[walk], layout=layout)


@pytest.mark.oldest
@pairwise(
    walk=WALKS, wide=[torch.float16, torch.bfloat16], dtype=EIGHT_BITS,
    scales=["tensor", "head", "token_head"],
)  # fmt: skip
def test_dtypes(walk, wide, dtype, scales):
    check(requests(dtype=wide), scales, dtype=dtype, config=WALKS[walk])


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (64, 128), (128, 64)])
def test_head_dimensions(D, Dv):
    check(requests(D, Dv), "tensor", config=WARPS, score_mod=softcap(30.0))


@pytest.mark.parametrize(("warps", "own"), [(1, 64), (4, 16)])
def test_pieces(warps, own):
    config = ServingConfig(8, warps * own, warps, 1, 5, 1, "await", "heads")
    check(requests(lengths=[53, 0, 1, 170, 128, 96]), "tensor", config=config)


@pytest.mark.parametrize(("layout", "scales"), [("NHD", "token"), ("HND", "token_head")])
@pytest.mark.parametrize("walk", WALKS)
def test_contiguous_caches(walk, layout, scales):
    check(requests(), scales, page=0, layout=layout, config=WALKS[walk])


@pytest.mark.parametrize(
    ("walk", "page", "scales"),
    [
        ("tile", 3, "page_head"),
        ("warp", 64, "page"),
        ("warp", 3, "page_head"),
        ("tile", 1, "token"),
    ],
)
def test_pages_of_any_size(walk, page, scales):
    check(requests(128, 64), scales, page=page, config=WALKS[walk])


@pytest.mark.parametrize("name", ["causal", "window", "cap"])
@pytest.mark.parametrize("walk", WALKS)
def test_mods_sinks_and_several_queries(name, walk):
    mods = {
        "causal": {"mask_mod": causal, "sinks": torch.randn(8)},
        "window": {"mask_mod": sliding_window(9)},
        "cap": {"score_mod": softcap(30.0), "sinks": torch.randn(8)},
    }[name]
    check(requests(q_len=2), "token_head", config=WALKS[walk], **mods)


def test_a_mixed_batch_of_chunks_and_single_tokens():
    each = batch([20, 1, 0, 1, 3], [50, 33, 9, 1, 0], 6, 2, 40, 24, dtype=torch.float16)
    for combine in ("last", "launch"):
        config = ServingConfig(16, 16, 4, 2, combine=combine)
        check(each, "token_head", page=8, config=config, mask_mod=causal)


@each_choice(keys=[0, 33, 517], scales=["tensor", "token_head"])
def test_tiles_of_one_request_go_round(keys, scales):
    config = ServingConfig(8, 32, 2, 1, combine="await", split_policy="round")
    check(requests(lengths=[keys]), scales, config=config, spare=0)


@pytest.mark.parametrize("scales", ["token_head", "page"])
def test_scales_of_a_cache_of_other_dtypes(scales):
    """A cache of the queries' dtype or a wider one may have scales too.

    Nine requests: three have 12 lse, by whose reference a budget is luck. Of 240 batches drawn at
    random 7 used 1.04 to 1.2 times float32's budget of lse; one of them was this test's.
    """
    lengths = [33, 7, 0, 48, 1, 25, 16, 3, 12]
    check(batch([1] * len(lengths), lengths, 6, 2), scales, dtype=torch.float32, page=4)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
@pytest.mark.parametrize("walk", WALKS)
def test_scales_of_any_size(walk, factor):
    """Weights are multiplied in float16, which holds no such numbers."""
    each = requests(lengths=[70, 3], dtype=torch.bfloat16)
    few, wide, steps = finely_quantized(each, E4M3, "token", 16)
    for x, step in zip(wide.v, steps.v, strict=True):
        # The value of the first key, which a sink would be, is much smaller than the others.
        size = torch.where(torch.arange(len(x)) == 0, factor * 1e-6, factor)[:, None, None]
        x *= size
        step *= size
    plan = plan_for(few, page=16, config=WALKS[walk], kv_dtype=E4M3, scaled="token")
    out, lse = run(plan, few, **scale_tensors(steps, plan, "token"))
    small = replace(wide, v=[x / factor for x in wide.v])
    assert_right((out / factor, lse), few, exact=small)


def test_mla():
    """One tensor of keys, whose first columns are values: one scale of each token for both."""
    each = batch([1] * 3, [53, 0, 17], 8, 1, 48, 32, dtype=torch.bfloat16)
    for b, x in enumerate(each.k):
        each.v[b] = x[..., :32]
    few, wide, steps = finely_quantized(each, E4M3, "token", 16)
    for b, x in enumerate(wide.k):
        wide.v[b], few.v[b] = x[..., :32], few.k[b][..., :32]
    plan = plan_for(few, page=16, config=TILE, scaled="token", kv_dtype=E4M3, shared_kv=True)
    scale = scale_tensors(replace(steps, v=steps.k), plan, "token")
    (cache, _), table = poisoned_pages(few, 16)
    out, lse = plan.run(
        few.q[:, None], cache, seq_lens=few.numbers(few.kv_lens), block_table=table, **scale
    )
    assert_right((out[:, 0], lse[:, 0]), few, exact=wide)


@pytest.mark.parametrize(("combine", "apart"), [("last", False), ("launch", True)])
def test_cascades(combine, apart):
    """The scales of a prefix that lies elsewhere come with it."""
    prefix, own, page = 23, [9, 1, 30], 4
    each = batch([1] * 3, [prefix + n for n in own], 6, 2, 32, dtype=torch.bfloat16)
    for b in range(1, 3):
        each.k[b][:prefix], each.v[b][:prefix] = each.k[0][:prefix], each.v[0][:prefix]
    few, wide, steps = finely_quantized(each, E4M3, "token", 1)
    for one in (few, wide, steps):
        for b in range(1, 3):
            one.k[b][:prefix], one.v[b][:prefix] = one.k[0][:prefix], one.v[0][:prefix]

    def cut(one):
        parts = [[*(x[prefix:] for x in s), s[0][:prefix]] for s in (one.k, one.v)]
        return replace(one, k=parts[0], v=parts[1], kv_lens=[*own, prefix])

    plan = CascadePlan(
        batch=3, prefix_len=prefix + 2, own_len=40, heads=(6, 2), head_dim=32, kv_dtype=E4M3,
        device="cpu", page_size=page, scaled="token", config=TILE,
        prefix_config=ServingConfig(16, 16, 4, 2, combine=combine),
    )  # fmt: skip
    cache, table = poisoned_pages(cut(few), page)
    scales = scale_tensors(cut(steps), plan.own, "token")
    call = {"block_table": table[:3], "prefix_table": table[3:]}
    if apart:
        call["prefix_cache"] = tuple(x.clone() for x in cache)
        call["prefix_scales"] = tuple(x.clone() for x in scales.values())
        for x in (*cache, *scales.values()):  # NaN where the prefix was
            x[table[3:].long().clamp(min=0)] = math.nan
    call |= {"prefix_len": each.numbers([prefix]), "kv_start": each.numbers([prefix] * 3)}
    out, lse = plan.run(
        few.q[:, None], cache, seq_lens=each.numbers(each.kv_lens), **scales, **call
    )
    assert_right((out[:, 0], lse[:, 0]), few, exact=wide)


def test_what_does_not_fit_is_refused():
    shape = {"batch": 2, "kv_len": 64, "heads": (4, 2), "head_dim": 32, "device": "cpu"}
    about = {"kv_dtype": E4M3, "config": TILE, **shape}
    with pytest.raises(InputError, match="it is True, False or one of tensor, head, page"):
        DecodePlan(scaled="row", **about)
    with pytest.raises(InputError, match="contiguous cache"):
        DecodePlan(scaled="page", **about)
    with pytest.raises(InputTypeError, match=r"give the tensors to run\(\)"):
        DecodePlan(scaled=torch.ones(1), **about)
    few, _, steps = finely_quantized(
        batch([1, 1], [9, 30], 4, 2, 32, dtype=torch.bfloat16), E4M3, "token_head", 16
    )
    plan = plan_for(few, page=16, config=TILE, kv_dtype=E4M3, scaled="token_head")
    scales = scale_tensors(steps, plan, "token_head")
    for wrong, said in (
        ({"k_scale": scales["k_scale"][:-1]}, "k_scale is torch.float32"),
        ({"k_scale": scales["k_scale"].half()}, "torch.float16"),
        ({"v_scale": torch.ones(1)}, r'float32 \[6, 16, 2\], where scaled="token_head"'),
        ({"v_scale": scales["v_scale"].transpose(1, 2).contiguous().transpose(1, 2)}, "strides"),
        ({"v_scale": None}, "v_scale is missing"),
    ):
        with pytest.raises(InputError, match=said):
            run(plan, few, **{**scales, **wrong})
    mla = ServingConfig(64, 128, 4, 1, 1, combine="launch", split_policy="whole")
    with pytest.raises(ConfigError, match="one scale of a cache, or one for each head"):
        DecodePlan(scaled="token", **{**about, "config": mla})


@pytest.mark.long
def test_rows_of_any_batch_have_the_bits_that_they_have_alone(monkeypatch):
    """Also where a later key, which other rows of its tile see, has a much larger scale."""
    monkeypatch.setattr(kernels, "SPLIT_KEYS", 128)
    draw = torch.Generator().manual_seed(4)
    told = [
        replace(
            story,
            k_scale=0.5 + torch.rand(len(story), 1, generator=draw),
            v_scale=10.0 ** (8 * torch.rand(len(story), 1, generator=draw) - 4),
        )
        for story in stories([9, 140], (2, 1), kv_dtype=E4M3)
    ]
    options = {"scaled": "token_head", "mask_mod": causal}
    alone = whole(told, page=16, **options)
    random_order = random.Random(7)
    for page in (0, 16):
        pieces = random_pieces(random_order, told, [1, 1, 3, 17])
        plan = plan_of(told, pieces, page=page, more=random_order.randint(0, 900), **options)
        assert_same_bits(run_pieces(plan, pieces), pieces, told, alone)
    steps = [Piece(each, len(each) - 1, len(each)) for each in told]
    plan = plan_of(told, steps, page=16, ragged=False, **options)
    assert_same_bits(run_pieces(plan, steps), steps, told, alone)


def test_flex_decode_is_told_what_has_a_scale():
    each = batch([1, 1], [9, 30], 4, 2, 32, dtype=torch.bfloat16)
    few, wide, steps = finely_quantized(each, E4M3, "page_head", 16)
    plan = plan_for(few, page=16, config=TILE, kv_dtype=E4M3, scaled="page_head")
    scales = scale_tensors(steps, plan, "page_head")
    cache, table = poisoned_pages(few, 16)
    out, lse = flex_decode(
        few.q[:, None], cache, seq_lens=few.numbers(few.kv_lens), block_table=table,
        scaled="page_head", return_lse=True, **scales,
    )  # fmt: skip
    assert_right((out[:, 0], lse[:, 0]), few, exact=wide)
    with pytest.raises(InputError, match="k_scale is missing"):
        flex_decode(
            few.q[:, None], cache, seq_lens=few.numbers(few.kv_lens), block_table=table,
            scaled="token",
        )  # fmt: skip
