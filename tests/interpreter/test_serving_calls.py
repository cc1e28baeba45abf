"""What is built on the serving kernels: flex_decode, states that merge, refusals."""

import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import flexattn.serving.plan as plans
from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.mods import bind
from flexattn.runtime.build import builder
from flexattn.serving import DecodePlan, ServingConfig, checks, flex_decode, merge_states
from flexattn.settings import override
from tests.serving import SMALL, assert_right, batch, plan_for, poisoned_cache, poisoned_pages, run

LENGTHS = [53, 0, 2, 17]


@pytest.mark.parametrize("page", [0, 4])
def test_flex_decode(page):
    each = batch([2] * 4, LENGTHS, 6, 2)
    sinks = torch.randn(6)
    cache, table = poisoned_pages(each, page) if page else (poisoned_cache(each, 60), None)
    for scale, score_mod in ((None, softcap(9.0)), (-0.3, alibi(6, "cpu"))):
        got = flex_decode(
            each.q.unflatten(0, (4, 2)), cache, seq_lens=each.numbers(LENGTHS), block_table=table,
            score_mod=score_mod, mask_mod=causal, sinks=sinks, scale=scale, return_lse=True,
        )  # fmt: skip
        call = {"score_mod": score_mod, "mask_mod": causal, "sinks": sinks, "scale": scale}
        assert_right([x.flatten(0, 1) for x in got], each, **call)


def test_flex_decode_of_mla():
    each = batch([1] * 4, LENGTHS, 5, 1, 40, 32)
    for k, v in zip(each.k, each.v, strict=True):
        v.copy_(k[..., :32])
    (cache, _), table = poisoned_pages(each, 4)
    q = each.q.unflatten(0, (4, 1))
    call = {"seq_lens": each.numbers(LENGTHS), "block_table": table, "return_lse": True}
    got = flex_decode(q, cache, head_dim_v=32, **call)
    assert_right([x.flatten(0, 1) for x in got], each)


def test_a_run_compiles_and_allocates_nothing(monkeypatch):
    plan = plan_for(batch([2] * 4, [60] * 4, 6, 2), page=4, config=SMALL, mask_mod=causal)
    each = batch([2] * 4, LENGTHS, 6, 2)
    cache, table = poisoned_pages(each, 4)
    q, lens = each.q.unflatten(0, (4, 2)), each.numbers(LENGTHS)
    before = builder().compiled

    def refused(*args, **kwargs):
        raise AssertionError("a run allocates nothing")

    for name in ("empty", "zeros", "empty_strided", "full", "empty_like"):
        monkeypatch.setattr(torch, name, refused)
    monkeypatch.setattr(plans, "build", refused)
    first = plan.run(q, cache, seq_lens=lens, block_table=table)
    again = plan.run(q, cache, seq_lens=lens, block_table=table)
    monkeypatch.undo()
    assert builder().compiled == before
    assert first[0].data_ptr() == again[0].data_ptr()
    assert_right([x.flatten(0, 1) for x in again], each, mask_mod=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("D", [16, 40, 192])
def test_states_merge(D, dtype):
    draw = torch.Generator().manual_seed(D)
    scores = torch.randn(37, 3, 90, generator=draw, dtype=torch.float64) * 3
    v = torch.randn(90, D, generator=draw, dtype=torch.float64)
    states = []
    for part in (slice(0, 13), slice(13, 90)):
        lse = scores[..., part].logsumexp(-1)
        out = scores[..., part].softmax(-1) @ v[part]
        states.append((out.to(dtype), lse.float()))
    out, lse = merge_states(*states[0], *states[1])
    exact, total = scores.softmax(-1) @ v, scores.logsumexp(-1)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), total, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out.double(), exact, atol=2 * tolerance, rtol=tolerance)


def test_a_state_without_keys_adds_nothing():
    out, lse = torch.randn(5, 2, 16), torch.randn(5, 2)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for states in ((out, lse, *nothing), (*nothing, out, lse)):
        merged = merge_states(*states)
        torch.testing.assert_close(merged[0], out)
        torch.testing.assert_close(merged[1], lse)
    merged = merge_states(*nothing, *nothing)
    assert (merged[0] == 0).all() and (merged[1] == -math.inf).all()


