"""Faults of a server on a GPU: lengths that change, two streams, memory that runs out.

docs/serving.md says what happens when; pages out of range are in test_serving.py, workers that die
in test_worker.py. Each test is ended by tests/gpu/conftest.py where a launch does not end.
"""

import gc
import math
from dataclasses import replace

import pytest
import torch

from flexattn import flex_attention
from flexattn.catalogue import causal, sliding_window
from flexattn.errors import StalledError
from flexattn.runtime.cuda_launch import CudaLaunch
from flexattn.serving import CascadePlan, DecodePlan, ServingConfig, flex_decode
from flexattn.settings import override
from tests.gpu.faults import little_memory
from tests.serving import MLA, PAIR, assert_right, batch, plan_for, poisoned_pages, run
from tests.support import ON_SM_90, assert_accurate, inputs

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
HEADS, KEYS, PAGE = (32, 8), 8192, 16
SHAPE = {"kv_len": KEYS, "heads": HEADS, "head_dim": 128, "page_size": PAGE}
LAST, LAUNCH = (ServingConfig(16, 64, 4, 3, combine=combine) for combine in ("last", "launch"))
AWAIT = ServingConfig(8, 128, 4, 1, 2, combine="await", split_policy="heads")
ONE = replace(PAIR, num_warps=4, num_stages=3)
DEPENDENT = ServingConfig(64, 64, 4, 3, combine="dependent")
FAR = 1e30  # of the memory around the cache: a value of it would show in any output


def pool_of(pages):
    """K and V of 0.5 within memory of FAR; the whole of it, and the cache."""
    whole = [torch.full((pages + 64, PAGE, HEADS[1], 128), FAR, **BF16) for _ in "kv"]
    return whole, tuple(each[32 : 32 + pages].fill_(0.5) for each in whole)


def assert_near(out, turn):
    """Nothing of the memory around the cache was read; looked at in every twentieth turn."""
    worst = out.nan_to_num(0.0, 0.0, 0.0).abs().amax()
    if turn % 20 == 0:
        assert worst.item() < 1e3


def assert_untouched(whole):
    """Nothing was written around the cache."""
    for each in whole:
        assert (each[:32] == FAR).all() and (each[-32:] == FAR).all()


