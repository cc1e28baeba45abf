"""The Gluon template on a Hopper GPU: the catalogue, every config, bits that stay, refusals."""

from dataclasses import fields, replace
from itertools import combinations

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import flexattn
from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.device import detect
from flexattn.errors import ConfigError
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.defaults import space
from flexattn.kernels.choose.options import Options
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.reference import Reference
from flexattn.runtime.build import builder
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch
from tests import support
from tests.cases import CASES
from tests.support import (
    DTYPES,
    ON_SM_90,
    PREFILL,
    assert_judged,
    block_mask,
    call_of,
    captured,
    heads_inside,
    run,
    spaced,
    tensors,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
GLUON = {"BACKEND": "GLUON"}
FP16 = ("noop", "causal", "softcap_50", "relative_bias", "random_blocks_empty_rows", "nested")


def assert_accurate(q, k, v, **call):
    """As support's, without max_scores: asked for, they turn lazy_rescale off."""
    return support.assert_accurate(q, k, v, max_scores=False, **call)


def offered(problem):
    """The Gluon configs that the space offers."""
    found = space(problem, detect(torch.device("cuda", 0)))
    return [each for each in found if isinstance(each, HopperPrefillConfig)]


def covering(configs):
    """Some of them, in which every pair of values of two fields occurs that occurs in all."""
    seen = set()
    for config in configs:
        values = [(field.name, getattr(config, field.name)) for field in fields(config)]
        pairs = set(combinations(values, 2))
        if pairs - seen:
            seen |= pairs
            yield config


def prepared(q, k, v, score_mod=None, mask=None):
    """A call that wants lse, and what it would launch as it stands."""
    return plan(make_call(q, k, v, score_mod, mask, None, True, True, GLUON, None))


def run_with(made, config):
    """The same call with a config of one's own."""
    call, launch = made.call, made.launch
    launch = prepare_launch(
        launch.problem, launch.choice.device, call.q.device, dispatcher(), Options(exact=config),
        call.q, call.k, call.v, made.lists,
    )  # fmt: skip
    return Reference(*made._replace(launch=launch).run())


@pytest.mark.parametrize(
    ("entry", "dtype"),
    [(case, "bf16") for case in CASES] + [(case, "fp16") for case in CASES if case.name in FP16],
    ids=str,
)
def test_every_case(entry, dtype):
    given, call = call_of(entry, 2, 8, 2, 611, 747, 128, dtype=DTYPES[dtype], device="cuda")
    call["kernel_options"] = GLUON
    assert flexattn.explain(*given, enable_gqa=True, **call).config.language == "gluon"
    support.assert_accurate(*given, max_scores=dtype == "fp16", **call)


@pytest.mark.parametrize("mod", ["noop", "causal", "softcap"])
@pytest.mark.parametrize(
    ("D", "Dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128), (128, 64)]
)
def test_head_dimensions(D, Dv, mod):
    q, k, v = tensors(1, 6, 2, 301, 419, D, Dv)
    mask = None if mod == "noop" else block_mask(causal, q, k)
    score_mod = softcap(50.0) if mod == "softcap" else None
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=GLUON)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mod", ["noop", "causal"])
def test_every_length_from_1_to_300(mod):
    """One kernel serves them all: a new length compiles nothing."""
    compiled = None
    for length in range(1, 301):
        q, k, v = tensors(1, 4, 2, length, length, 64)
        mask = block_mask(causal, q, k) if mod == "causal" else None
        assert_accurate(q, k, v, block_mask=mask, kernel_options=GLUON)
        compiled = compiled or builder().compiled
        assert builder().compiled == compiled, length


@pytest.mark.parametrize("lengths", [(1, 1), (17, 4099), (4099, 17), (129, 128), (64, 1)], ids=str)
def test_lengths_far_apart(lengths):
    q, k, v = tensors(2, 6, 3, *lengths, 128)
    for mask_mod in (None, causal, sliding_window(100)):
        mask = block_mask(mask_mod, q, k)
        assert_accurate(q, k, v, block_mask=mask, kernel_options=GLUON)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("bias", ["by key", "by distance"])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_what_a_mask_hides_may_be_no_number(D, bias, value):
    """Padded keys had a bias of NaN: the softmax added it to their -inf, and every row was NaN."""
    L, S, seen = 333, 401, 199
    q, k, v = tensors(2, 4, 2, L, S, D)
    table = torch.randn(4, L + 2 * S, device="cuda").to(q.dtype)
    if bias == "by key":
        table[:, seen:] = value
        mask = block_mask(lambda b, h, q_idx, kv_idx: kv_idx < seen, q, k)
    else:
        table[:, :S] = value
        mask = block_mask(causal, q, k)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h, kv_idx if bias == "by key" else q_idx - kv_idx + S]

    assert_accurate(q, k, v, score_mod=mod, block_mask=mask, kernel_options=GLUON)
    if bias == "by key":
        table[:, :S], table[:, S:] = 1.0, value  # behind the last key
        assert_accurate(q, k, v, score_mod=mod, kernel_options=GLUON)