def test_what_the_kernel_that_merges_could_not_read_where_it_lies():
    """It reads 16 bytes at once, wherever a state begins, and writes as many."""
    out, lse = torch.randn(5, 2, 16), torch.randn(5, 2)
    wanted = merge_states(out, lse, out, lse)
    memory = torch.cat((torch.zeros(1), out.flatten()))
    negated = torch._neg_view(-out)
    for states in ((memory[1:].view(5, 2, 16), lse, negated, lse), (negated, lse, out, lse)):
        assert all(map(torch.equal, merge_states(*states), wanted))
    with pytest.raises(InputError, match="multiple of 16"):
        merge_states(out, lse, out, lse, out=memory[1:].view(5, 2, 16))
    with pytest.raises(InputError, match="on meta"):
        merge_states(out, lse, out, lse, lse=lse.to("meta"))
    with pytest.raises(UnsupportedError, match="lse_b requires grad"):
        merge_states(out, lse, out, lse.clone().requires_grad_())


WRONG = {
    "a request that is too long": ({"seq_lens": [41, 3]}, "at most the plan's 40 keys"),
    "a table that is too short": ({"seq_lens": [35, 3]}, "lists 2 pages of 16 keys"),
    "a negative length": ({"seq_lens": [-1, 3]}, "not negative"),
}


@pytest.mark.parametrize("name", WRONG)
def test_checked_mode_says_what_the_kernels_clamp(name):
    change, words = WRONG[name]
    pool = torch.zeros(12, 16, 1, 16)
    plan = DecodePlan(
        batch=2, kv_len=40, heads=(2, 1), head_dim=16, dtype=torch.float32, device="cpu",
        page_size=16, config=SMALL,
    )  # fmt: skip
    given = {"seq_lens": [30, 3], "block_table": [[0, 1], [2, 3]]} | change
    call = {key: torch.tensor(value, dtype=torch.int32) for key, value in given.items()}
    q = torch.zeros(2, 1, 2, 16)
    with override(check=True), pytest.raises(InputError, match=words):
        plan.run(q, (pool, pool), **call)
    with override(check=False):
        assert plan.run(q, (pool, pool), **call).isfinite().all()


def test_tensors_that_do_not_fit_a_plan():
    each = batch([1] * 2, [30, 3], 2, 1)
    plan = plan_for(each, page=4, config=SMALL)
    pages, table = poisoned_pages(each, 4)
    q, lens = each.q[:, None], each.numbers([30, 3])
    good = {"seq_lens": lens, "block_table": table}
    for wrong, words in (
        ({"q": q.half()}, "plan is for torch.float32"),
        ({"kv_cache": tuple(x.half() for x in pages)}, "torch.float32"),
        ({"kv_cache": tuple(x[:, :2] for x in pages)}, "pages of 4"),
        ({"seq_lens": lens.long()}, "int32"),
        ({"block_table": None}, "block_table is missing"),
        ({"sinks": torch.zeros(2)}, "sinks is given"),
        ({"q": q.expand(-1, 3, -1, -1)}, "at most 1"),
        ({"q": each.q[:1, None]}, "row for each request"),
    ):
        call = {"q": q, "kv_cache": pages, **good, **wrong}
        with pytest.raises(InputError, match=words):
            plan.run(call.pop("q"), call.pop("kv_cache"), **call)
    assert_right([x.flatten(0, 1) for x in plan.run(q, pages, **good)], each)


