"""Prefix trees: what a tree's plan reads once, and that every request's attention is its own."""

from functools import partial

import pytest
import torch

import flexattn.serving.plan as plans
from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.errors import ConfigError, InputError
from flexattn.serving import PrefixTree, ServingConfig, TreePlan
from tests import trees
from tests.launches import launches_of
from tests.serving import SMALL, Batch, assert_right, poisoned_pages
from tests.trees import EVERY, OWN, TREE, Case, requests_of

LAUNCH = ServingConfig(16, 16, 4, 2, combine="launch")
WARP = ServingConfig(8, 32, 2, 1, 2, 1, "await", "heads")
case = partial(trees.case, config=SMALL, shared_config=LAUNCH)


@pytest.mark.oldest
@pytest.mark.parametrize(("walk", "shared"), [("program", LAUNCH), ("warp", SMALL)])
def test_a_tree_is_attention_over_each_path_and_own_keys(walk, shared):
    """Mods see requests and positions, sinks count once, and shared keys are read once."""
    about = {"D": 64, "dtype": torch.float16, "config": WARP} if walk == "warp" else {}
    mods = {"score_mod": alibi(6, "cpu"), "mask_mod": sliding_window(60)}
    sinks = torch.randn(6)
    found = case(q_len=2, sinks=sinks, shared_config=shared, **about, **mods)
    assert [each.node for each in found.plan.reads.shared] == [0, 1, 2, 3]
    assert_right(found.run(), found.each, sinks=sinks, **mods)


def by_request(b, h, q_idx, kv_idx):
    return (kv_idx % 7 != b) & (q_idx - kv_idx != h)


@pytest.mark.parametrize(("page", "q_len"), [(16, 3), pytest.param(1, 1, marks=pytest.mark.long)])
def test_mods_of_requests_heads_and_positions(page, q_len):
    found = case(q_len=q_len, page=page, mask_mod=by_request)
    assert_right(found.run(), found.each, mask_mod=by_request)


@pytest.mark.parametrize("levels", [1, pytest.param(2, marks=pytest.mark.long)])
def test_fewer_levels_than_the_tree_has(levels):
    found = case(levels=levels)
    assert max(sum(b in r.requests for r in found.plan.reads.shared) for b in range(7)) == levels
    assert_right(found.run(), found.each)


def test_a_cache_of_eight_bits():
    found = case(dtype=torch.bfloat16, D=32, scaled=True)
    assert_right(found.run(), found.each)


@pytest.mark.long
def test_shared_keys_and_values():
    """MLA: V is the first columns of K."""
    each = requests_of(TREE, OWN, 1, (6, 1), 48, 32, torch.float16)
    for k, v in zip(each.k, each.v, strict=True):
        v.copy_(k[..., :32])
    plan = TreePlan(
        batch=7, kv_len=128, page_size=4, heads=(6, 1), head_dim=(48, 32), dtype=torch.float16,
        device="cpu", shared_kv=True, cost=EVERY, config=SMALL, shared_config=LAUNCH,
    )  # fmt: skip
    (cache, _), table = poisoned_pages(each, 4)
    assert plan.update(TREE, table).shared
    call = {"seq_lens": each.numbers(each.kv_lens), "block_table": table}
    assert_right(Case(plan, each, each.q[:, None], cache, call).run(), each)


@pytest.mark.long
@pytest.mark.parametrize(("D", "Dv"), [(24, 40), (16, 260)])
def test_head_dimensions_that_are_no_powers_of_two(D, Dv):
    small = ServingConfig(16, 16, 4, 1)
    found = case(D=D, Dv=Dv, dtype=torch.float16, config=small, shared_config=small)
    assert_right(found.run(), found.each)


@pytest.mark.long
def test_one_plan_for_every_tree_and_batch():
    """What a tree leaves of the one before it has no rows: also where nothing is shared."""
    found = case()
    plan, table = found.plan, found.call["block_table"]
    trees = [
        PrefixTree((-1,), (30,), (0,) * 7),
        PrefixTree((), (), (-1,) * 7),
        PrefixTree((-1, -1), (20, 30), (0, 1, 0, 1)),
        PrefixTree((), (), ()),
    ]
    for tree in (*trees, *trees[::-1]):
        count = 7 if len(tree.requests) != 4 else 6
        full = PrefixTree(tree.parents, tree.keys, (*tree.requests, *[-1] * 7)[:7])
        each = requests_of(full, [70, 60, 71, 62, 72, 64, 73], 1, (6, 2), 16, None, torch.float32)
        cache, table = poisoned_pages(each, 4)
        plan.update(tree, table)
        few = Batch(each.q[:count], each.k, each.v, each.q_lens[:count], each.kv_lens[:count])
        q, lens = each.q[:count, None], each.numbers(few.kv_lens)
        call = {"seq_lens": lens, "block_table": table[:count]}
        assert_right(Case(plan, few, q, cache, call).run(), few)