def first_keys_masked(b, h, q_idx, kv_idx):
    return (kv_idx >= 300) & (q_idx >= 200)


@pytest.mark.parametrize("score", ["none", "infinite"])
def test_rows_without_a_key(score):
    """The first blocks of a row fully masked, rows with no key, and scores of -inf."""
    q, k, v = tensors(1, 4, 2, 611, 747, 128)

    def nothing_before_400(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx >= 400, score, -float("inf"))

    score_mod = nothing_before_400 if score == "infinite" else None
    mask = block_mask(first_keys_masked, q, k)
    got = assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=GLUON)
    assert (got.out[:, :, :200] == 0).all() and (got.lse[:, :, :200] == -torch.inf).all()
    # Blocks that the lists call full hold no finite score for any row.
    mask = block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0, q, k)
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=GLUON)


def rising(score, b, h, q_idx, kv_idx):
    return score - 0.05 * kv_idx


def jumping(score, b, h, q_idx, kv_idx):
    return score - 7.0 * kv_idx


@pytest.mark.parametrize("score_mod", [rising, jumping], ids=lambda mod: mod.__name__)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_maxima_that_rise_from_tile_to_tile(D, score_mod):
    """The last keys come first: every tile has higher scores than the ones before, some by 900."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = tensors(1, 4, 2, 611, 747, D, dtype=dtype)
        for mask_mod in (None, causal):
            mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
            call = {"score_mod": score_mod, "block_mask": mask, "kernel_options": GLUON}
            assert_accurate(q, k, v, **call)


@pytest.mark.parametrize("factor", [1.0, 6.0, 40.0, 3000.0])
def test_scores_below_and_above_their_cap(factor):
    """Within the polynomial's range, around its end, and where only the instruction reaches."""
    q, k, v = tensors(1, 4, 2, 611, 747, 128)
    q *= factor
    for mask_mod in (None, causal):
        mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
        call = {"score_mod": softcap(30.0), "block_mask": mask, "kernel_options": GLUON}
        assert_accurate(q, k, v, **call)


