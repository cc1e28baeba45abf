"""Serving on a GPU: caches, mods, graphs that serve every later batch, no reads out of bounds."""

import math
import re
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

import flexattn.serving.plan as plans
from flexattn.catalogue import alibi, causal, document, sliding_window, softcap
from flexattn.errors import StalledError
from flexattn.kernels.base.source import digest_of
from flexattn.kernels.paged_decode import family
from flexattn.runtime.build import builder
from flexattn.serving import (
    CascadePlan,
    DecodePlan,
    ServingConfig,
    flex_decode,
    merge_states,
)
from flexattn.settings import override
from flexattn.util.locks import Lru
from tests import serving
from tests.serving import (
    EIGHT_BITS,
    assert_right,
    batch,
    plan_for,
    poisoned_cache,
    poisoned_pages,
    quantized,
    run,
    with_rows,
)
from tests.support import DTYPES

pytestmark = pytest.mark.usefixtures("poisoned")
LENGTHS = [2047, 0, 1, 517, 4096, 33, 128]
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
check = partial(serving.check, page=16, runs=2)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [0, 1, 3, 16, 64, 256])
def test_caches(page, layout, together):
    each = batch([1] * 7, LENGTHS, 32, 8, 128, **BF16)
    check(each, page=page, layout=layout, together=together)


@pytest.mark.parametrize("combine", ["last", "launch", "dependent"])
@pytest.mark.parametrize(
    "numbers", [(16, 64, 4, 3, 1), (16, 128, 4, 2, 2), (64, 64, 4, 3, 1), (16, 32, 8, 3, 4, 3)]
)
def test_configs(numbers, combine):
    config = ServingConfig(*numbers, combine=combine)
    each = batch([1] * 7, LENGTHS, 32, 8, 128, **BF16)
    check(each, config=config, score_mod=softcap(30.0))
    each = batch([1], [131_071], 8, 1, 128, **BF16)
    check(each, config=config, sinks=torch.randn(8, device="cuda"))


@pytest.mark.parametrize("numbers", [(8, 64, 4, 1, 3), (8, 64, 2, 1, 4), (16, 128, 8, 1, 1, 3)])
def test_warps_that_walk_alone(numbers):
    config = ServingConfig(*numbers, combine="await", split_policy="heads")
    q_len = numbers[0] // 8
    for page in (0, 3, 16, 64):
        each = batch([q_len] * 7, with_rows(LENGTHS, q_len), 32, 8, 128, **BF16)
        check(
            each, config=config, page=page, score_mod=softcap(30.0), mask_mod=sliding_window(700)
        )
    each = batch([q_len], [131_071], 8, 1, 64, dtype=torch.float16, device="cuda")
    check(each, config=config, sinks=torch.randn(8, device="cuda"))


@pytest.mark.parametrize("numbers", [(4, 32, 4), (4, 32, 2), (4, 128, 8), (8, 32, 4), (8, 64, 8)])
def test_heads_of_256_columns(numbers):
    """Each row and key there twice, once for each half of the columns."""
    per_sm = 8 // numbers[2]
    config = ServingConfig(*numbers, 1, per_sm, combine="await", split_policy="heads")
    q_len = numbers[0] // 4
    for page in (0, 3, 16, 64):
        each = batch([q_len] * 7, with_rows(LENGTHS, q_len), 16, 4, 256, **BF16)
        check(
            each, config=config, page=page, score_mod=softcap(30.0), mask_mod=sliding_window(700)
        )
    each = batch([q_len], [131_071], 3, 1, 256, dtype=torch.float16, device="cuda")
    check(each, config=config, sinks=torch.randn(3, device="cuda"))
    each = batch([q_len] * 7, with_rows(LENGTHS, q_len), 8, 4, 256, 128, **BF16)
    check(each, config=config, page=16)