@pytest.mark.parametrize("name", ["query", "K", "V"])
def test_a_run_that_would_drop_a_gradient(name):
    """Its output required no grad, so that a loss learned nothing of this attention."""
    each = batch([1], [9], 2, 1)
    k, v = poisoned_cache(each, 60)
    named = {"query": each.q[:, None], "K": k, "V": v}
    plan, lengths = plan_for(each), each.numbers([9])
    wanted = plan.run(named["query"], (k, v), seq_lens=lengths)[0].clone()
    named[name] = named[name].detach().clone().requires_grad_()
    arguments = named["query"], (named["K"], named["V"])
    with pytest.raises(UnsupportedError, match=rf"(?s){name} requires grad.*no backward.*detach"):
        plan.run(*arguments, seq_lens=lengths)
    with torch.no_grad():
        assert torch.equal(plan.run(*arguments, seq_lens=lengths)[0], wanted)
    with pytest.raises(UnsupportedError, match=f"{name} requires grad"):
        plan.run(*arguments, seq_lens=lengths)


def test_a_cache_that_comes_to_require_grad_is_seen():
    """What a plan had seen before was remembered as it was, and the gradient was dropped."""
    each = batch([1], [9], 2, 1)
    k, v = poisoned_cache(each, 60)
    plan, lengths = plan_for(each), each.numbers([9])
    for _ in range(2):
        plan.run(each.q[:, None], (k, v), seq_lens=lengths)
    v.requires_grad_()
    with pytest.raises(UnsupportedError, match="V requires grad"):
        plan.run(each.q[:, None], (k, v), seq_lens=lengths)


def test_a_run_looks_at_what_another_run_was_given_in_its_place():
    """Of the same shape, and after a run that fitted: it is refused as in a first run."""
    each = batch([1] * 2, [30, 3], 2, 1)
    sinks, scale = torch.zeros(2), torch.ones(1)
    plan = plan_for(each, page=4, config=SMALL, sinks=True, scaled=True, offset=True)
    pages, table = poisoned_pages(each, 4)
    lens = each.numbers([30, 3])
    good = {
        "q": each.q[:, None], "kv_cache": pages, "seq_lens": lens, "block_table": table,
        "sinks": sinks, "k_scale": scale, "v_scale": scale, "kv_start": torch.zeros_like(lens),
    }  # fmt: skip
    first = [x.clone() for x in plan.run(**good)]
    apart = torch.stack([lens, lens], 1)[:, 0]
    wide = torch.zeros(2, 2 * table.shape[1], dtype=torch.int32)
    for wrong, words in (
        ({"q": good["q"].to("meta")}, "query is on meta"),
        ({"seq_lens": apart}, "seq_lens"),
        ({"block_table": wide[:, ::2]}, "block_table"),
        ({"sinks": torch.zeros(4)[::2]}, "sinks"),
        ({"k_scale": scale.half()}, "k_scale"),
        ({"kv_start": lens.long()}, "kv_start"),
        # What a kernel would read past.
        ({"kv_start": lens[:1]}, "kv_start has 1 elements for 2 requests"),
        ({"seq_lens": lens[:1].expand(2)}, "seq_lens"),
    ):
        with pytest.raises(InputError, match=words):
            plan.run(**(good | wrong))
        again = plan.run(**good)
        assert all(map(torch.equal, again, first))


def test_a_table_and_lengths_change_in_place():
    """As torch's `out=` does: other requests, and other strides, also at the same shape.

    A table cut out of a wider one was made dense: the first row was right, the others not.
    """
    each = batch([1] * 3, [30, 3, 17], 2, 1)
    plan = plan_for(each, page=4, config=SMALL)
    pages, dense = poisoned_pages(each, 4)
    wide = torch.nn.functional.pad(dense, (0, 5), value=-7)
    table, lens = wide.clone()[:, : dense.shape[1]], each.numbers(each.kv_lens)

    def right(rows):
        lens.resize_(rows).copy_(each.numbers(each.kv_lens)[:rows])
        out, lse = plan.run(each.q[:rows, None], pages, seq_lens=lens, block_table=table)
        few = replace(each, q=each.q[:rows], q_lens=each.q_lens[:rows])
        assert_right((out.flatten(0, 1), lse.flatten(0, 1)), few)

    right(3)
    for rows, now in ((2, dense), (3, dense), (3, wide), (2, wide)):
        table.resize_(rows, now.shape[1]).copy_(now[:rows])
        right(rows)
    table.data = wide[:, : dense.shape[1]]
    right(3)
    lens.resize_(1)
    with pytest.raises(InputError, match="row for each request"):
        plan.run(each.q[:, None], pages, seq_lens=lens, block_table=table)


