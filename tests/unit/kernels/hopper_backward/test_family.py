"""Which problems Hopper's backward serves, in which form, and what it refuses in words."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from flexattn.catalogue import alibi, causal, document, sliding_window, softcap
from flexattn.errors import ConfigError
from flexattn.frontend.explain import _why_this_language
from flexattn.frontend.gradients import _options
from flexattn.kernels.choose.defaults import candidates, default, refused, space
from flexattn.kernels.choose.options import parse
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import (
    HopperBackwardConfig,
    at_sizes,
    backward_grid,
    columns,
    sizes_of_launch,
)
from flexattn.kernels.hopper_backward.family import BACKWARD, defaults
from flexattn.kernels.hopper_backward.masks import (
    band_of,
    may_be_no_number,
)
from flexattn.kernels.hopper_backward.source import _TWO_BUFFERS as TWO_BUFFERS
from flexattn.kernels.hopper_backward.two_buffers import ANNOUNCED
from flexattn.kernels.ptx.narrow_products import NARROW_PRODUCTS
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.mods import bind
from flexattn.problem import Layout
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.ragged import packed_backward_problem
from flexattn.tuning.search import Axes
from tests.problems import A100, H200, problem

CONFIG = HopperBackwardConfig(64, 128, 2)
PAIRS = torch.zeros(1024, 1024)


def bias(score, b, h, q_idx, kv_idx):
    return score + PAIRS[q_idx, kv_idx]


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_serves_on_hopper_and_triton_behind_it(D, dtype):
    wanted = problem("backward", D, dtype=dtype, mask_mod=causal, runs=True)
    found = list(candidates(wanted, H200))
    assert isinstance(found[0], HopperBackwardConfig) and isinstance(found[-1], BackwardConfig)
    assert isinstance(default(wanted, A100), BackwardConfig)
    assert isinstance(default(wanted, H200, "triton"), BackwardConfig)
    resources = family_of(found[0]).limits.resources(found[0], wanted.structure, H200)
    assert resources[0] <= H200.shared_memory and resources[1] <= 240


REFUSED = {
    "head dimensions (32, 32)": {"D": 32},
    "head dimensions (100, 100)": {"D": 100},
    "head dimensions (320, 64)": {"D": 320, "Dv": 64},
    "multiplies 16 bits": {"dtype": "float32"},
    "inner stride 1": {"layout": Layout(True, False, True, True)},
    "no whole tiles": {"mask_mod": causal, "block": (128, 96)},
    "no whole tiles of 64x128": {"mask_mod": causal, "block": (32, 128)},
    "memory for each query and key": {"score_mod": bias},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses_is_triton_s(words):
    wanted = problem("backward", **REFUSED[words])
    assert words in refused(wanted, H200, "gluon")
    assert isinstance(default(wanted, H200), BackwardConfig)


def test_narrower_keys_have_no_backward_of_this_family():
    wanted = problem("backward", kv_dtype="float8_e4m3fn")
    assert "of one dtype" in refused(wanted, H200, "gluon")


def test_gradients_of_captured_tensors_are_triton_s():
    wanted = problem("backward", score_mod=lambda s, b, h, q, k: s * SLOPES[h])
    assert isinstance(default(wanted, H200), HopperBackwardConfig)
    learned = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
    assert "added up by Triton's backward" in refused(learned, H200, "gluon")


@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_dropout_takes_a_bit_of_each_weight(D):
    wanted = problem("backward", D)
    dropped = replace(wanted, structure=replace(wanted.structure, dropout=True))
    found = next(defaults(dropped))
    assert isinstance(default(dropped, H200), HopperBackwardConfig)
    stated = family_of(found).limits
    (more, _), (less, _) = (
        stated.resources(found, each.structure, H200) for each in (dropped, wanted)
    )
    assert more - less == found.BLOCK_M * found.BLOCK_N // 8
    ahead = replace(found, num_stages=4)
    assert "fourth stage" in "; ".join(stated.reasons(ahead, dropped.structure, H200))


SLOPES = torch.zeros(32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"BLOCK_M": 32}, "64 or 128"),
        ({"num_stages": 5}, "between 1 and 4"),
        ({"num_stages": 1, "pipelined": "dk"}, "two stages"),
        ({"pipelined": "dv"}, "dk or empty"),
        ({"ds_stages": 3}, "is not 1 or 2"),
        ({"BLOCK_M": 128, "num_stages": 3}, "shared memory"),
        ({"BLOCK_M": 128, "dq_tma": True}, "more than 32 KB"),
        ({"dq_tma": True, "num_stages": 4}, "dq_tma takes a hardware barrier"),
        ({"deterministic": True}, "deterministic takes dq_tma"),
        ({"BLOCK_M": 128, "num_stages": 1}, "registers"),
        ({"persistent": True}, "persistent takes dq_tma"),
        ({"persistent": True, "dq_tma": True, "dq_halves": True}, "as a whole"),
        ({"persistent": True, "dq_tma": True, "ds_stages": 1}, "by way of 1 tiles of dS"),
        ({"by_product": True}, "by_product takes tiles of 64x64"),
        ({"by_product": True, "BLOCK_N": 64, "pipelined": "dk"}, "that orders the products"),
    ],
)
def test_configs_that_cannot_run(changes, words):
    structure = problem("backward").structure
    found = family_of(CONFIG).limits.reasons(replace(CONFIG, **changes), structure, H200)
    assert words in "; ".join(found)


def test_products_of_their_own_neither_drop_weights_nor_add_to_captured_gradients():
    """Above 128 columns they are the default, but where a warpgroup lacks what the other has."""
    wanted = problem("backward", 256, mask_mod=causal, runs=True)
    first, shared = list(defaults(wanted))
    assert first.by_product and not first.split and shared.split
    (other,) = defaults(problem("backward", 256, score_mod=softcap(5.0)))
    assert not other.by_product
    for change in ({"dropout": True}, {"grads": (0,)}):
        structure = replace(wanted.structure, **change)
        reasons = family_of(first).limits.reasons(first, structure, H200)
        assert "by_product neither drops weights" in "; ".join(reasons)


@pytest.mark.parametrize(
    ("dtype", "kv_len", "alone"),
    [("float16", 16384, True), ("float16", 16385, False), ("bfloat16", 131072, True)],
)
def test_weights_handed_on_in_float16_keep_their_bits(dtype, kv_len, alone):
    """Of 131,072 keys alike each weighs 2**-17, of which float16 keeps eight bits."""
    wanted = problem("backward", 256, kv_len=kv_len, dtype=dtype)
    assert next(defaults(wanted)).by_product == alone


def test_options_decide_the_language():
    wanted = problem("backward", mask_mod=causal, runs=True)
    apart = problem("backward", 32)

    def language(asked, **options):
        return _options(parse(options), asked, H200).language

    assert language(wanted) is None
    assert language(wanted, BACKEND="GLUON") == "gluon"
    assert language(wanted, BACKEND="TRITON") == "triton"
    assert language(apart, BACKEND="GLUON") is None
    # Hopper's where it can be deterministic, else Triton's: see the next test.
    assert language(wanted, DETERMINISTIC=True, BACKEND="GLUON") is None
    assert language(wanted, DETERMINISTIC=True, BACKEND="TRITON") == "triton"
    tiles = _options(parse({"BLOCK_M1": 32}), wanted, H200).exact
    assert isinstance(tiles, BackwardConfig) and tiles.BLOCK_M1 == 32


@pytest.mark.parametrize("switch", ["option", "torch", "backend"])
@pytest.mark.parametrize(("D", "ordered"), [(64, True), (128, True), (96, True), (256, False)])
def test_sums_that_must_have_an_order(D, ordered, switch, monkeypatch):
    """Hopper's kernel adds dQ up in order, or else Triton's serves: there are no others."""
    wanted, asked = problem("backward", D, mask_mod=causal, runs=True), {}
    if switch == "torch":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        asked = {"DETERMINISTIC": True} | ({"BACKEND": "GLUON"} if switch == "backend" else {})
    found = [
        each.config for each in candidates_of(wanted, H200, _options(parse(asked), wanted, H200))
    ]
    hopper = [each for each in found if isinstance(each, HopperBackwardConfig)]
    assert bool(hopper) is ordered and all(each.deterministic for each in hopper)
    assert isinstance(found[0], HopperBackwardConfig) is ordered
    assert isinstance(found[-1], BackwardConfig)


def test_the_form_follows_the_sizes():
    alone = problem("backward", group=1)
    assert at_sizes(CONFIG, alone) == replace(CONFIG, mha=True, even_n=True)
    assert at_sizes(CONFIG, problem("backward", kv_len=8191)) == CONFIG
    assert not at_sizes(CONFIG, replace(alone, broadcast_kv=True)).mha
    for promised in ({"mha": True}, {"even_n": True}):
        with pytest.raises(ConfigError, match="mha is of problems"):
            backward_grid(problem("backward", kv_len=8191), replace(CONFIG, **promised), H200)


def first_of(monkeypatch, *dims, meets=False, bounded=False, **more):
    """The first default under Triton 3.6, or where loops have fewer registers, or views an end."""
    place = "flexattn.kernels.hopper_backward.family"
    monkeypatch.setattr(f"{place}.waits_meet", lambda: meets)
    monkeypatch.setattr(f"{place}.bounds_views", lambda: bounded)
    return next(defaults(problem("backward", *dims, **{"kv_len": 8192, "group": 1} | more)))


def test_values_of_up_to_128_columns_take_tiles_of_128_keys(monkeypatch):
    """By-product's 64 keys wait for dQ, of which these write half as much."""
    walked = {"mask_mod": causal, "runs": True}
    for more in ({}, walked):
        found = first_of(monkeypatch, 192, 128, bounded=True, **more)
        assert (found.BLOCK_N, found.ds_stages, found.ds_first) == (128, 2, True)
    window = {"mask_mod": sliding_window(1000), "runs": True}
    for more in ({"meets": True}, {"kv_len": 8191}, {"group": 4}, window, {"mask_mod": causal}):
        assert first_of(monkeypatch, 192, 128, bounded=True, **more).by_product
    early = [
        first_of(monkeypatch, D, bounded=True, **walked).early_lse for D in (160, 192, 224, 256)
    ]
    assert early == ["all", "all", "", ""]