@pytest.mark.parametrize("bias", ["alibi", "column", "relative"])
@pytest.mark.parametrize("factor", [1.0, 30.0, 400.0])
def test_rows_side_by_side_with_maxima_far_apart(factor, bias):
    """A thread has two rows. With one maximum for both while theirs were near each other, the one
    that was left behind while the other rose lost all its weights."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = tensors(1, 4, 2, 611, 747, 128, dtype=dtype)
        rows = torch.arange(611, device="cuda")
        q *= torch.where(rows // 8 % 2 == 0, 1.0, factor).to(dtype)[:, None]
        keys = torch.randn(747, device="cuda")
        score_mod = {
            "alibi": alibi(4, "cuda"),
            "column": lambda score, b, h, q_idx, kv_idx: score + keys[kv_idx],
            "relative": relative_bias(torch.randn(4, 2048, device="cuda"), 1024),
        }[bias]
        for mask_mod in (None, causal, first_keys_masked):
            mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
            call = {"score_mod": score_mod, "block_mask": mask, "kernel_options": GLUON}
            assert_accurate(q, k, v, **call)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_score_that_is_no_number_makes_its_row_one(value):
    def poisoned(score, b, h, q_idx, kv_idx):
        return torch.where((q_idx == 205) & (kv_idx == 7), value, score)

    q, k, v = tensors(1, 4, 2, 611, 747, 128)
    with torch.no_grad():
        got = run(q, k, v, score_mod=poisoned, kernel_options=GLUON, max_scores=False)
        sound = run(q, k, v, kernel_options=GLUON, max_scores=False)
    rows = torch.arange(611, device="cuda") != 205
    assert got.out[:, :, 205].isnan().all() and got.lse[:, :, 205].isnan().all()
    torch.testing.assert_close(got.out[:, :, rows], sound.out[:, :, rows], rtol=0, atol=0.01)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_groups_and_shared_batches(group):
    q, k, v = tensors(3, 2 * group, 2, 211, 345, 64, Bkv=1)
    for mask_mod in (None, causal):
        mask = block_mask(mask_mod, q, k)
        assert_accurate(q, k, v, block_mask=mask, kernel_options=GLUON)


MODS = {
    "noop": (None, None),
    "causal": (None, causal),
    "window": (softcap(30.0), sliding_window(200)),
}


# It compiles dozens of kernels.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("D", "mods"),
    [
        (64, "noop"),
        (64, "window"),
        (128, "noop"),
        (128, "causal"),
        (128, "window"),
        (256, "causal"),
    ],
)
def test_configs_offered(D, mods):
    """Tiles, schedules, orders and turns: more tiles than the device has SMs, at odd lengths."""
    score_mod, mask_mod = MODS[mods]
    q, k, v = tensors(2, 16, 4, 1611, 1347, D)
    mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
    made = prepared(q, k, v, score_mod, mask)
    configs = offered(made.launch.problem)
    assert configs
    for config in covering(configs):
        got = run_with(made, config)
        assert_judged(got, q, k, v, score_mod=score_mod, block_mask=mask)


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_bits_stay_from_run_to_run(D, mods):
    """Races between the copies, the consumers and the next tile show as other bits."""
    score_mod, mask_mod = MODS[mods]
    q, k, v = tensors(2, 16, 4, 3011, 2747, D)
    mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
    made = prepared(q, k, v, score_mod, mask)
    first = offered(made.launch.problem)[0]
    turns = first.consumers > 1
    # Programs that stay keep a walk in the registers of a part of Q.
    stays = replace(first, tile_scheduler="static", q_in_regs=0)
    for config in (
        first,
        stays,
        replace(stays, ping_pong=turns),
        replace(stays, tile_scheduler="dynamic"),
    ):
        wanted = run_with(made, config)
        for _ in range(50):
            got = run_with(made, config)
            assert torch.equal(got.out, wanted.out) and torch.equal(got.lse, wanted.lse), config


def test_documents_of_odd_lengths():
    ids = torch.arange(7, device="cuda").repeat_interleave(
        torch.tensor([11, 177, 64, 248, 129, 150, 24], device="cuda")
    )
    length = len(ids)
    q, k, v = tensors(1, 8, 8, length, length, 128)
    mask = block_mask(and_masks(document(ids), causal), q, k)
    assert_accurate(q, k, v, score_mod=alibi(8, "cuda"), block_mask=mask, kernel_options=GLUON)


def test_strides_that_the_copy_engine_takes_and_others():
    q, k, v = tensors(2, 4, 2, 205, 345, 64)
    inside = [heads_inside(x) for x in (q, k, v)]
    assert_accurate(*inside, kernel_options=GLUON)
    with pytest.raises(ConfigError, match="inner stride 1"):
        run(*(spaced(x) for x in (q, k, v)), kernel_options=GLUON)
    found = flexattn.explain(*(spaced(x) for x in (q, k, v)), enable_gqa=True)
    assert found.language == "triton" and "inner stride 1" in found.language_why


def test_triton_is_forced_as_documented():
    q, k, v = tensors(1, 4, 2, 611, 747, 128)
    for options, language in ((PREFILL, "triton"), (GLUON, "gluon")):
        found = flexattn.explain(q, k, v, enable_gqa=True, kernel_options=options)
        assert found.config.language == found.language == language
        assert found.language_why == "forced by kernel_options"


def test_a_graph_replays_with_inputs_that_change_in_place():
    q, k, v = tensors(2, 8, 2, 611, 747, 128)
    mask = block_mask(causal, q, k)
    call = {"block_mask": mask, "kernel_options": GLUON}
    with torch.no_grad():
        graph, got = captured(lambda: run(q, k, v, **call))
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert_judged(got, q, k, v, block_mask=mask)