@pytest.mark.parametrize(
    ("heads", "q_len"), [((8, 4), 1), ((8, 4), 2), ((16, 2), 1), ((16, 2), 2), ((16, 2), 4)]
)
def test_defaults_of_256_columns(heads, q_len):
    for page in (0, 16):
        each = batch([q_len] * 7, with_rows(LENGTHS, q_len), *heads, 256, **BF16)
        check(each, page=page, mask_mod=causal)
        check(batch([q_len], [8191], *heads, 256, **BF16), page=page)
    few, wide, k_scale, v_scale = quantized(each, torch.float8_e4m3fn, per_head=True)
    plan = plan_for(few, page=16, kv_dtype=torch.float8_e4m3fn, scaled=True)
    assert_right(run(plan, few, k_scale=k_scale, v_scale=v_scale), few, exact=wide)


@pytest.mark.parametrize(
    ("heads", "D"), [((71, 1), 64), ((48, 1), 128), ((64, 4), 128), ((40, 40), 128)]
)
def test_defaults_of_many_rows_or_heads(heads, D):
    """Tiles of 16 rows, several of a request where L2 holds the keys, or half as many warps."""
    each = batch([1] * 7, LENGTHS, *heads, D, **BF16)
    for page in (1, 16):
        check(each, page=page)
    check(batch([1], [4161], *heads, D, **BF16), sinks=torch.randn(heads[0], device="cuda"))


@pytest.mark.parametrize("page", [0, 3, 16])
def test_tiles_of_one_request_go_round(page):
    """One plan for every length: what lies behind the last key is read, and counts for nothing."""
    config = ServingConfig(8, 128, 8, 1, 1, combine="await", split_policy="round")
    plan = DecodePlan(
        batch=1, kv_len=5000, heads=(32, 8), head_dim=128, page_size=page, lse=True, config=config
    )
    for keys in (0, 1, 127, 128, 129, 1024, 4097, 5000):
        each = batch([1], [keys], 32, 8, 128, **BF16)
        for _ in range(2):
            assert_right(run(plan, each), each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 5, 8, 40])
def test_any_number_of_query_heads_per_key_head(group, dtype):
    each = batch(
        [3] * 7, with_rows(LENGTHS, 3), 2 * group, 2, 64, dtype=DTYPES[dtype], device="cuda"
    )
    check(each, mask_mod=causal, score_mod=alibi(2 * group, "cuda"))


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (80, 80), (192, 128), (256, 256)])
def test_head_dimensions(D, Dv):
    check(batch([16] * 7, with_rows(LENGTHS, 16), 8, 2, D, Dv, **BF16), mask_mod=causal)