def test_heads_of_192_columns_take_tiles_of_96_keys(monkeypatch):
    """FlashAttention-4's size: dQ is written two thirds as often as of 64 keys."""
    walked = {"mask_mod": causal, "runs": True}
    for dims, more in product(((192,), (192, 128), (184, 184)), ({}, walked, {"kv_len": 8191})):
        found = first_of(monkeypatch, *dims, **more)
        assert (found.BLOCK_N, found.by_product, found.waves) == (96, True, 4)
    window = {"mask_mod": sliding_window(1000), "runs": True}
    for more in (window, {"score_mod": softcap(30.0)}, {"bounded": True}, {"meets": True}):
        assert first_of(monkeypatch, 192, **more).BLOCK_N == 64
    assert first_of(monkeypatch, 176).BLOCK_N == first_of(monkeypatch, 192, 200).BLOCK_N == 64


def test_blocks_of_narrow_heads_are_persistent(monkeypatch):
    walked = {"mask_mod": causal, "runs": True}
    for more in walked, {}:
        found = [first_of(monkeypatch, D, **more) for D in (72, 80, 96, 112, 128)]
        assert [each.persistent for each in found] == [True, True, True, False, False]
        assert all(each.persistent != each.dq_halves for each in found)
    for more in ({"meets": True, **walked}, {"group": 4, **walked}, {"group": 4}):
        assert not first_of(monkeypatch, 96, **more).persistent


