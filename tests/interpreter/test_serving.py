"""The serving kernels, interpreted: every cache, every mod, odd and empty requests, one oracle."""

from functools import partial

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.errors import InputError
from flexattn.kernels.paged_decode.config import ServingConfig
from tests import serving
from tests.cases import CASES
from tests.covering import each_choice, pairwise
from tests.serving import (
    EIGHT_BITS,
    SMALL,
    assert_right,
    batch,
    plan_for,
    quantized,
    run,
    with_rows,
)  # fmt: skip
from tests.support import DTYPES

LENGTHS = [53, 0, 1, 17, 128, 32]


check = partial(serving.check, config=SMALL, page=4)


@pytest.mark.oldest
@pairwise(
    page=[0, 1, 3, 16, 64], layout=["NHD", "HND"],
    together=[pytest.param(False, id="apart"), pytest.param(True, id="together")],
)  # fmt: skip
def test_caches(page, layout, together):
    check(batch([1] * 6, LENGTHS, 6, 2), page=page, layout=layout, together=together)


@pairwise(per_sm=[1, 2, 7], least=[1, 3], combine=["last", "launch", "dependent"])
def test_pieces_of_any_size_merge(per_sm, least, combine):
    config = ServingConfig(16, 16, 4, 2, per_sm, least, combine)
    check(batch([2] * 6, LENGTHS, 10, 2), config=config, sinks=torch.randn(10))


@pytest.mark.parametrize("D", [192, 256, 320])
def test_few_parts_are_merged_by_columns(D):
    """Those of a head dimension that is one power of two; others have columns of two sizes."""
    config = ServingConfig(16, 16, 4, 2, 2, 1, "dependent")
    check(batch([1], [300], 1, 1, D, dtype=torch.float16), config=config)


@pytest.mark.parametrize("combine", ["last", "launch"])
def test_more_parts_than_a_program_holds_at_a_time(combine):
    """Rows of 512 columns leave room for four of each row: sums of those before are rescaled."""
    config = ServingConfig(16, 16, 4, 2, 7, 1, combine)
    check(batch([1], [300], 8, 1, 320, dtype=torch.float16), config=config)


@each_choice(group=[1, 3, 8, 40], dtype=DTYPES)
def test_any_number_of_query_heads_per_key_head(group, dtype):
    check(
        batch([3] * 6, with_rows(LENGTHS, 3), 2 * group, 2, dtype=DTYPES[dtype]), mask_mod=causal
    )


@pytest.mark.parametrize(("D", "Dv"), [(24, 24), (80, 80), (192, 128), (64, 40)])
def test_head_dimensions(D, Dv):
    check(batch([1] * 6, LENGTHS, 2, 1, D, Dv, dtype=torch.float16), score_mod=softcap(30.0))


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_every_mod_of_the_catalogue(entry):
    """Positions count from the request's first key, whatever its number of queries."""
    built = entry.make(4, 3, 1, 128, 128)
    mods = {"score_mod": built.score_mod, "mask_mod": built.mask_mod}
    check(batch([5] * 4, [53, 0, 17, 128]), page=5, **mods)


READ = (torch.bool, torch.uint8, torch.int64, torch.float16)


@pytest.mark.oldest
@each_choice(kind=READ, per_sm=[1, 7])
def test_a_tree_of_draft_tokens(kind, per_sm):
    """The table is read for the last keys alone; of what is no key, or no row, it has nothing."""
    each = batch([5] * 6, [53, 5, 16, 17, 128, 36], 6, 2)
    past = torch.tensor(each.kv_lens) - 5
    above = torch.ones(6, 5, 7).tril().to(kind)[..., ::2].repeat_interleave(2, 2)[..., :5]
    above[:, 3, 1:3] = 0

    def tree(b, h, q, kv):
        return (kv < past[b]) | (above[b, q - past[b], (kv - past[b]).clamp(min=0)] != 0)

    config = ServingConfig(16, 16, 4, 2, per_sm)
    check(each, config=config, mask_mod=tree)
    check(each, config=config, page=0, mask_mod=tree)


def test_a_length_that_says_no_limit():
    """The first key past 2^63 - 1 wrapped to -2^63, and the plan skipped every page."""
    ends = torch.tensor([2**63 - 1, 9])
    each = batch([1, 1], [33, 40], 4, 2)
    check(each, config=SMALL, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= ends[b])