def test_requests_grow_without_an_update():
    found = case()
    shorter = [n - 3 for n in found.each.kv_lens]
    few = Batch(
        found.each.q, [x[:-3] for x in found.each.k], [x[:-3] for x in found.each.v],
        found.each.q_lens, shorter,
    )  # fmt: skip
    found.call["seq_lens"] = lens = few.numbers(shorter)
    assert_right(Case(found.plan, few, found.q, found.cache, found.call).run(), few)
    lens += 3
    assert_right(found.run(), found.each)


def test_a_plan_that_was_made_in_inference_mode():
    """As servers make it: an update outside of that mode raised."""
    with torch.inference_mode():
        found = case(mask_mod=causal)
    found.plan.update(TREE, found.call["block_table"])
    got = found.plan.run(found.q, found.cache, **found.call)
    assert_right([x.flatten(0, 1) for x in got], found.each, mask_mod=causal)


def test_the_estimate_of_a_plan_leaves_short_keys_to_requests():
    found = case(cost=None)
    assert found.plan.reads.shared == () and "themselves: 7" in found.plan.explain()
    assert_right(found.run(), found.each)
    # Llama's heads: 8,192 keys of 64 requests are worth three launches.
    plan = TreePlan(
        batch=2, kv_len=64, page_size=16, heads=(32, 8), head_dim=128, device="cpu",
        dtype=torch.float16, config=ServingConfig(16, 16, 4, 2), shared_config=LAUNCH,
    )  # fmt: skip
    assert plan.cost.key == 4096 and plan.cost.rows == 4
    # Queries are read and written, outputs with their log-sum-exp too.
    assert plan.cost.state == 2 * 32 * (2 * 128 * 2 + 4)


def test_a_run_allocates_and_compiles_nothing(monkeypatch):
    found = case(mask_mod=sliding_window(50))
    first = [x.clone() for x in found.run()]
    run = lambda: found.plan.run(found.q, found.cache, **found.call)  # noqa: E731
    got, launched = launches_of(monkeypatch, run, (plans, "build"))
    # Shared keys, the merge of their parts, own keys, and the merge of states.
    assert len(launched) == 4
    assert all(torch.equal(x.flatten(0, 1), y) for x, y in zip(got, first, strict=True))


def test_what_does_not_fit_is_refused():
    found = case()
    plan, table, call = found.plan, found.call["block_table"], found.call
    long = PrefixTree((-1,), (200,), (0, 0))
    for tree, rows, said in (
        (PrefixTree((), (), (-1,) * 9), table, "a tree of 9 requests"),
        (long, table, "a path of 200 keys"),
        (TREE, table[:3], "for 7 requests"),
        (TREE, table[:, :5], "block_table lists 5 pages"),
    ):
        with pytest.raises(InputError, match=said):
            plan.update(tree, rows)
    few = {**call, "seq_lens": call["seq_lens"][:3]}
    with pytest.raises(InputError, match="a row for each request of the tree"):
        plan.run(found.q[:3], found.cache, **few)
    with pytest.raises(InputError, match="seq_lens"):
        plan.run(found.q, found.cache, **few)
    short = call["seq_lens"].clone()
    short[2] = 71
    with pytest.raises(InputError, match=r"seq_lens\[2\] is 71"):
        plan.run(found.q, found.cache, **{**call, "seq_lens": short})
    about = {"batch": 2, "kv_len": 64, "heads": (2, 1), "head_dim": 16, "device": "cpu"}
    with pytest.raises(ConfigError, match="batch_invariant"):
        TreePlan(page_size=4, batch_invariant=True, **about)
    with pytest.raises(InputError, match="has pages"):
        TreePlan(page_size=0, **about)
    with pytest.raises(InputError, match="follows from"):
        TreePlan(page_size=4, lse=True, **about)


def test_an_update_and_a_run_on_other_streams_wait_for_the_last(monkeypatch):
    """Tables were written while another stream's run read them, or read before they were there."""
    found, said = case(), []

    class Beside:
        follow = lambda self: said.append("follow")  # noqa: E731
        begin = lambda self: said.append("begin")  # noqa: E731
        __enter__ = lambda self: None  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

    plan = found.plan
    plan._beside = Beside()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plan.run(found.q, found.cache, **found.call)
    plan.update(PrefixTree((), (), (-1,) * 7), found.call["block_table"])
    plan.run(found.q, found.cache, **found.call)
    assert said == ["begin", "follow", "follow"]