@pytest.mark.parametrize(
    ("rows", "heads", "tile", "held"),
    [(900, 4, 128, False), (700, 4, 64, True), (300, 4, 64, False), (900, 2, 64, True)],
)
def test_tiles_of_packs_follow_from_a_mean_sequence(rows, heads, tile, held, monkeypatch):
    """Of 64 columns; short sequences fill less of tall tiles, and load V seldom."""
    monkeypatch.setattr("flexattn.kernels.hopper_backward.family.waits_meet", lambda: False)
    q, k = (torch.empty(10 * rows, each, 64, dtype=torch.bfloat16) for each in (4, heads))
    wanted = packed_backward_problem(q, k, k, 9, None, bind(causal, "mask"))
    found = next(BACKWARD.able(wanted, H200))
    assert (found.BLOCK_M, found.dp_rs, found.persistent) == (tile, held, True)


@pytest.mark.parametrize("dims", [(40, 40), (72, 72), (80, 64), (96, 96), (192, 128)])
def test_heads_narrower_than_tiles(dims):
    """Tiles are powers of two; what is multiplied of them is as wide as the heads."""
    wanted = problem("backward", *dims)
    config = default(wanted, H200)
    assert isinstance(config, HopperBackwardConfig)
    source = family_of(CONFIG).render(wanted.structure, config, H200, "")
    assert NARROW_PRODUCTS in source.stages.passes
    tiles = {each.type for each in source.arguments if each.name in ("Q", "V", "DK")}
    width = 64 if config.BLOCK_N == 96 else columns(wanted.structure)
    assert all(f", {width}]" in each for each in tiles)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_search_above_128_columns_tries_tiles_of_96_and_128_keys(bounded, monkeypatch):
    """Where registers hold them: 128 of 192 columns of keys and 128 of values, and 96 of 192."""
    place = "flexattn.kernels.hopper_backward.limits.bounds_views"
    monkeypatch.setattr(place, lambda: bounded)

    def keys_of(*dims, **more):
        found = space(problem("backward", *dims, group=1, **more), H200)
        return {c.BLOCK_N for c in found if isinstance(c, HopperBackwardConfig)}

    odd = set() if bounded else {96}
    assert keys_of(192, 128) == {64, 128} | odd and keys_of(192, 136) == {64} | odd
    assert keys_of(136, 64) == {64, 128}
    assert keys_of(184, 184, mask_mod=causal, runs=True) == {64} | odd
    documents = document(PAIRS[0].int())
    assert keys_of(192, mask_mod=causal) == keys_of(192, mask_mod=documents, runs=True) == {64}
    assert keys_of(200, 128) == keys_of(192, 128, score_mod=softcap(30.0)) == {64}
    wanted = problem("backward", 192, 128, group=1)
    lean = at_sizes(replace(CONFIG, ds_stages=2, ds_first=True, remat=True), wanted)
    assert lean in space(wanted, H200)
    refused = family_of(lean).limits.reasons
    assert not refused(lean, wanted.structure, H200)
    for field in ({"dq_tma": True}, {"BLOCK_M": 128}, {"pipelined": "dk"}, {"num_stages": 3}):
        assert refused(replace(lean, **field), wanted.structure, H200)
    packed = replace(wanted.structure, ragged_kv=True)
    assert any("packed" in each for each in refused(lean, packed, H200))