def test_checked_mode_takes_more_starts_than_requests():
    """As a run does without it: a batch that shrank keeps its longest tensors."""
    each = batch([1] * 2, [30, 3], 2, 1)
    plan = plan_for(each, page=4, config=SMALL, offset=True)
    pages, table = poisoned_pages(each, 4)
    call = {"seq_lens": each.numbers([30, 3]), "block_table": table}
    with override(check=True):
        got = plan.run(each.q[:, None], pages, kv_start=each.numbers([0, 0, 99]), **call)
    assert_right([x.flatten(0, 1) for x in got], each)


def test_what_no_run_could_read_where_it_lies():
    each = batch([1] * 2, [30, 3], 2, 1)
    plan = plan_for(each, page=4, config=SMALL)
    pages, table = poisoned_pages(each, 4)
    call = {"seq_lens": each.numbers([30, 3]), "block_table": table}
    first = [x.clone() for x in plan.run(each.q[:, None], pages, **call)]
    with pytest.raises(InputError, match="negates its memory"):
        plan.run(torch._neg_view(each.q)[:, None], pages, **call)
    assert all(map(torch.equal, plan.run(each.q[:, None], pages, **call), first))
    with pytest.raises(InputError, match="TwoTensor, which has no memory"):
        plan.run(TwoTensor(each.q[:, None], each.q[:, None]), pages, **call)
    slope = torch._neg_view(torch.ones(2))
    with pytest.raises(InputError, match="negates its memory"):
        plan_for(each, score_mod=lambda s, b, h, q, k: s * slope[h])
    # A number on the CPU, which flex_attention copies at every call.
    number = torch.tensor(0.5)
    bound = bind(lambda s, b, h, q, k: s * number, "score", "cuda:0")
    with pytest.raises(InputError, match="on cuda:0"):
        checks.check_captured(bound, torch.device("cuda:0"))


def test_layers_share_a_plan():
    """Each with a cache of its own, which the plan neither mixes up nor keeps alive."""
    each = [batch([1] * 2, [30, 3 + layer], 2, 1) for layer in range(3)]
    plan = plan_for(each[2], page=4, config=SMALL)
    layers = [poisoned_pages(layer, 4) for layer in each]
    for _ in range(2):
        for layer, (pages, table) in zip(each, layers, strict=True):
            lens = layer.numbers(layer.kv_lens)
            got = plan.run(layer.q[:, None], pages, seq_lens=lens, block_table=table)
            assert_right([x.flatten(0, 1) for x in got], layer)
    dying = weakref.ref(layers[-1][0][0])
    del layers, pages, table
    assert dying() is None


def test_maxima_that_no_plan_serves():
    for change, words in (
        ({"page_size": 300}, "1 to 256"),
        ({"heads": (3, 2)}, "multiple"),
        ({"kv_dtype": torch.float16}, "float8_e4m3fn"),
        ({"layout": "DHN"}, "NHD"),
    ):
        options = {"batch": 2, "kv_len": 40, "heads": (2, 1), "head_dim": 16, "device": "cpu"}
        with pytest.raises(InputError, match=words):
            DecodePlan(**(options | change))
    with pytest.raises(ConfigError, match="power of two"):
        DecodePlan(**options, config=ServingConfig(16, 48, 4, 2))


def test_lengths_at_the_ends_of_the_plan():
    """Exactly the maxima, one key, and a table that is exactly full."""
    each = batch([1] * 3, [64, 1, 64], 2, 1)
    plan = DecodePlan(
        batch=3, kv_len=64, heads=(2, 1), head_dim=16, dtype=torch.float32, device="cpu",
        page_size=16, config=SMALL, lse=True, mask_mod=sliding_window(200),
    )  # fmt: skip
    assert_right(run(plan, each), each, mask_mod=sliding_window(200))
