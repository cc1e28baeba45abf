"""On a GPU: a million keys of 1 and 8 requests, prefix trees, evicted keys, and graphs of them."""

import math

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.reference import Precision, attention
from flexattn.runtime.build import builder
from flexattn.serving import DecodePlan, KeptKeys, PrefixTree, ServingConfig
from tests.serving import assert_right, batch, plan_for, run
from tests.trees import EVERY, case

pytestmark = pytest.mark.usefixtures("poisoned")
MILLION, PAGE, HEADS = 2**20, 16, (32, 8)
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def aliased(requests, layout="NHD"):
    """Few pages that each table names again and again, and queries."""
    draw = torch.Generator("cuda").manual_seed(3)
    real = 512
    pool = [torch.randn(real, PAGE, 8, 128, generator=draw, **BF16) for _ in "kv"]
    table = torch.randint(0, real, (requests, MILLION // PAGE), generator=draw, device="cuda")
    q = torch.randn(requests, 1, 32, 128, generator=draw, **BF16)
    return q, tuple(pool), table.int()


def exact(q, cache, table, length, b):
    """A request's attention in float64, with each page as often as it is named."""
    counts = torch.bincount(table[b, : length // PAGE].long(), minlength=len(cache[0]))
    weight = counts.double().log().repeat_interleave(PAGE)
    every = [x.flatten(0, 1).transpose(0, 1)[None] for x in cache]
    often = lambda s, b, h, m, n: s + weight[n]  # noqa: E731
    found = attention(
        q[b].transpose(0, 1)[None], *every, score_mod=often, precision=Precision.ORACLE
    )
    return found.out[0, :, 0], found.lse[0, :, 0]


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_million_keys(requests, invariant):
    q, cache, table = aliased(requests)
    plan = DecodePlan(
        batch=requests, kv_len=MILLION, heads=HEADS, head_dim=128, page_size=PAGE, lse=True,
        batch_invariant=invariant,
    )  # fmt: skip
    lens = torch.full((requests,), MILLION, dtype=torch.int32, device="cuda")
    plan.run(q, cache, seq_lens=lens, block_table=table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = plan.run(q, cache, seq_lens=lens, block_table=table)
    for length in (MILLION, 16, MILLION - 16 * 37):
        lens.fill_(length)
        out.fill_(math.nan)
        graph.replay()
        for b in range(requests):
            wanted, sums = exact(q, cache, table, length, b)
            # Outputs of many keys are small: of a part that is missing the sum would tell.
            torch.testing.assert_close(lse[b, 0].double(), sums, atol=1e-3, rtol=0)
            far = 0.02 * wanted.abs().max().item()
            torch.testing.assert_close(out[b, 0].double(), wanted, atol=far, rtol=0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pages_beyond_4_billion_elements(kv, layout):
    """The cache of 8 requests of a million keys: its last pages, beside its first ones."""
    pages = 8 * MILLION // PAGE // (1 if kv.itemsize == 1 else 2)
    shape = (pages, PAGE, 8, 128) if layout == "NHD" else (pages, 8, PAGE, 128)
    pool = torch.zeros(shape, dtype=torch.uint8 if kv.itemsize == 1 else kv, device="cuda")
    pool = pool.view(kv)
    table = torch.tensor([[pages - 1, 0, pages // 2, pages - 2]] * 2, device="cuda").int()
    keys = torch.randn(4, *shape[1:], device="cuda").to(kv)
    for page, each in zip(table[0].tolist(), keys, strict=True):
        pool[page] = each
    q = torch.randn(2, 1, 32, 128, **BF16)
    plan = DecodePlan(
        batch=2, kv_len=64, heads=HEADS, head_dim=128, page_size=PAGE, layout=layout, kv_dtype=kv,
    )  # fmt: skip
    lens = torch.tensor([61, 64], dtype=torch.int32, device="cuda")
    out = plan.run(q, (pool, pool), seq_lens=lens, block_table=table)
    own = keys.float().transpose(1, 2) if layout == "HND" else keys.float()
    own = own.flatten(0, 1).transpose(0, 1)[None]
    for b, n in enumerate((61, 64)):
        one = attention(
            q[b].transpose(0, 1)[None], own[:, :, :n], own[:, :, :n], precision=Precision.ORACLE
        )
        torch.testing.assert_close(out[b, 0].double(), one.out[0, :, 0], atol=2e-2, rtol=2e-2)


LONG = PrefixTree((-1, 0, 0, 1), (8000, 1024, 333, 77), (3, 1, 3, 2, 2, 0, -1))
OWN = (5, 190, 400, 6, 23, 8, 3000)
LLAMA = {"heads": HEADS, "D": 128, "page": PAGE, **BF16}


@pytest.mark.parametrize("scaled", [None, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_tree(q_len, scaled):
    mods = {"score_mod": alibi(32, "cuda"), "mask_mod": sliding_window(9000)}
    sinks = torch.randn(32, device="cuda")
    found = case(LONG, OWN, q_len=q_len, sinks=sinks, scaled=scaled, **LLAMA, **mods)
    assert len(found.plan.reads.shared) == 4
    for _ in range(2):
        assert_right(found.run(), found.each, sinks=sinks, **mods)


def test_one_graph_for_every_tree():
    """Captured where nothing is shared: what an update writes is what the next replay reads."""
    found = case(LONG, OWN, mask_mod=causal, **LLAMA)
    plan, table = found.plan, found.call["block_table"]
    nothing = PrefixTree((), (), ())
    plan.update(nothing, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = plan.run(found.q, found.cache, **found.call)
    for _ in range(3):
        compiled = builder().compiled
        plan.update(nothing, table)
        plan.update(LONG, table)
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        # The oracle lists a mask's blocks by kernels of its own.
        assert builder().compiled == compiled
        assert_right([x.flatten(0, 1) for x in got], found.each, mask_mod=causal)


def test_an_update_waits_for_a_run_on_another_stream():
    """The run reads its tables when its turn comes, long after the update was asked for."""
    found = case(LONG, OWN, mask_mod=causal, **LLAMA)
    wanted = [x.clone() for x in found.plan.run(found.q, found.cache, **found.call)]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        got = found.plan.run(found.q, found.cache, **found.call)
    found.plan.update(PrefixTree((), (), ()), found.call["block_table"])
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("config", [None, ServingConfig(16, 64, 4, 3)], ids=["default", "even"])
def test_keys_evicted_from_the_middle(config):
    lengths, pages = (2047, 9001, 40, 517), 64
    each = batch([1] * 4, lengths, *HEADS, 128, **BF16)
    kept = KeptKeys(batch=5, keys=1024 + PAGE, page=PAGE, device="cuda")
    there = torch.zeros(4, 9001, dtype=torch.bool, device="cuda")
    left = []
    for b, n in enumerate(lengths):
        last = -(-n // PAGE)
        chosen = torch.tensor([0, *range(max(1, last - pages), last)])
        keys = (chosen[:, None] * PAGE + torch.arange(PAGE)).flatten()
        left.append(keys := keys[keys < n])
        kept.positions[b, : len(chosen)] = (chosen * PAGE).int().cuda()
        kept.evicted[b] = n - len(keys)
        there[b, keys.cuda()] = True
    few = type(each)(
        each.q, *([x[i] for x, i in zip(xs, left, strict=True)] for xs in (each.k, each.v)),
        each.q_lens, [len(keys) for keys in left],
    )  # fmt: skip
    window, slopes = sliding_window(700), alibi(32, "cuda")
    plan = plan_for(
        few, page=PAGE, config=config, mask_mod=kept.mask(window), score_mod=kept.score(slopes)
    )

    def seen(b, h, q_idx, kv_idx):
        return there[b, kv_idx] & window(b, h, q_idx, kv_idx)

    assert_right(run(plan, few), few, exact=each, score_mod=slopes, mask_mod=seen)


def test_the_estimate_and_every_read():
    """Whatever is chosen is right: by the default's estimate, and where all is read once."""
    for cost in (None, EVERY):
        found = case(LONG, OWN, cost=cost, **LLAMA)
        assert_right(found.run(), found.each)
