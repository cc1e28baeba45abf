"""Parts that are their own flag, on a GPU: no word of one launch is taken for one of the next."""

import pytest
import torch

from flexattn.catalogue import softcap
from flexattn.serving import DecodePlan, ServingConfig
from tests.serving import assert_right, batch, plan_for, poisoned_pages, run

pytestmark = pytest.mark.usefixtures("poisoned")
CONFIGS = {
    "heads": ServingConfig(8, 64, 4, 1, 2, 1, "await", "heads"),
    "default": ServingConfig(8, 128, 4, 1, 2, 1, "await", "heads"),
    "one warp": ServingConfig(8, 32, 1, 1, 8, 1, "await", "heads"),
    "two warps": ServingConfig(8, 64, 2, 1, 4, 2, "await", "heads"),
    "round": ServingConfig(8, 128, 8, 1, 1, 1, "await", "round"),
    "round, 4 warps": ServingConfig(8, 64, 4, 1, 2, 1, "await", "round"),
}
HEADS, BF16 = (32, 8), {"dtype": torch.bfloat16, "device": "cuda"}


def empty(plan):
    """Whether the workspace is as the next launch must find it."""
    torch.cuda.synchronize()
    return bool((plan._workspace.view(torch.int32) == -1).all())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "D"), [(torch.float16, 64), (torch.bfloat16, 128)])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_rows_and_dtypes(group, dtype, D, name):
    lengths = [30_011] if "round" in name else [2047, 0, 1, 517, 9001, 33, 128]
    each = batch([1] * len(lengths), lengths, 8 * group, 8, D, dtype=dtype, device="cuda")
    sinks = torch.randn(8 * group, device="cuda")
    plan = DecodePlan(
        batch=len(lengths), kv_len=32_768, heads=(8 * group, 8), head_dim=D, page_size=16,
        dtype=dtype, lse=True, sinks=True, score_mod=softcap(30.0), config=CONFIGS[name],
    )  # fmt: skip
    for _ in range(3):
        got = run(plan, each, sinks=sinks)
        assert_right(got, each, sinks=sinks, score_mod=softcap(30.0))
        assert empty(plan)


@pytest.mark.parametrize(
    ("group", "D", "config"),
    [
        (1, 128, ServingConfig(8, 64, 2, 1, 4, 1, "await", "heads")),
        (1, 64, ServingConfig(8, 128, 8, 1, 1, 1, "await", "heads")),
        (2, 64, ServingConfig(8, 128, 8, 1, 1, 1, "await", "round")),
        (4, 128, ServingConfig(8, 128, 8, 1, 1, 1, "await", "round")),
    ],
    ids=str,
)
def test_a_word_is_stored_once(group, D, config):
    """Threads of several warps hold a row's weight, and each of them stored it.

    A store could land after the program that merges had read the first one and left the word
    EMPTY: once in thousands of launches a word was left, which the next launch took for its own.
    """
    lengths = [30_011] if config.split_policy == "round" else [2047, 517, 9001, 33]
    each = batch([1] * len(lengths), lengths, 8 * group, 8, D, **BF16)
    plan = DecodePlan(
        batch=len(lengths), kv_len=32_768, heads=(8 * group, 8), head_dim=D, page_size=16,
        config=config,
    )  # fmt: skip
    cache, table = poisoned_pages(each, 16)
    q, lens = each.q[:, None], each.numbers(lengths)
    wanted = plan.run(q, cache, seq_lens=lens, block_table=table).clone()
    left = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(2000):
        got = plan.run(q, cache, seq_lens=lens, block_table=table)
        left |= (plan._workspace.view(torch.int32) != -1).any() | (got != wanted).any()
    assert not left


def test_sixteen_rows():
    config = ServingConfig(16, 64, 4, 1, 2, 1, "await", "heads")
    for q_len in (3, 4):
        each = batch([q_len] * 5, [2047, 9, 1, 9001, 33], *HEADS, 128, **BF16)
        plan = plan_for(each, page=16, config=config)
        assert_right(run(plan, each), each)
        assert empty(plan)