def test_a_mixed_batch_of_chunks_and_single_tokens():
    each = batch([40, 1, 0, 1, 17, 3], [100, 53, 9, 1, 17, 0], 6, 2)
    for mods in ({}, {"mask_mod": causal}, {"mask_mod": sliding_window(9)}):
        check(each, page=16, score_mod=alibi(6, "cpu"), **mods)


@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_a_cache_of_eight_bits(dtype, per_head):
    each = batch([2] * 6, with_rows(LENGTHS, 2), 6, 2, 32, dtype=torch.bfloat16)
    few, wide, k_scale, v_scale = quantized(each, dtype, per_head)
    check(
        few, exact=wide, scaled=True, kv_dtype=dtype, mask_mod=causal,
        given=lambda plan: {"k_scale": k_scale, "v_scale": v_scale},
    )  # fmt: skip


def test_single_keys_of_eight_bits():
    each = batch([70, 1, 13, 0], [90, 130, 40, 1], 4, 2, 80, dtype=torch.bfloat16)
    few, wide, k_scale, v_scale = quantized(each, torch.float8_e4m3fn, True)
    check(
        few, exact=wide, scaled=True, page=1, kv_dtype=torch.float8_e4m3fn, mask_mod=causal,
        given=lambda plan: {"k_scale": k_scale, "v_scale": v_scale},
    )  # fmt: skip


@pytest.mark.parametrize("page", [0, 16])
def test_queries_of_e4m3(page):
    """The output is bfloat16, and no weight is rounded to eight bits."""
    lens = with_rows(LENGTHS, 2)
    each = batch([2] * 6, lens, 6, 2, 32, dtype=torch.float8_e4m3fn)
    few, wide, k_scale, v_scale = quantized(each, torch.float8_e4m3fn, True)
    plan = check(
        few, exact=wide, scaled=True, mask_mod=causal, page=page, kv_dtype=torch.float8_e4m3fn,
        given=lambda plan: {"k_scale": k_scale, "v_scale": v_scale},
    )  # fmt: skip
    assert run(plan, few, k_scale=k_scale, v_scale=v_scale)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("kv_dtype", [torch.float8_e5m2, torch.bfloat16])
def test_queries_of_e4m3_want_a_cache_of_it(kv_dtype):
    with pytest.raises(InputError, match="float8_e4m3fn as the cache's"):
        plan_for(batch([1], [9], dtype=torch.float8_e4m3fn), kv_dtype=kv_dtype)


@pytest.mark.parametrize(("D", "Dv"), [(48, 32), (576, 512), (40, 24)])
def test_shared_keys_and_values(D, Dv):
    """MLA: V is the first columns of K, and is read with it."""
    each = batch([2] * 3, [37, 0, 64], 20, 1, D, Dv, dtype=torch.float16)
    for k, v in zip(each.k, each.v, strict=True):
        v.copy_(k[..., :Dv])
    plan = plan_for(each, page=16, config=SMALL, shared_kv=True)
    ready = run(plan, each)
    assert_right(ready, each)


def test_a_window_reads_no_page_before_it():
    """Pages that slid out of the window are gone: their entries in the table name no page."""
    each = batch([1] * 3, [128, 77, 40])
    plan = plan_for(each, page=4, config=SMALL, mask_mod=sliding_window(20))
    for b, n in enumerate(each.kv_lens):
        for x in (each.k[b], each.v[b]):
            x[: max(n - 21, 0)] = torch.nan
    got = run(plan, each)
    for b, n in enumerate(each.kv_lens):
        each.k[b][: max(n - 21, 0)] = each.v[b][: max(n - 21, 0)] = 0.0
    assert_right(got, each, mask_mod=sliding_window(20))


def test_the_default_config_and_one_plan_for_many_batches():
    plan = plan_for(batch([1] * 8, [150] * 8, 6, 2), page=16, score_mod=softcap(20.0))
    for lengths in (LENGTHS, [150], [1, 2], [0, 0, 0], [149] * 8):
        each = batch([1] * len(lengths), lengths, 6, 2)
        assert_right(run(plan, each), each, score_mod=softcap(20.0))
    assert int(plan._count.abs().sum()) == 0
