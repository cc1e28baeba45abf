"""Keys evicted from the middle of requests: mods see the positions of those that are left."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.errors import InputError
from flexattn.serving import KeptKeys, PrefixTree, ServingConfig, TreePlan
from tests.serving import SMALL, assert_right, batch, plan_for, poisoned_pages, run
from tests.trees import EVERY

WARP = ServingConfig(8, 32, 2, 1, 2, 1, "await", "heads")
LENGTHS = (53, 128, 9, 70)


def evict(each, kept):
    """The batch with the keys that a request, or each head of it, keeps: [Hkv, keys] of each."""

    def left(x, rows):
        return torch.stack([x[keep, head] for head, keep in enumerate(rows)], 1)

    k, v = (
        [left(x, rows) for x, rows in zip(source, kept, strict=True)]
        for source in (each.k, each.v)
    )
    return replace(each, k=k, v=v, kv_lens=[len(rows[0]) for rows in kept])


def only(kept, mods, group=3):
    """Mods that see kept keys alone, of the whole request: what the oracle is given."""
    there = torch.zeros(len(kept), len(kept[0]), 256, dtype=torch.bool)
    for b, rows in enumerate(kept):
        for head, keep in enumerate(rows):
            there[b, head, keep] = True
    held = lambda b, h, q, kv: there[b, h // group, kv]  # noqa: E731
    mask = mods.get("mask_mod")
    return {**mods, "mask_mod": held if mask is None else and_masks(held, mask)}


MODS = {"score_mod": alibi(6, "cpu"), "mask_mod": sliding_window(60)}


def plan_of(few, kept, mods, **options):
    given = {"score_mod": kept.score(mods["score_mod"]), "mask_mod": kept.mask(mods["mask_mod"])}
    return plan_for(few, page=4, **given, **options)


@pytest.mark.oldest
@pytest.mark.parametrize("walk", ["program", "warp"])
def test_pages_left_out_of_the_middle(walk):
    """Sinks stay, a gap, and recent keys: StreamingLLM's cache, page by page."""
    about = {"D": 64, "dtype": torch.float16} if walk == "warp" else {}
    each = batch([2] * 4, LENGTHS, 6, 2, **about)
    pages = [[0, *range(max(1, -(-n // 4) - 7), -(-n // 4))] for n in LENGTHS]
    keys = [
        [4 * p + i for p in rows for i in range(4) if 4 * p + i < n]
        for rows, n in zip(pages, LENGTHS, strict=True)
    ]
    left = [torch.tensor([row, row]) for row in keys]
    few = evict(each, left)
    kept = KeptKeys(batch=5, keys=64, page=4, device="cpu")
    for b, rows in enumerate(pages):
        kept.positions[b, : len(rows)] = 4 * torch.tensor(rows)
        kept.evicted[b] = LENGTHS[b] - len(keys[b])
    plan = plan_of(few, kept, MODS, config=WARP if walk == "warp" else SMALL)
    assert_right(run(plan, few), few, exact=each, **only(left, MODS))


@pytest.mark.parametrize("q_len", [1, 3])
def test_each_head_keeps_other_keys(q_len):
    """SnapKV: as many of each head, moved together, and those of the call's queries last."""
    each = batch([q_len] * 4, LENGTHS, 6, 2)
    draw = torch.Generator().manual_seed(1)
    left = []
    for n in LENGTHS:
        rest = n - q_len
        chosen = [torch.randperm(rest, generator=draw)[: rest // 2].sort()[0] for _ in range(2)]
        left.append([torch.cat([each, torch.arange(rest, n)]) for each in chosen])
    few = evict(each, left)
    kept = KeptKeys(batch=5, keys=128, heads=(6, 2), device="cpu")
    for b, rows in enumerate(left):
        kept.positions[b, :, : len(rows[0])] = torch.stack(rows)
        kept.evicted[b] = LENGTHS[b] - len(rows[0])
    mods = {**MODS, "mask_mod": and_masks(causal, lambda b, h, q, kv: (kv + h) % 5 != b)}
    plan = plan_of(few, kept, mods, config=SMALL)
    assert_right(run(plan, few), few, exact=each, **only(left, mods))


def test_pages_that_were_emptied_in_place_are_not_seen():
    """Nothing moves: a page's position falls below 0, and what lies there counts for nothing."""
    each = batch([1] * 4, LENGTHS, 6, 2)
    kept = KeptKeys(batch=5, keys=256, page=4, device="cpu")
    plan = plan_for(each, page=4, config=SMALL, mask_mod=kept.mask())
    assert_right(run(plan, each), each)
    kept.positions[:, 1:4] = -1
    seen = [torch.tensor([key for key in range(n) if not 4 <= key < 16]) for n in LENGTHS]
    left = [[rows] for rows in seen]
    assert_right(run(plan, each), each, **only(left, {}, group=6))


def test_a_bound_of_places_skips_tiles():
    """What a mask of positions cannot: it compares what it loads."""
    each = batch([1] * 4, LENGTHS, 6, 2)
    first = torch.tensor([30, 100, 0, 1], dtype=torch.int32)
    kept = KeptKeys(batch=5, keys=256, page=4, device="cpu")
    late = lambda b, h, q, kv: kv >= first[b]  # noqa: E731
    plan = plan_for(each, page=4, config=SMALL, mask_mod=and_masks(kept.mask(causal), late))
    for b, n in enumerate(first.tolist()):
        each.k[b][:n] = each.v[b][:n] = torch.nan
    got = run(plan, each)
    for b, n in enumerate(first.tolist()):
        each.k[b][:n] = each.v[b][:n] = 0.0
    assert_right(got, each, mask_mod=late)


def test_below_a_tree():
    """A tree's keys are places of the cache, and positions are those of the mods."""
    each = batch([1] * 3, [60, 61, 44], 6, 2)
    for b in (1, 2):
        each.k[b][:24], each.v[b][:24] = each.k[0][:24], each.v[0][:24]
    gone = torch.arange(8, 16)
    left = [[torch.tensor([key for key in range(n) if key not in gone])] * 2 for n in each.kv_lens]
    few = evict(each, left)
    kept = KeptKeys(batch=4, keys=64, page=4, device="cpu")
    kept.positions[:, 2:] += 8
    kept.evicted += 8
    plan = TreePlan(
        batch=4, kv_len=64, page_size=4, heads=(6, 2), head_dim=16, dtype=torch.float32,
        device="cpu", config=SMALL, shared_config=SMALL, cost=EVERY,
        score_mod=kept.score(MODS["score_mod"]), mask_mod=kept.mask(MODS["mask_mod"]),
    )  # fmt: skip
    cache, table = poisoned_pages(few, 4)
    assert plan.update(PrefixTree((-1,), (16,), (0, 0, 0)), table).shared
    out, lse = plan.run(
        few.q[:, None], cache, seq_lens=few.numbers(few.kv_lens), block_table=table
    )
    assert_right((out[:, 0], lse[:, 0]), few, exact=each, **only(left, MODS))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"keys": 0}, "keys=0"),
        ({"heads": (6, 4)}, "multiple of Hkv"),
        ({"heads": 6}, "heads is 6"),
    ],
)
def test_bad_sizes_are_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        KeptKeys(**{"batch": 1, "keys": 16, "device": "cpu", **wrong})


def test_tables_that_were_made_in_inference_mode_are_written_outside():
    with torch.inference_mode():
        kept = KeptKeys(batch=1, keys=16, device="cpu")
    kept.positions[0, 3:] += 5
    kept.evicted += 5
    assert kept.positions[0, 2:4].tolist() == [2, 8]