@pytest.mark.parametrize(("dims", "used"), [((40, 40), 48), ((64, 104), 64), ((192, 128), 192)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_memory_of_dq_has_a_heads_columns(dims, used, packed):
    """It was a power of two wide: 7 to 12 % of the memory at the peak of a backward."""
    wanted = problem("backward", *dims)
    wanted = replace(wanted, structure=replace(wanted.structure, ragged_kv=packed))
    config = next(defaults(wanted))
    ((_, tiles, *tile),) = (
        shape for name, shape in BACKWARD.around(wanted, config, H200).scratch if name == "DQ_ACC"
    )
    heads = wanted.Hq * (1 if packed else wanted.B)
    assert tiles == heads * sizes_of_launch(wanted, config)["num_queries"]
    assert math.prod(tile) == config.BLOCK_M * used


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, causal], ids=["full", "causal"])
def test_a_search_has_both_families(D, mask):
    """At 256 columns the quick one had Hopper's configs alone: Triton's first was of no axis."""
    wanted = problem("backward", D, mask_mod=mask, runs=mask is not None)
    found = space(wanted, H200, "quick")
    assert {type(each) for each in found} == {HopperBackwardConfig, BackwardConfig}
    every = space(wanted, H200, "full")
    assert len({family_of(each).short(each) for each in every}) == len(every)
    ours = [each for each in every if isinstance(each, HopperBackwardConfig)]
    assert {each.pipelined for each in ours} == ({"", "dk"} if D == 256 else {""})


# What another field or the structure says: the second default alone is without dq_tma.
FOLLOWS = {"ds_stages", "dq_tma", "shift_rows"}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", ["full", "causal", "documents"])
def test_a_search_varies_nine_fields_at_most(D, name):
    mask = {"causal": causal, "documents": document(torch.zeros(8192).int())}.get(name)
    wanted = problem("backward", D, mask_mod=mask, runs=mask is not None, group=1)
    ours = [each for each in space(wanted, H200) if isinstance(each, HopperBackwardConfig)]
    assert 4 <= len(set(Axes(ours).choices) - FOLLOWS) <= 9


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("D", [64, 128])
def test_all_that_a_search_tries_has_a_grid(D, group):
    wanted = problem("backward", D, group=group, mask_mod=causal, runs=True)
    tried = [c for c in space(wanted, H200) if isinstance(c, HopperBackwardConfig)]
    assert tried
    for each in tried:
        assert family_of(each).grid(wanted, each, H200).programs