@pytest.mark.parametrize("name", ["window", "document", "alibi", "sinks"])
def test_mods(name):
    ids = (torch.arange(8192, device="cuda") // 300).int()
    mods = {
        "window": {"mask_mod": sliding_window(300)},
        "document": {"mask_mod": document(ids)},
        "alibi": {"score_mod": alibi(32, "cuda")},
        "sinks": {"sinks": torch.randn(32, device="cuda")},
    }[name]
    check(batch([4] * 7, with_rows(LENGTHS, 4), 32, 8, 128, **BF16), **mods)


def test_a_mixed_batch_of_chunks_and_single_tokens():
    each = batch([512, 1, 0, 1, 129, 3], [2048, 4096, 9, 1, 129, 0], 32, 8, 128, **BF16)
    check(each, mask_mod=causal)
    check(each, page=0, mask_mod=sliding_window(100), score_mod=softcap(20.0))


@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_a_cache_of_eight_bits(dtype, per_head):
    each = batch([1] * 7, LENGTHS, 32, 8, 128, **BF16)
    few, wide, k_scale, v_scale = quantized(each, dtype, per_head)
    check(
        few, exact=wide, scaled=True, kv_dtype=dtype, score_mod=softcap(30.0),
        given=lambda plan: {"k_scale": k_scale, "v_scale": v_scale},
    )  # fmt: skip


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("heads", [16, 128])
def test_shared_keys_and_values(heads, q_len):
    each = batch([q_len] * 4, [1027, 0, 64, 5000], heads, 1, 576, 512, **BF16)
    for k, v in zip(each.k, each.v, strict=True):
        v.copy_(k[..., :512])
    assert_right(run(plan_for(each, page=64, shared_kv=True), each), each)


def test_one_captured_graph_serves_every_later_batch(monkeypatch):
    """Lengths, tables and tensors change in place; nothing is compiled or allocated by a run."""
    B, page, mods = 8, 16, {"mask_mod": sliding_window(3000), "score_mod": alibi(32, "cuda")}
    plan = DecodePlan(
        batch=B, kv_len=8192, heads=(32, 8), head_dim=128, page_size=page, lse=True, **mods
    )
    pages = 2 * B * 512
    pool = [torch.full((pages, page, 8, 128), math.nan, **BF16) for _ in "kv"]
    q = torch.zeros(B, 1, 32, 128, **BF16)
    lens = torch.zeros(B, dtype=torch.int32, device="cuda")
    table = torch.zeros(B, 512, dtype=torch.int32, device="cuda")
    call = {"seq_lens": lens, "block_table": table}
    before = builder().compiled

    def refused(*args, **kwargs):
        raise AssertionError("a run compiles and allocates nothing")

    monkeypatch.setattr(plans, "build", refused)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with override(check=False):
        plan.run(q, tuple(pool), **call)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = plan.run(q, tuple(pool), **call)
    # Checking a batch compiles the kernels of its oracle's masks; a replay can compile nothing.
    assert builder().compiled == before
    for lengths in ([1] * B, [8192] * B, [0] * B, [8192, 0, 1, 17, 2048, 5000, 333, 4096]):
        each = batch([1] * B, lengths, 32, 8, 128, **BF16)
        made, where = poisoned_pages(each, page, spare=0)
        used = made[0].shape[0]
        for memory, source in zip(pool, made, strict=True):
            memory.fill_(math.nan)
            memory[:used] = source
        q.copy_(each.q[:, None])
        lens.copy_(each.numbers(lengths))
        table.fill_(-1)
        table[:, : where.shape[1]] = where
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        assert_right([x.flatten(0, 1) for x in got], each, **mods)


def test_what_a_batch_may_not_hold_reads_no_other_memory():
    """Lengths, pages and offsets out of range are clamped: NaN around the cache stays there."""
    memory = torch.full((96, 16, 2, 64), math.nan, **BF16)
    pool = memory[32:64].fill_(0.5)
    huge = torch.tensor([2**31 - 1, -5, 10**6, 77], dtype=torch.int32, device="cuda")
    wild = torch.randint(-(2**31), 2**31 - 1, (4, 4), dtype=torch.int64, device="cuda").int()
    plan = DecodePlan(batch=4, kv_len=200, heads=(8, 2), head_dim=64, page_size=16)
    mixed = DecodePlan(
        batch=4, total_q=9, kv_len=200, heads=(8, 2), head_dim=64, page_size=16, mask_mod=causal
    )
    q = torch.randn(4, 1, 8, 64, **BF16)
    with override(check=False):
        out = plan.run(q, (pool, pool), seq_lens=huge, block_table=wild)
        assert out.isfinite().all()
        for ends in ([0, 3, -7, 10**9, 4], [2**31 - 1, 5, 4, 3, -1]):
            cut = torch.tensor(ends, dtype=torch.int32, device="cuda")
            mixed.run(
                q.repeat(3, 1, 1, 1)[:9, 0], (pool, pool), seq_lens=huge, block_table=wild,
                cu_seqlens_q=cut,
            )  # fmt: skip
    torch.cuda.synchronize()
    assert memory[:32].isnan().all() and memory[64:].isnan().all()


def test_states_merge_and_flex_decode():
    each = batch([1] * 7, LENGTHS, 32, 8, 128, **BF16)
    cache = poisoned_cache(each, 4096)
    q, lens = each.q[:, None], each.numbers(LENGTHS)
    got = flex_decode(q, cache, seq_lens=lens, return_lse=True)
    assert_right([x.flatten(0, 1) for x in got], each)
    nothing = torch.full_like(got[0], math.nan), torch.full_like(got[1], -math.inf)
    for x, y in zip(merge_states(*got, *nothing), got, strict=True):
        torch.testing.assert_close(x, y)


CASCADES = {
    "few rows": (1001, [256, 1, 77, 300], None),
    "several tiles of rows": (3001, [1 + 13 * b % 200 for b in range(37)], None),
    "whole units": (70, [256, 1, 77, 300], ServingConfig(16, 64, 4, 2, 1, 100, "launch")),
    "merged by who finishes last": (1001, [256, 1, 77, 300], ServingConfig(16, 64, 4, 2)),
}


@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade(name):
    (prefix, own, config), Hq, Hkv = CASCADES[name], 32, 8
    count = len(own)
    lengths = [prefix + n for n in own]
    each = batch([1] * count, lengths, Hq, Hkv, 128, **BF16)
    split = batch([1] * (count + 1), [*own, prefix], Hq, Hkv, 128, **BF16)
    for side in ("k", "v"):
        source = getattr(each, side)
        for b in range(count):
            source[b][:prefix] = source[0][:prefix]
            getattr(split, side)[b] = source[b][prefix:]
        getattr(split, side)[count] = source[0][:prefix]
    plan = CascadePlan(
        batch=count, prefix_len=4096, own_len=512, heads=(Hq, Hkv), head_dim=128, page_size=16,
        mask_mod=causal, prefix_config=config,
    )  # fmt: skip
    cache, table = poisoned_pages(split, 16)
    q = each.q[:, None].clone()
    call = {
        "prefix_len": each.numbers([prefix]), "seq_lens": each.numbers(lengths),
        "kv_start": each.numbers([prefix] * count), "prefix_table": table[count:].contiguous(),
        "block_table": table[:count].contiguous(),
    }  # fmt: skip
    got = plan.run(q, cache, **call)
    assert_right([x.flatten(0, 1) for x in got], each, mask_mod=causal)
    # Captured, the pass that runs beside the other is a branch that begins and ends with it.
    graph = torch.cuda.CUDAGraph()
    q.zero_()
    with torch.cuda.graph(graph):
        got = plan.run(q, cache, **call)
    for _ in range(3):
        q.copy_(each.q[:, None])
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        assert_right([x.flatten(0, 1) for x in got], each, mask_mod=causal)
        q.zero_()


def test_who_waits_in_vain_gives_up_and_the_next_run_says_so(monkeypatch):
    """Parts that are never stored, as where lengths change under a launch."""
    render = family.render_serving

    def never_stored(*given):
        source = render(*given)
        text = re.sub(
            r"setp\.ne\.s32 wanted, (\$\d+), 0;", r"setp.eq.s32 wanted, \1, 2;", source.text
        )
        assert text != source.text
        source = replace(source, text=text)
        return replace(source, hash=digest_of(source))

    monkeypatch.setattr(family, "render_serving", never_stored)
    monkeypatch.setattr(builder(), "rendered", Lru(64))
    each = batch([1], [8192], 32, 8, 128, **BF16)
    config = ServingConfig(8, 128, 4, 1, 2, combine="await", split_policy="heads")
    plan = plan_for(each, config=config)
    began = time.monotonic()
    out, _ = run(plan, each)
    torch.cuda.synchronize()
    assert time.monotonic() - began < 30 and out.isnan().any()
    with pytest.raises(StalledError, match="waited in vain"):
        run(plan, each)
    monkeypatch.undo()
    assert_right(run(plan_for(each, config=config), each), each)
