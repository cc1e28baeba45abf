"""A mixed batch whose prefills Hopper's forward serves, and whose decodes the streaming kernel."""

import random

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.serving import DecodePlan
from flexattn.settings import override
from tests import serving
from tests.serving import (
    EIGHT_BITS,
    assert_right,
    batch,
    plan_for,
    poisoned_pages,
    quantized,
    run,
)
from tests.support import ON_SM_90

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
MIXED = [700, 1, 130, 16, 17, 0, 1, 64], [700, 3000, 900, 16, 4000, 40, 1, 65]


def check(each, *, page=16, **more):
    plan = serving.check(each, page=page, ragged=True, runs=2, **more)
    assert isinstance(plan.prefill_config, HopperPrefillConfig)
    return plan


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 8, 16, 24, 32, 64, 128, 256])
def test_caches(page, layout, together):
    each = batch(*MIXED, 32, 8, 128, **BF16)
    check(each, page=page, layout=layout, together=together, mask_mod=causal)


@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "Dv"),
    [(32, 8, 64, 64), (32, 8, 96, 96), (16, 16, 128, 128), (40, 8, 128, 128), (24, 2, 256, 256),
     (16, 4, 192, 128), (71, 1, 64, 64), (28, 4, 80, 80)],
)  # fmt: skip
def test_heads(Hq, Hkv, D, Dv):
    for dtype in (torch.bfloat16, torch.float16):
        each = batch(*MIXED, Hq, Hkv, D, Dv, dtype=dtype, device="cuda")
        check(each, mask_mod=causal)


def test_requests_of_equal_rows():
    """All are prefills: no other kernel is launched."""
    each = batch([300] * 4, [300, 2000, 999, 4001], 32, 8, 128, **BF16)
    plan = plan_for(each, page=16, mask_mod=causal)
    assert isinstance(plan.prefill_config, HopperPrefillConfig)
    for _ in range(2):
        assert_right(run(plan, each), each, mask_mod=causal)


ASKED_OF_EIGHT_BITS = {
    "plain": {},
    "heads before keys": {"page": 128, "layout": "HND"},
    "one tensor": {"page": 256, "together": True},
    "64 columns": {"D": 64, "page": 64},
    "256 columns": {"D": 256, "heads": (8, 4)},
    "80 columns": {"D": 80, "page": 32},
    "seven heads": {"heads": (28, 4)},
    "float16": {"q": torch.float16},
    "window": {"mask_mod": sliding_window(90)},
    "soft cap": {"score_mod": softcap(20.0)},
    "alibi": {"score_mod": lambda s, b, h, q, k: s + (k - q) / (32 * (h + 1))},
    "sinks": {"sinks": True},
    "no scales": {"scaled": False},
    "signed scales": {"signed": True},
    "one long cache": {"lengths": ([40, 100, 17, 1, 300], [500, 30000, 700, 9000, 300])},
    "few tiles": {"lengths": ([105], [6514]), "D": 64},
}


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("asked", ASKED_OF_EIGHT_BITS)
def test_eight_bits(asked, dtype):
    """K and V are widened on the way to the tensor cores; heads have scales."""
    about = {"D": 128, "heads": (32, 8), "q": torch.bfloat16, "lengths": MIXED, "sinks": False}
    about |= {"page": 16, "layout": "NHD", "together": False, "scaled": True, "signed": False}
    about |= {"mask_mod": causal} | ASKED_OF_EIGHT_BITS[asked]
    heads, D, signed = (about.pop(name) for name in ("heads", "D", "signed"))
    each = batch(*about.pop("lengths"), *heads, D, dtype=about.pop("q"), device="cuda")
    few, wide, *scales = quantized(each, dtype, True)
    if signed:
        for scale in scales:
            scale[0], scale[1] = 0.0, -scale[1]
    steps = [scale.view(1, -1, 1) if about["scaled"] else 1.0 for scale in scales]
    for kept, narrow, step in zip((wide.k, wide.v), (few.k, few.v), steps, strict=True):
        kept[:] = [x.float() * step for x in narrow]
    told = dict(zip(("k_scale", "v_scale"), scales, strict=True)) if about["scaled"] else {}
    about["sinks"] = torch.randn(heads[0], device="cuda") if about["sinks"] else None
    check(few, exact=wide, kv_dtype=dtype, given=lambda plan: told, **about)