@pytest.mark.parametrize("kv_len", [1, 128, 129, 8191])
def test_programs_cover_the_keys(kv_len):
    wanted = problem("backward", kv_len=kv_len, q_len=130)
    sizes = sizes_of_launch(wanted, CONFIG)
    assert sizes["shared_heads"] == 4 and sizes["num_queries"] == 3
    assert (
        backward_grid(wanted, CONFIG, H200).programs == -(-kv_len // 128) * wanted.B * wanted.Hkv
    )
    stays = replace(CONFIG, dq_tma=True, persistent=True)
    tiles = backward_grid(wanted, CONFIG, H200).programs
    assert backward_grid(wanted, stays, H200).programs == min(132, tiles)
    shared = replace(wanted, broadcast_kv=True)
    assert sizes_of_launch(shared, CONFIG)["shared_heads"] == 4 * wanted.B
    assert backward_grid(shared, CONFIG, H200).programs == -(-kv_len // 128) * wanted.Hkv
    # Lists name whole blocks: what they name beyond the last row has scratch memory as well.
    listed = problem("backward", kv_len=kv_len, q_len=130, mask_mod=causal)
    assert sizes_of_launch(listed, CONFIG)["num_queries"] == 4


@pytest.mark.parametrize("score", [None, softcap(30.0), alibi(32, "cpu")])
@pytest.mark.parametrize("mask", [sliding_window(1000), document(torch.zeros(8192).int())])
@pytest.mark.parametrize("group", [1, 4])
def test_short_masks_are_walked_alike_with_and_without_a_score_mod(score, mask, group):
    more = {} if score is None else {"score_mod": score}
    wanted = problem("backward", 128, kv_len=8192, group=group, mask_mod=mask, runs=True, **more)
    first = next(iter(defaults(wanted)))
    assert first.ds_first and first.waves == 4 and first.persistent == (group == 1)
    assert first.trimmed == (band_of(bind(mask, "mask").mod.expr) is None)
    assert not (first.dp_rs and score is not None)


ROWS = torch.ones(32)


@pytest.mark.parametrize(
    ("score", "stray"),
    [
        (softcap(30.0), False),
        (alibi(32, "cpu"), False),
        (lambda s, b, h, q, k: s / 3.7 / ROWS[h] + ROWS[k].log(), False),
        (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), False),
        (lambda s, b, h, q, k: s / (8191 - q), True),
        (lambda s, b, h, q, k: s + ROWS[q], True),
        (lambda s, b, h, q, k: s * torch.log1p((8191 - q).float()), True),
        (lambda s, b, h, q, k: torch.where(q < 8191, s, float("inf")), True),
    ],
)
def test_scores_behind_the_last_row(score, stray):
    """Only where they may be no number is a weight asked for its row."""
    found = bind(score, "score")
    assert may_be_no_number(found.mod.expr) == stray


def test_mods_are_printed_transposed():
    wanted = problem("backward", score_mod=softcap(30.0), mask_mod=causal, runs=True)
    config = default(wanted, H200)
    text = family_of(config).render(wanted.structure, config, H200, "test").text
    assert "Q_RUNS" in text and "within_band" in text and "ds = gl.where(p == 0.0" in text


WHY = {
    "warp-specialised": ({}, {}),
    "at 64 and 128 columns": ({"D": 256}, {"DETERMINISTIC": True}),
    "forced by kernel_options": ({}, {"BACKEND": "TRITON"}),
    "multiplies 16 bits": ({"dtype": "float32"}, {"BACKEND": "GLUON"}),
}


@pytest.mark.parametrize("words", WHY)
def test_explain_says_why_one_of_the_two_serves(words):
    sizes, given = WHY[words]
    wanted, asked = problem("backward", **sizes), parse(given)
    choice = next(candidates_of(wanted, H200, _options(asked, wanted, H200))).choice()
    assert words in _why_this_language(choice, asked)
    assert (choice.config.language == "gluon") is (words == "warp-specialised")


@pytest.mark.parametrize("D", [pytest.param(64, marks=pytest.mark.long), 112, 128])
def test_kernels_of_one_hash_ask_for_the_same_passes(D):
    """The hash finds a kernel in every cache, and covers the text alone: there it says of both."""
    asked = {}
    for mods in ({}, {"mask_mod": causal, "runs": True}):
        wanted = problem("backward", D, **mods)
        for config in space(wanted, H200):
            if family_of(config).language == "gluon":
                source = family_of(config).render(wanted.structure, config, H200, "test")
                assert asked.setdefault(source.hash, source.stages) == source.stages, config
                told = {
                    TWO_BUFFERS: ANNOUNCED,
                    NARROW_PRODUCTS: "// narrow_products ",
                }
                assert {*source.stages.passes} == {x for x in told if told[x] in source.text}
    assert len({stages.passes for stages in asked.values()}) > 1
