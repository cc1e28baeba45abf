"""Batch invariance on a GPU: 500 random batches, every row bit for bit what it is alone."""

import random
from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.serving import DecodePlan
from tests.invariance import (
    MASKS,
    Bench,
    Piece,
    assert_same_bits,
    random_pieces,
    rows_of_attention,
    stories,
    whole,
)

pytestmark = pytest.mark.usefixtures("poisoned")
KEYS = 3000
FORMS = ("causal", "window", "ALiBi, e4m3", "gpt-oss", "gemma")
# Requests, and rows of all or of each: chunks beside steps, then steps alone, then drafts.
PLANS = {
    "mixed": {"batch": 16, "total_q": 700},
    "steps": {"batch": 64, "q_len": 1},
    "one step": {"batch": 1, "q_len": 1},
    "drafts": {"batch": 8, "q_len": 4},
}


def drawn(name):
    """Requests, options of their plans, and what each run is given beside them."""
    draw = torch.Generator().manual_seed(5)
    lengths = [*torch.randint(1, KEYS, (10,), generator=draw).tolist(), KEYS, 512]
    heads, D = {"gpt-oss": ((64, 8), 64), "gemma": ((8, 4), 256)}.get(name, ((32, 8), 128))
    eight = torch.float8_e4m3fn if "e4m3" in name else None
    told = stories(lengths, heads, D, kv_dtype=eight, device="cuda")
    options, call = {"mask_mod": causal}, {}
    if name in ("window", "gpt-oss"):
        options = {"mask_mod": sliding_window(128 if D == 64 else 700), "sinks": True}
        call = {"sinks": torch.randn(heads[0], device="cuda")}
    if name in ("window", "gemma"):
        options["score_mod"] = softcap(20.0)
    if eight is not None:
        options |= {"score_mod": alibi(heads[0], "cuda"), "scaled": True}
        call = {"k_scale": torch.rand(8, device="cuda"), "v_scale": torch.rand(8, device="cuda")}
    return told, options, call


def plans(told, options, maxima, page):
    """The plan of a form, and one of half the programs, as on a GPU of fewer SMs."""
    some = told[0]
    shape = {
        "kv_len": KEYS + 700, "heads": (some.q.shape[1], some.k.shape[1]), "lse": True,
        "head_dim": some.q.shape[2], "page_size": page, "kv_dtype": some.k.dtype,
        "batch_invariant": True, **maxima, **options,
    }  # fmt: skip
    first = DecodePlan(**shape)
    return first, DecodePlan(config=replace(first.config, per_sm=1), **shape)


def batches(draw, told, plan, count):
    """Random batches that a plan serves."""
    m = plan.problem
    found = []
    while len(found) < count:
        if m.total_q:
            pieces = random_pieces(draw, told, [1, 1, 1, 3, 17, 128, 300])
        else:
            many = draw.randint(1, m.B)
            told_long = [each for each in told if len(each) >= m.q_len]
            ends = [(s, draw.randint(m.q_len, len(s))) for s in draw.choices(told_long, k=many)]
            pieces = [Piece(story, last - m.q_len, last) for story, last in ends]
        rows = sum(each.last - each.first for each in pieces)
        if len(pieces) <= m.B and rows <= (m.total_q or rows):
            found.append(pieces)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_500_random_batches_have_the_bits_of_each_row_alone(name):
    told, options, call = drawn(name)
    alone = whole(told, page=16, call=call, **options)
    draw = random.Random(name)
    for kind, maxima in PLANS.items():
        page = draw.choice([0, 16, 16, 64])
        for plan in plans(told, options, maxima, page):
            each = batches(draw, told, plan, 16)
            eager, graph = (
                Bench(plan, each[0], requests=plan.problem.B, keys=KEYS, **call) for _ in range(2)
            )
            graph.fill(each[0])
            graph.capture()
            for i, pieces in enumerate(each):
                bench = graph if i % 2 else eager
                assert_same_bits(bench.run(pieces), pieces, told, alone)
            assert bool((plan._workspace.view(torch.int32) == -1).all()), kind


@pytest.mark.parametrize("page", [0, 16])
def test_one_request_without_a_mask_has_the_bits_of_a_prefill(page):
    """Its keys are prefetched, and where the plan is for longer ones from another tile on."""
    told, options, _ = drawn("causal")
    alone = whole(told, page=16, **options)
    for kv_len in (KEYS, 7 * KEYS):
        plan = DecodePlan(
            batch=1, kv_len=kv_len, heads=(32, 8), head_dim=128, page_size=page, lse=True,
            batch_invariant=True,
        )  # fmt: skip
        bench = Bench(plan, [Piece(told[0], 0, 1)], requests=1, keys=kv_len)
        for story in told:
            pieces = [Piece(story, len(story) - 1, len(story))]
            assert_same_bits(bench.run(pieces), pieces, told, alone)
        assert bool((plan._workspace.view(torch.int32) == -1).all())


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "ALiBi"])
@MASKS
def test_rows_of_flex_attention_have_the_bits_of_a_prefill(mask, biased, D):
    story, slopes = stories([2100], (8, 2), D, device="cuda")[0], alibi(8, "cuda")

    def rows(first, last):
        far = lambda s, b, h, m, n: slopes(s, b, h, m + first, n)  # noqa: E731
        return rows_of_attention(story, first, last, mask, score_mod=far if biased else None)

    alone = rows(0, 2100)
    draw = random.Random(D)
    for _ in range(20):
        last = draw.randint(1, 2100)
        first = max(0, last - draw.choice([1, 1, 5, 64, 300]))
        assert torch.equal(rows(first, last), alone[:, first:last]), (first, last)