def inputs(B, keys, seed=0):
    """A pool of pages that any table may name, and what a graph reads: q, lengths, table."""
    draw = torch.Generator("cuda").manual_seed(seed)
    pool = [torch.randn(4096, 16, 8, 128, generator=draw, **BF16) for _ in "kv"]
    q = torch.randn(B, 1, 32, 128, generator=draw, **BF16)
    table = torch.randint(0, 4096, (B, keys // 16), generator=draw, device="cuda").int()
    return q, pool, torch.zeros(B, dtype=torch.int32, device="cuda"), table


@pytest.mark.parametrize("name", ["heads", "default", "two warps"])
def test_replays_of_one_graph_under_changing_lengths(name):
    """Each replay equals, bit for bit, what a plan that has never run says of the same lengths."""
    B, keys = 16, 4096
    q, pool, lens, table = inputs(B, keys)
    call = {"seq_lens": lens, "block_table": table}
    about = {"batch": B, "kv_len": keys, "heads": HEADS, "head_dim": 128, "page_size": 16}
    plan, other = (DecodePlan(**about, config=CONFIGS[name], lse=True) for _ in "ab")
    plan.run(q, tuple(pool), **call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = plan.run(q, tuple(pool), **call)
        # Two plans by turns, and each twice: every launch finds the words of another one's.
        again = other.run(q, tuple(pool), **call)
        plan.run(q, tuple(pool), **call)
        other.run(q, tuple(pool), **call)
    draw = torch.Generator().manual_seed(7)
    for turn in range(300):
        few = torch.randint(0, keys + 1, (B,), generator=draw)
        if turn % 3 == 0:
            few = few // 64 * (torch.rand(B, generator=draw) < 0.9)
        if turn % 7 == 0:
            few[torch.randint(0, B, (1,), generator=draw)] = keys
        lens.copy_(few.int())
        for x in (*got, *again):
            x.fill_(torch.nan)
        graph.replay()
        for x, y in zip(got, again, strict=True):
            assert torch.equal(x, y), f"replay {turn}: {few.tolist()}"
        if turn % 50 == 0:
            fresh = DecodePlan(**about, config=CONFIGS[name], lse=True)
            for x, y in zip(got, fresh.run(q, tuple(pool), **call), strict=True):
                assert torch.equal(x, y), f"replay {turn}: {few.tolist()}"
            assert bool(got[0].isfinite().all())
    assert empty(plan) and empty(other)


@pytest.mark.parametrize("name", ["round", "round, 4 warps"])
def test_replays_of_one_request(name):
    keys = 32_768
    q, pool, lens, table = inputs(1, keys)
    call = {"seq_lens": lens, "block_table": table}
    about = {"batch": 1, "kv_len": keys, "heads": HEADS, "head_dim": 128, "page_size": 16}
    plan = DecodePlan(**about, config=CONFIGS[name])
    launched = DecodePlan(**about, config=ServingConfig(16, 64, 4, 3, combine="launch"))
    torch.cuda.synchronize()
    plan.run(q, tuple(pool), **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = plan.run(q, tuple(pool), **call)
    for length in [*range(0, 2200, 37), keys, 1, keys - 1, 129, 16_000]:
        lens.fill_(length)
        got.fill_(torch.nan)
        graph.replay()
        wanted = launched.run(q, tuple(pool), **call).float()
        # Outputs of many keys are small: a part that is missing shows beside the largest of them.
        far = 0.02 * wanted.abs().max().item()
        torch.testing.assert_close(got.float(), wanted, atol=far, rtol=0)
    assert empty(plan)


@pytest.mark.parametrize("name", ["heads", "default", "round"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_results_that_are_no_numbers_are_awaited_too(value, name):
    """In V, and in K, where they make scores and weights that are none."""
    for tensor in "kv":
        each = batch([1], [20_001], *HEADS, 128, **BF16)
        plan = DecodePlan(
            batch=1, kv_len=20_001, heads=HEADS, head_dim=128, page_size=16, lse=True,
            config=CONFIGS[name],
        )  # fmt: skip
        getattr(each, tensor)[0][7777] = value
        # The word that says that nothing was written is a NaN too.
        each.v[0].view(torch.int16)[11_111] = -1
        out, _ = run(plan, each)
        torch.cuda.synchronize()
        assert not out.isfinite().all()
        assert empty(plan)


def test_a_batch_beside_another_kernel():
    """Blocks that wait hold their place on an SM: those they wait for began before them."""
    B, keys = 64, 4096
    q, pool, lens, table = inputs(B, keys)
    lens.fill_(keys)
    call = {"seq_lens": lens, "block_table": table}
    plan = DecodePlan(
        batch=B, kv_len=keys, heads=HEADS, head_dim=128, page_size=16, config=CONFIGS["heads"]
    )
    wanted = plan.run(q, tuple(pool), **call).clone()
    side, big = torch.cuda.Stream(), torch.randn(4096, 4096, **BF16)
    for _ in range(20):
        with torch.cuda.stream(side):
            big = (big @ big).clamp(-1, 1)
        assert torch.equal(plan.run(q, tuple(pool), **call), wanted)
    torch.cuda.synchronize()


def test_pages_that_no_request_has_are_not_read():
    each = batch([1] * 6, [2047, 0, 1, 517, 9001, 33], *HEADS, 128, **BF16)
    plan = plan_for(each, page=16, config=CONFIGS["heads"])
    cache, table = poisoned_pages(each, 16)
    out, _ = plan.run(
        each.q[:, None], cache, seq_lens=each.numbers(each.kv_lens), block_table=table
    )
    assert bool(out.isfinite().all())
