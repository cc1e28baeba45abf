"""Warp-private serving kernels, interpreted: every cache, mod, and way to merge."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.serving import DecodePlan
from tests import serving
from tests.cases import CASES
from tests.covering import each_choice, pairwise
from tests.serving import assert_right, batch, plan_for, run, with_rows

SMALL = ServingConfig(8, 32, 2, 1, combine="await", split_policy="heads")
LENGTHS = [53, 0, 1, 17, 128, 32]


check = partial(serving.check, config=SMALL, page=16)


def requests(q_len=1, lengths=LENGTHS, Hq=8, Hkv=2, D=64, Dv=None, dtype=torch.bfloat16):
    lengths = with_rows(lengths, q_len)
    return batch([q_len] * len(lengths), lengths, Hq, Hkv, D, Dv, dtype=dtype)


@pytest.mark.oldest
@each_choice(page=[0, 1, 3, 8, 16, 64, 256], layout=["NHD", "HND"])
def test_caches(page, layout):
    check(requests(), page=page, layout=layout)


@pairwise(pieces=[(1, 16), (4, 32), (8, 64)], per_sm=[1, 2, 7], Hkv=[1, 2, 4])
def test_pieces_of_any_size_merge(pieces, per_sm, Hkv):
    warps, own = pieces
    config = replace(SMALL, BLOCK_N=warps * own, num_warps=warps, per_sm=per_sm)
    each = requests(lengths=[53, 0, 1, 170, 128, 96], Hkv=Hkv)
    check(each, config=config, sinks=torch.randn(8))


@each_choice(rows=[(1, 4), (2, 3), (4, 4)], split_policy=["heads", "round"])
def test_who_awaits_a_part_leaves_its_words_empty(rows, split_policy):
    """What one launch left there the next one would take for a part."""
    q_len, group = rows
    tile = 8 if q_len * group <= 8 else 16
    for least, per_sm in ((1, 5), (2, 2)):
        config = replace(
            SMALL, BLOCK_M=tile, split_policy=split_policy, per_sm=per_sm, least=least
        )
        batch_size = 1 if split_policy == "round" else 5
        plan = DecodePlan(
            batch=batch_size, kv_len=200, heads=(2 * group, 2), head_dim=64, q_len=q_len,
            device="cpu", page_size=16, lse=True, config=config, mask_mod=causal,
        )  # fmt: skip
        for lengths in ([117, 0, 33, 200, 1], [1, 199]):
            each = requests(q_len, lengths[-batch_size:], Hq=2 * group)
            assert_right(run(plan, each), each, mask_mod=causal)
            assert bool((plan._workspace.view(torch.int32) == -1).all())


@pytest.mark.parametrize("split_policy", ["heads", "round"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_result_that_is_no_number_is_awaited_too(value, split_policy):
    config = replace(SMALL, split_policy=split_policy, per_sm=7)
    plan = DecodePlan(
        batch=1, kv_len=300, heads=(2, 2), head_dim=64, device="cpu", lse=True, config=config
    )
    each = requests(lengths=[300], Hq=2)
    each.v[0][5] = value
    # All bits set: the word that says that nothing was written is a NaN too.
    each.v[0].view(torch.int16)[200] = -1
    out, lse = run(plan, each)
    assert not out.isfinite().any() and lse.isfinite().all()
    assert bool((plan._workspace.view(torch.int32) == -1).all())


@each_choice(
    dims=[(64, 64), (128, 128), (64, 128), (128, 64)], dtype=[torch.float16, torch.bfloat16]
)
def test_head_dimensions(dims, dtype):
    check(requests(D=dims[0], Dv=dims[1], dtype=dtype), score_mod=softcap(30.0))


@pytest.mark.parametrize(
    ("q_len", "group", "rows"), [(1, 1, 8), (1, 3, 8), (3, 4, 16), (2, 5, 8), (1, 40, 16)]
)
def test_rows(q_len, group, rows):
    each = requests(q_len, Hq=2 * group)
    check(each, config=replace(SMALL, BLOCK_M=rows), mask_mod=causal)


@pytest.mark.parametrize("mask", [causal, sliding_window(9)], ids=["causal", "window"])
def test_windows_skip_pages(mask):
    check(requests(2, [53, 0, 1, 170, 128, 32]), mask_mod=mask, sinks=torch.randn(8))


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_every_mod_of_the_catalogue(entry):
    built = entry.make(4, 3, 1, 128, 128)
    mods = {"score_mod": built.score_mod, "mask_mod": built.mask_mod}
    check(requests(2, [53, 0, 17, 128], 3, 1), page=8, **mods)


@each_choice(keys=[0, 1, 32, 33, 517], page=[0, 3, 16])
def test_tiles_of_one_request_go_round(keys, page):
    """One plan for every length: what lies behind the last key is read, and counts for nothing."""
    config = replace(SMALL, split_policy="round", per_sm=2)
    plan = DecodePlan(
        batch=1, kv_len=600, heads=(6, 2), head_dim=64, device="cpu", page_size=page, lse=True,
        config=config, sinks=True,
    )  # fmt: skip
    each, sinks = requests(lengths=[keys], Hq=6), torch.randn(6)
    for _ in range(2):
        assert_right(run(plan, each, sinks=sinks), each, sinks=sinks)
    # Without a request there is nothing that a first tile could be read for.
    nothing = torch.zeros(0, 1, 6, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, page or 16, 2, 64, dtype=torch.bfloat16)
    call = {"block_table": torch.zeros(0, 3, dtype=torch.int32)} if page else {}
    lens = torch.zeros(0, dtype=torch.int32)
    out, _ = plan.run(nothing, (cache, cache), seq_lens=lens, sinks=sinks, **call)
    assert out.shape == (0, 1, 6, 64)
    assert bool((plan._workspace.view(torch.int32) == -1).all())


@pytest.mark.parametrize("name", ["causal", "tree", "alibi"])
def test_mods_where_tiles_go_round(name):
    entry = next(each for each in CASES if name in str(each)) if name != "alibi" else None
    mods = {"score_mod": alibi(6, "cpu")}
    if entry is not None:
        built = entry.make(1, 6, 2, 517, 517)
        mods = {"score_mod": built.score_mod, "mask_mod": built.mask_mod}
    config = replace(SMALL, split_policy="round", per_sm=2)
    plan = DecodePlan(
        batch=1, kv_len=517, heads=(6, 2), head_dim=64, q_len=2, device="cpu", page_size=16,
        lse=True, config=config, **mods,
    )  # fmt: skip
    each = requests(2, [517], Hq=6)
    assert_right(run(plan, each), each, **mods)


WIDE = replace(SMALL, BLOCK_M=4, BLOCK_N=16)


@pytest.mark.oldest
@pairwise(
    dims=[(256, 256), (256, 128), (128, 256)],
    dtype=[torch.float16, torch.bfloat16],
    tile=[(4, 2, 8), (8, 4, 8), (4, 2, 16)],
    page=[0, 3, 16],
)
def test_rows_of_256_columns(dims, dtype, tile, page):
    """Each row and each key is there twice, once for each half of the columns."""
    height, warps, own = tile
    config = replace(SMALL, BLOCK_M=height, BLOCK_N=warps * own, num_warps=warps, per_sm=7)
    each = requests(lengths=[53, 0, 17], Hq=6, D=dims[0], Dv=dims[1], dtype=dtype)
    check(each, config=config, page=page, score_mod=softcap(30.0), sinks=torch.randn(6))


@each_choice(
    rows=[(1, 1, 4), (1, 4, 4), (3, 3, 4), (1, 5, 8), (2, 4, 8), (3, 3, 8)], ragged=[False, True]
)
def test_few_rows_of_256_columns(rows, ragged):
    """One tile of them, several, and tiles that end within."""
    q_len, group, height = rows
    each = requests(q_len, [53, 0, 17], Hq=2 * group, D=256)
    config, window = replace(WIDE, BLOCK_M=height), sliding_window(9)
    plan = plan_for(each, page=16, config=config, ragged=ragged, mask_mod=window)
    assert_right(run(plan, each), each, mask_mod=window)


def test_one_request_of_256_columns_goes_round():
    config = replace(WIDE, split_policy="round", per_sm=2)
    plan = DecodePlan(
        batch=1, kv_len=300, heads=(4, 2), head_dim=256, device="cpu", page_size=16, lse=True,
        config=config,
    )  # fmt: skip
    for keys in (0, 33, 217):
        each = requests(lengths=[keys], Hq=4, D=256)
        assert_right(run(plan, each), each)
        assert bool((plan._workspace.view(torch.int32) == -1).all())
