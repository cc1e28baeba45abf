"""A mask's lists by key: those of the lists that a forward reads, whatever the mask has."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flexattn
from flexattn.block_mask.lists import lazy_mask
from flexattn.catalogue import causal
from flexattn.frontend.compiled import op
from flexattn.frontend.compiled.op import remember_by_key, remember_look
from flexattn.problem.mask_lists import dense_blocks, mask_class
from flexattn.runtime import key_lists
from flexattn.runtime.key_lists import BothLists, has_more_rows


def holes(b, h, q, k):
    return ((q // 16 + k // 16 + h) % 2 == 0) | (q == k)


def made(mask_mod, B=None, H=None, L=87, S=103, block=16):
    mask = flexattn.create_block_mask(mask_mod, B, H, L, S, "cpu", block)
    mask_class(mask)
    return mask


@pytest.mark.parametrize("mask_mod", [causal, holes], ids=["causal", "holes"])
def test_they_say_the_same_in_both_directions(mask_mod):
    mask = made(mask_mod, 2, 3)
    both = BothLists.of(mask)
    columns, rows = -(-103 // 16), -(-87 // 16)
    for kind in ("kv", "full"):
        one, other = (
            dense_blocks(getattr(x, f"{kind}_num"), getattr(x, f"{kind}_idx"), size)
            for x, size in ((both.by_query, columns), (both.by_key, rows))
        )
        assert torch.equal(one, other.mT)
    assert all(x is None or x.is_contiguous() for x in both.by_key)
    assert BothLists.of(mask).by_key.kv_num is both.by_key.kv_num


def test_runs_where_both_directions_have_them():
    both = BothLists.of(made(causal))
    assert both.by_query.runs is not None and both.by_key.runs is not None
    assert sorted(both.read(True)) == ["KV_RUNS", "Q_RUNS"]
    assert "FULL_Q_IDX" in both.read(False) and "Q_NUM" in both.read(False)
    none = BothLists.of(made(holes, 1, 2))
    assert none.by_query.runs is None and none.by_key.runs is None


def test_rows_that_join_up_and_columns_that_do_not():
    def bands(b, h, q, k):  # of each row one block, of each column two that are apart
        return (q // 16) % 3 == k // 16

    both = BothLists.of(made(bands))
    assert both.by_query.runs is None and both.by_key.runs is None


def test_lists_that_were_written_since_are_read_anew():
    """A mask's own lists by key are made once, and stay as they were."""
    mask = made(holes, 1, 2)
    before = BothLists.of(mask).by_key.kv_num.clone()
    assert mask.q_num_blocks is not None
    mask.full_kv_num_blocks.zero_()
    after = BothLists.of(mask).by_key
    assert not after.full_num.any() and torch.equal(after.kv_num, before)


def test_a_mask_without_lists_by_key():
    mask = made(holes, 1, 2)
    alone = flexattn.BlockMask(
        mask.seq_lengths, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks,
        mask.full_kv_indices, None, None, None, None, mask.BLOCK_SIZE, mask.mask_mod,
    )  # fmt: skip
    for one, other in zip(BothLists.of(alone).by_key, BothLists.of(mask).by_key, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("mask_mod", [causal, holes], ids=["causal", "holes"])
def test_rows_past_the_last_query_are_in_no_list(mask_mod):
    """Hopper's backward went there, and added to memory that is not its own."""
    mask, shorter = made(mask_mod, L=96), made(mask_mod, L=192)
    assert not has_more_rows(mask)
    shorter.seq_lengths = mask.seq_lengths
    assert has_more_rows(shorter)
    for one, other in zip(BothLists.of(shorter).by_key, BothLists.of(mask).by_key, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    order, wanted = (BothLists.of(x).read(False, True)["Q_ORDER"] for x in (shorter, mask))
    assert torch.equal(order[..., : wanted.shape[-1]], wanted)


def test_a_graph_s_lists_by_key_are_not_taken_where_they_name_such_rows():
    shorter = made(holes, L=192)
    given = [shorter.q_num_blocks, shorter.q_indices]
    given += [shorter.full_q_num_blocks, shorter.full_q_indices]
    shorter.seq_lengths = (96, 103)
    remember_by_key(shorter, [shorter.kv_num_blocks], given)
    wanted = BothLists.of(made(holes, L=96)).by_key.kv_num
    assert torch.equal(BothLists.of(shorter).by_key.kv_num, wanted)


@pytest.mark.parametrize("mask_mod", [causal, holes], ids=["causal", "holes"])
def test_lists_by_key_that_no_graph_made_are_made_once(mask_mod, monkeypatch):
    """For each content of the lists by query, and for each length that these are read with."""
    whole = flexattn.create_block_mask(mask_mod, None, None, 96, 103, "cpu", 16)
    lists = [whole.kv_num_blocks, whole.kv_indices]
    lists += [whole.full_kv_num_blocks, whole.full_kv_indices]
    waited = []
    monkeypatch.setattr(key_lists, "_await", waited.append)

    def found(looks=True, rows=96):
        mask = lazy_mask(tuple(lists), (16, 16), mask_mod, (rows, 103))
        remember_look(mask, lists, SimpleNamespace(looks=looks, backward=False))
        remember_by_key(mask, lists, [])
        return BothLists.of(mask).by_key

    def equal(got, rows=96):
        mask = lazy_mask(tuple(lists), (16, 16), mask_mod, (rows, 103))
        wanted = BothLists.of(mask).by_key[:4]
        return all(x is y is None or torch.equal(x, y) for x, y in zip(got, wanted, strict=False))

    # A graph's own lists live as long as a call: nothing is kept with them, nobody waits.
    assert equal(found(looks=False)) and len(waited) == 1
    once = found()
    assert equal(once) and found().kv_num is once.kv_num
    assert equal(found(rows=48), 48) and not equal(once, 48)
    lists[2].zero_()
    again = found()
    assert equal(again) and again.kv_num is not once.kv_num


def test_lists_of_inference_mode_are_never_kept():
    """They do not tell when they are written to."""
    with torch.inference_mode():
        mask = torch_flex.create_block_mask(holes, None, None, 96, 96, "cpu", 16)
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    for _ in range(2):
        remember_look(mask, lists, SimpleNamespace(looks=True, backward=False))
        remember_by_key(mask, lists, [])
        with torch.inference_mode():
            lists[2].zero_()
    assert (
        getattr(lists[0], op._LOOK).by_key is None and not BothLists.of(mask).by_key.full_num.any()
    )


def test_what_is_kept_has_been_waited_for(monkeypatch):
    """Another stream may read it next: it waits for no kernel of the stream that made it."""
    waited = []
    monkeypatch.setattr(key_lists, "_await", waited.append)
    mask = flexattn.create_block_mask(causal, None, None, 300, 300, "cpu")
    found = BothLists.of(mask)
    assert [each is found.by_key.kv_num for each in waited] == [True]
    found.read(False, True)
    assert [each is found.by_key.kv_num for each in waited] == [True, True]
    BothLists.of(mask).read(False, True)
    assert len(waited) == 2