def check_kernel_for_every_gpu(each, page):
    """Prompts too are computed by it, over a cache of e4m3 with a scale for each head."""
    few, wide, *scales = quantized(each, torch.float8_e4m3fn, True)
    told = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    plan = serving.check(
        few, exact=wide, page=page, scaled=True, kv_dtype=torch.float8_e4m3fn, mask_mod=causal,
        given=lambda plan: told, ragged=True, runs=2,
    )  # fmt: skip
    assert plan.prefill_config is None


@pytest.mark.parametrize("D", [80, 96, 128])
def test_single_keys_of_eight_bits(D):
    """Hopper's forward copies no such pages.

    Triton's kernel once cut 80 columns into 64 and 16, and 96 into 64 and 32: an H200 read out of
    bounds.
    """
    check_kernel_for_every_gpu(batch(*MIXED, 32, 8, D, **BF16), page=1)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_queries_of_e4m3(D):
    """Beside a cache of the same dtype."""
    each = batch(*MIXED, 32, 8, D, dtype=torch.float8_e4m3fn, device="cuda")
    check_kernel_for_every_gpu(each, page=16)


LONG = {
    "few tiles": ([105], [6514]),
    "one long cache": ([40, 100, 17, 1, 300], [500, 30000, 700, 9000, 300]),
    "decodes that stream": ([900, *[1] * 40], [2000, *[3000] * 40]),
    "long caches": ([50] * 6, [16001, 20000, 9000, 12345, 30000, 64]),
}


@pytest.mark.parametrize("asked", ["causal", "window", "sinks", "alibi", "no mask"])
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(16, 2, 128), (28, 4, 64), (32, 16, 128)])
@pytest.mark.parametrize("lengths", LONG)
def test_keys_in_parts(lengths, Hq, Hkv, D, asked):
    each = batch(*LONG[lengths], Hq, Hkv, D, **BF16)
    mods = {
        "no mask": {}, "window": {"mask_mod": sliding_window(3000)},
        "alibi": {"mask_mod": causal, "score_mod": alibi(Hq, "cuda")},
    }.get(asked, {"mask_mod": causal})  # fmt: skip
    sinks = torch.randn(Hq, device="cuda") if asked == "sinks" else None
    plan = check(each, page=64, sinks=sinks, **mods)
    assert plan.prefill_config.splits


def test_a_plan_of_one_request():
    """It launches no other kernel, also where the request decodes."""
    plan = DecodePlan(
        batch=1, kv_len=9000, total_q=400, heads=(28, 4), head_dim=128, page_size=16, lse=True,
        mask_mod=causal,
    )  # fmt: skip
    assert plan._kernels.attend is None
    for q_len, kv_len in ((300, 300), (1, 9000), (17, 5000), (400, 8999)):
        each = batch([q_len], [kv_len], 28, 4, 128, **BF16)
        for _ in range(2):
            assert_right(run(plan, each), each, mask_mod=causal)


LENS = torch.tensor([100, 260, 31, 900, 2, 0, 1, 30])


def prefix(b, h, q_idx, kv_idx):
    """Causal but for what every request begins with."""
    return (kv_idx < LENS.to(kv_idx.device)[b]) | (q_idx >= kv_idx)