def run_disturbed(plan, cache, page):
    """200 runs, while another stream writes lengths and page ids, wild ones among them."""
    m = plan.problem
    wild = [0, 1, 17, 4096, KEYS, KEYS + 1, 10**6, -5, 2**31 - 1]
    q = torch.randn(m.B, 1, m.Hq, m.head_dim_qk, **BF16)
    out = q.new_zeros(m.B, 1, m.Hq, m.head_dim_v)  # whose rows a merge may not find
    draw = torch.Generator().manual_seed(1)
    picks = torch.randint(0, len(wild), (64, m.B), generator=draw)
    lengths = torch.tensor(wild, dtype=torch.int64)[picks].to("cuda", torch.int32)
    shape = (8, m.B, KEYS // page)
    tables = torch.randint(-(2**31), 2**31 - 1, shape, device="cuda").int()
    lens, table = lengths[0].clone(), tables[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with override(check=False):
        for turn in range(200):
            with torch.cuda.stream(side):
                for step in range(8):
                    lens.copy_(lengths[(8 * turn + step) % 64])
                    table.copy_(tables[step])
            plan.run(q, cache, seq_lens=lens, block_table=table, out=out)
            assert_near(out, turn)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("config", "B", "mods"),
    [
        (LAST, 64, {}),
        (LAUNCH, 64, {}),
        (LAST, 64, {"mask_mod": sliding_window(700)}),
        (LAST, 8, {}),
        (LAUNCH, 1, {}),
        (DEPENDENT, 16, {}),
        (DEPENDENT, 1, {}),
        pytest.param(PAIR, 16, {}, marks=ON_SM_90),
        pytest.param(PAIR, 1, {}, marks=ON_SM_90),
        pytest.param(PAIR, 64, {"mask_mod": sliding_window(700)}, marks=ON_SM_90),
        pytest.param(ONE, 64, {}, marks=ON_SM_90),
    ],
    ids=[
        "last",
        "launch",
        "window",
        "8 requests",
        "1 request",
        "dependent",
        "dependent, 1 request",
        "warp-specialised",
        "warp-specialised, 1 request",
        "warp-specialised, window",
        "warp-specialised, one warpgroup",
    ],
)
def test_lengths_and_tables_that_another_stream_changes_under_launches(config, B, mods):
    """Launches end, and read nothing outside of the cache; then a new plan is right."""
    whole, pool = pool_of(2048)
    plan = DecodePlan(batch=B, config=config, **SHAPE, **mods)
    run_disturbed(plan, pool, PAGE)
    assert_untouched(whole)
    each = batch([1] * 7, [2047, 0, 1, 517, 4096, 33, 128], *HEADS, 128, **BF16)
    assert_right(run(plan_for(each, page=PAGE, config=config, **mods), each), each, **mods)


@ON_SM_90
@pytest.mark.parametrize(("B", "heads"), [(64, 16), (5, 128), (1, 16)])
def test_lengths_that_another_stream_changes_under_latent_keys(B, heads):
    """Who loads keys and who multiplies them read them apart, and one waited for ever."""
    whole = torch.full((576, 64, 1, 576), FAR, **BF16)
    cache = whole[32:-32].fill_(0.5)
    about = {"heads": (heads, 1), "head_dim": (576, 512), "page_size": 64, "shared_kv": True}
    run_disturbed(DecodePlan(batch=B, kv_len=KEYS, config=MLA, **about), cache, 64)
    assert_untouched([whole])
    each = batch([1] * 7, [2047, 0, 1, 517, 4096, 33, 128], heads, 1, 576, 512, **BF16)
    each = replace(each, v=[x[..., :512] for x in each.k])
    assert_right(run(plan_for(each, page=64, config=MLA, shared_kv=True), each), each)


@pytest.mark.parametrize(
    ("config", "B"),
    [(LAST, 64), (LAUNCH, 64), (LAST, 8), (LAUNCH, 1)],
    ids=["last", "launch", "8 requests", "1 request"],
)
def test_rows_that_another_stream_changes_under_launches(config, B):
    """Rows of requests overlap, fall and lie outside of q while programs look for theirs."""
    rows = 512
    whole, pool = pool_of(2048)
    plan = DecodePlan(batch=B, config=config, total_q=rows, mask_mod=causal, **SHAPE)
    q = torch.randn(rows, HEADS[0], 128, **BF16)
    draw = torch.Generator("cuda").manual_seed(1)
    lengths, ends, tables = (
        torch.randint(low, high, (64, *shape), generator=draw, device="cuda").int()
        for low, high, shape in (
            (-5, KEYS + 5, (B,)), (-50, rows + 50, (B + 1,)), (0, 2048, (B, KEYS // PAGE)),
        )
    )  # fmt: skip
    lens, cu, side = lengths[0].clone(), ends[0].clone(), torch.cuda.Stream()
    call = {"seq_lens": lens, "block_table": tables[0], "cu_seqlens_q": cu}
    call["out"] = torch.zeros_like(q)  # of rows that no request has, nothing is written
    side.wait_stream(torch.cuda.current_stream())
    with override(check=False):
        for turn in range(100):
            with torch.cuda.stream(side):
                for step in range(8):
                    lens.copy_(lengths[(8 * turn + step) % 64])
                    cu.copy_(ends[(8 * turn + step) % 64])
            out = plan.run(q, pool, **call)
            assert_near(out, turn)
    torch.cuda.synchronize()
    assert_untouched(whole)
    each = batch([1, 9, 40], [517, 4096, 40], *HEADS, 128, **BF16)
    other = plan_for(each, page=PAGE, ragged=True, config=config, mask_mod=causal)
    assert_right(run(other, each), each, mask_mod=causal)


def test_awaited_parts_under_lengths_that_change():
    """Who waits for a part that nobody leaves gives up, and the next run says so."""
    B, turns, stalls = 64, 0, 0
    _, pool = pool_of(2048)
    q = torch.randn(B, 1, HEADS[0], 128, **BF16)
    draw = torch.Generator("cuda").manual_seed(1)
    lengths = torch.randint(0, KEYS, (64, B), generator=draw, device="cuda").int()
    table = torch.randint(0, 2048, (B, KEYS // PAGE), generator=draw, device="cuda").int()
    lens, side = lengths[0].clone(), torch.cuda.Stream()
    plan = DecodePlan(batch=B, config=AWAIT, **SHAPE)
    side.wait_stream(torch.cuda.current_stream())
    with override(check=False):
        while turns < 300 and stalls < 3:
            turns += 1
            with torch.cuda.stream(side):
                for step in range(8):
                    lens.copy_(lengths[(8 * turns + step) % 64])
            try:
                plan.run(q, pool, seq_lens=lens, block_table=table)
                torch.cuda.synchronize()
            except StalledError:
                stalls += 1
                plan = DecodePlan(batch=B, config=AWAIT, **SHAPE)
    each = batch([1] * 7, [2047, 0, 1, 517, 4096, 33, 128], *HEADS, 128, **BF16)
    assert_right(run(plan_for(each, page=PAGE, config=AWAIT), each), each)


def test_checked_mode_launches_what_it_looked_at(monkeypatch):
    """A kernel that waits in between, and then writes: the launch reads copies."""
    each = batch([1] * 5, [2047, 1, 517, 4096, 33], *HEADS, 128, **BF16)
    plan = plan_for(each, page=PAGE, config=AWAIT)
    cache, table = poisoned_pages(each, PAGE)
    lens = each.numbers(each.kv_lens)
    call = {"seq_lens": lens, "block_table": table}
    wanted = [x.clone() for x in plan.run(each.q[:, None], cache, **call)]
    side, launch = torch.cuda.Stream(), CudaLaunch.launch

    def late(*given):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            lens.fill_(2**31 - 1)
        side.synchronize()
        launch(*given)

    monkeypatch.setattr(CudaLaunch, "launch", late)
    with override(check=True):
        got = plan.run(each.q[:, None], cache, **call)
    assert all(map(torch.equal, got, wanted)) and (lens == 2**31 - 1).all()


def served(B, seed):
    """Inputs of one step, and what a plan of its own says of them."""
    draw = torch.Generator("cuda").manual_seed(seed)
    pool = [torch.randn(1024, PAGE, HEADS[1], 128, generator=draw, **BF16) for _ in "kv"]
    table = torch.randint(0, 1024, (B, KEYS // PAGE), generator=draw, device="cuda").int()
    lens = torch.randint(1, KEYS, (B,), generator=draw, device="cuda").int()
    q = torch.randn(B, 1, HEADS[0], 128, generator=draw, **BF16)
    return (q, tuple(pool)), {"seq_lens": lens, "block_table": table}


@pytest.mark.parametrize(
    "config",
    [LAST, LAUNCH, AWAIT, DEPENDENT, pytest.param(ONE, marks=ON_SM_90)],
    ids=["last", "launch", "await", "dependent", "warp-specialised"],
)
def test_runs_on_two_streams_follow_one_another(config):
    """Workspace, counters and outputs are the plan's: side by side they would be mixed up."""
    B = 16
    plan, other = (DecodePlan(batch=B, config=config, **SHAPE) for _ in "ab")
    steps = [served(B, seed) for seed in (1, 2)]
    with override(check=False):
        wanted = [other.run(*args, **call).clone() for args, call in steps]
        torch.cuda.synchronize()
        streams, wrong = [torch.cuda.Stream() for _ in "ab"], []
        for turn in range(400):
            which = turn % 2
            args, call = steps[which]
            with torch.cuda.stream(streams[which]):
                got = plan.run(*args, **call)
                wrong.append((got != wanted[which]).any())
        torch.cuda.synchronize()
        assert not torch.stack(wrong).any()


def test_a_graph_is_captured_and_replayed_on_other_streams():
    """As torch's recipe has it: a warm-up on a side stream, a capture on its own, any replays."""
    B = 16
    plan = DecodePlan(batch=B, config=AWAIT, **SHAPE)
    args, call = served(B, 3)
    with override(check=False):
        wanted = plan.run(*args, **call).clone()
        side, replays = torch.cuda.Stream(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            plan.run(*args, **call)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = plan.run(*args, **call)
        for stream in (replays, torch.cuda.current_stream(), side):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got.fill_(math.nan)
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(got, wanted)
            assert torch.equal(plan.run(*args, **call), wanted)


@pytest.mark.parametrize("length", [KEYS - 1, 700])
def test_graphs_that_capture_flex_decode(length):
    """The second is replayed first: what the first one fills is not there yet."""
    (q, pool), call = served(16, 4)
    call["seq_lens"].fill_(length)
    graphs, found = [], []
    with override(check=False):
        wanted = flex_decode(q, pool, **call)
        torch.cuda.synchronize()
        for _ in "ab":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found.append([flex_decode(q, pool, **call) for _ in "xy"])
            graphs.append(graph)
    for _ in range(3):
        for graph, outputs in zip(graphs[::-1], found[::-1], strict=True):
            for out in outputs:
                out.fill_(math.nan)
            graph.replay()
            assert all(torch.equal(out, wanted) for out in outputs)


def test_a_cascade_on_two_streams():
    B, prefix = 8, 2048
    about = {"heads": HEADS, "head_dim": 128, "page_size": PAGE, "mask_mod": causal}
    plan, other = (CascadePlan(batch=B, prefix_len=prefix, own_len=4096, **about) for _ in "ab")
    steps = []
    for seed in (1, 2):
        (q, pool), call = served(B, seed)
        start = torch.full((B,), prefix, dtype=torch.int32, device="cuda")
        table = call["block_table"]
        call = {
            "prefix_len": start[:1].clone(), "kv_start": start,
            "block_table": table[:, :256].clone(),
            "seq_lens": prefix + call["seq_lens"] % 4096 + 1, "prefix_table": table[:1].clone(),
        }  # fmt: skip
        steps.append(((q, pool), call))
    with override(check=False):
        wanted = [[x.clone() for x in other.run(*args, **call)] for args, call in steps]
        torch.cuda.synchronize()
        streams, wrong = [torch.cuda.Stream() for _ in "ab"], []
        for turn in range(300):
            which = turn % 2
            args, call = steps[which]
            with torch.cuda.stream(streams[which]):
                for got, right in zip(plan.run(*args, **call), wanted[which], strict=True):
                    wrong.append((got != right).any())
        torch.cuda.synchronize()
        assert not torch.stack(wrong).any()


def test_memory_that_runs_out_while_a_plan_is_made_or_a_call_runs():
    """By the allocator's own limit: nothing stays, and what was there goes on."""
    each = batch([1] * 5, [2047, 1, 517, 4096, 33], *HEADS, 128, **BF16)
    first = plan_for(each, page=PAGE)
    large = {"batch": 2048, "q_len": 16, "config": LAST, **SHAPE}  # 256 MiB of outputs
    q, k, v = inputs(2, 32, 8, 511, 777, 128, **BF16)
    long = torch.randn(1, 32, 2**16, 128, **BF16)  # 512 MiB, and so is its output
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with little_memory():
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                DecodePlan(**large)
            with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
                flex_attention(long, k[:1], v[:1], enable_gqa=True)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    assert_right(run(first, each), each)
    assert_accurate(q, k, v)
    assert DecodePlan(**large).config == LAST