ALIBI = alibi(32, "cuda") if torch.cuda.is_available() else None
MODS = {
    "no mask": {},
    "window": {"mask_mod": sliding_window(90)},
    "soft cap": {"mask_mod": causal, "score_mod": softcap(20.0)},
    "alibi": {"mask_mod": causal, "score_mod": ALIBI},
    "by position": {
        "mask_mod": causal,
        "score_mod": lambda s, b, h, q, k: s + (k - q) / (32 * (h + 1)) + b,
    },
    "first keys and a window": {
        "mask_mod": lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 200)),
    },
    "holes": {"mask_mod": lambda b, h, q, k: ((q // 32 + k // 32) % 2 == 0) & (q >= k)},
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mods", MODS)
def test_mods(mods, sinks):
    each = batch(*MIXED, 32, 8, 128, **BF16)
    check(each, sinks=torch.randn(32, device="cuda") if sinks else None, **MODS[mods])


def test_a_mask_by_request():
    lens = LENS.cuda()
    each = batch(*MIXED, 32, 8, 128, **BF16)
    check(each, mask_mod=lambda b, h, q, k: (k < lens[b]) | (q >= k))


@pytest.mark.parametrize("seed", range(6))
def test_drawn_batches(seed):
    draw = random.Random(seed)
    count = draw.choice((1, 5, 40))
    q_lens = [draw.choice((0, 1, 1, 16, 17, draw.randrange(1, 900))) for _ in range(count)]
    q_lens[0] = draw.randrange(200, 900)
    kv_lens = [n + draw.choice((0, 0, draw.randrange(1, 3000))) for n in q_lens]
    heads = draw.choice(((32, 8), (32, 32), (28, 4), (64, 8)))
    each = batch(q_lens, kv_lens, *heads, draw.choice((64, 128)), **BF16)
    check(each, page=draw.choice((16, 64, 128)), mask_mod=causal)


def test_one_graph_serves_other_batches():
    """Prefills alone, decodes alone and both, by what lies on the device when it is replayed."""
    batches = [
        MIXED,
        ([1] * 8, [900, 3000, 900, 16, 4000, 40, 1, 65]),
        ([300, 300, 0, 0, 0, 0, 0, 0], [300, 2500, 0, 0, 0, 0, 0, 0]),
        ([929, 0, 0, 0, 0, 0, 0, 0], [4000, 0, 0, 0, 0, 0, 0, 0]),
    ]
    first = batch(*MIXED, 32, 8, 128, **BF16)
    plan = plan_for(first, page=16, ragged=True, mask_mod=causal)
    rows, width = plan.problem.total_q, -(-4100 // 16)
    q = torch.zeros(rows, 32, 128, **BF16)
    pages = 2000
    cache = tuple(torch.zeros(pages, 16, 8, 128, **BF16) for _ in "kv")
    lens, ends = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (8, 9))
    table = torch.zeros(8, width, dtype=torch.int32, device="cuda")
    out, lse = torch.zeros(rows, 32, 128, **BF16), torch.zeros(rows, 32, device="cuda")
    given = {"seq_lens": lens, "block_table": table, "cu_seqlens_q": ends, "out": out, "lse": lse}
    plan.run(q, cache, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, cache, **given)
    for q_lens, kv_lens in batches * 2:
        each = batch(q_lens, kv_lens, 32, 8, 128, **BF16)
        (k, v), own = poisoned_pages(each, 16)
        n = len(each.q)
        q[:n] = each.q
        for mine, theirs in zip(cache, (k, v), strict=True):
            mine[: len(theirs)] = theirs
        table.zero_()
        table[:, : own.shape[1]] = own.clamp(min=0)
        lens.copy_(each.numbers(kv_lens))
        ends.copy_(each.numbers([0, *torch.tensor(q_lens).cumsum(0).tolist()]))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_right((out[:n], lse[:n]), each, mask_mod=causal)
        assert out[n:].isnan().all() and lse[n:].isnan().all()


def test_lengths_that_break_the_rules_touch_nothing_else():
    """Of overlapping requests some rows get a number of no meaning; nothing else is written."""
    each = batch(*MIXED, 32, 8, 128, **BF16)
    plan = plan_for(each, page=16, ragged=True, mask_mod=causal)
    cache, table = poisoned_pages(each, 16)
    rows = len(each.q)
    wide = torch.full((rows + 64, 32, 128), 7.0, **BF16)
    twice = [0, 9999, 0, 929, 3, 700, 929, 929, 929]
    back = [-5, 700, 600, 929, 0, 1, 2, 3, 2**31 - 1]
    for ends in (twice, back):
        with override(check=False):
            plan.run(
                each.q, cache, seq_lens=each.numbers([2**30, -3, 900, 16, 4000, 40, 1, 65]),
                block_table=table.clamp(min=0), cu_seqlens_q=each.numbers(ends),
                out=wide[:rows],
            )  # fmt: skip
        torch.cuda.synchronize()
        assert (wide[rows:] == 7.0).all()
