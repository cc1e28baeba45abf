"""The mask of a step of a static cache: what it keeps, what it lists, what making it asks."""

import importlib

import pytest
import torch
from hypothesis import given, settings, strategies as st

from flexattn import create_block_mask
from flexattn.block_mask import lists
from flexattn.catalogue import causal, sliding_window
from flexattn.integrations import decode_masks
from flexattn.integrations.decode_masks import not_after
from flexattn.integrations.transformers import attend_transformers, make_mask
from flexattn.problem.mask_lists import known_class
from tests.support import Operations


@pytest.fixture(autouse=True)
def forgotten():
    lists._kept.clear()


def made(keys, at, seen=None, batch=2, **more):
    return make_mask(
        batch, 1, keys, at, attention_mask=seen, **{"allow_is_causal_skip": False, **more}
    )


def kept(mask, B, keys):
    return mask.mask_mod(
        torch.arange(B)[:, None], torch.tensor(0), torch.tensor(0), torch.arange(keys)
    ).expand(B, keys)


def check(mask, wanted):
    """It keeps these keys, lists every block of theirs once, and its lists by key agree."""
    B, keys = wanted.shape
    assert torch.equal(kept(mask, B, keys), wanted)
    needed = create_block_mask(lambda b, h, q, kv: wanted[b, kv], B, None, 1, keys, "cpu")
    listed = mask.to_dense().expand(B, -1, -1, -1).bool()
    assert (listed >= needed.to_dense().bool()).all()
    blocks = -(-keys // 128)
    assert torch.equal(
        mask.kv_indices.sort(-1).values, torch.arange(blocks).expand_as(mask.kv_indices)
    )
    assert torch.equal(mask.q_num_blocks.expand(B, -1, -1).bool(), listed[:, :, 0])
    assert mask.seq_lengths == (1, keys) and known_class(mask) and mask.contiguous() is mask
    return listed.sum(-1).flatten().tolist()


@pytest.mark.parametrize("few", [0, 8192], ids=["many keys", "few keys"])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_sees_the_keys_up_to_its_own_but_for_padding(few, data):
    """Padding may be shorter or longer than what was seen, have holes, and leave no key."""
    keys = data.draw(st.integers(1, 700))
    at = data.draw(st.integers(0, keys - 1))
    width = data.draw(st.integers(1, keys + 20))
    starts = torch.tensor(data.draw(st.lists(st.integers(0, width), min_size=2, max_size=2)))
    seen = torch.arange(width) >= starts[:, None]
    seen[0, data.draw(st.integers(0, width - 1))] ^= True
    place = torch.tensor(at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_masks, "FEW_KEYS", few)
        masks = made(keys, place, seen), made(keys, place)
    place += 1  # as a static cache does before the kernel runs
    before = (torch.arange(keys) <= at).expand(2, keys)
    padded = torch.nn.functional.pad(seen, (0, max(0, keys - width)))[:, :keys]
    listed = check(masks[0], before & padded)
    assert check(masks[1], before) == [at // 128 + 1] * 2
    first = [int(row.nonzero()[0]) if row.any() and not few else 0 for row in padded]
    assert listed == [max(0, at // 128 + 1 - each // 128) for each in first]


def test_a_window_lists_the_blocks_up_to_its_newest_key():
    """Its cache counts in Python: until it is full keys are to come, and then they move on."""
    wide, window = 200, {"local_size": 200}
    for at in (5, 127, 128, 198, 199, 200, 450):
        offset = max(at - wide + 1, 0)
        seen = torch.arange(at + 1) >= torch.tensor([0, 150])[:, None]
        mask = made(wide, at, seen, kv_offset=offset, **window)
        places = torch.arange(wide) + offset
        wanted = (places <= at) & (places >= torch.tensor([0, 150])[:, None])
        check(mask, wanted)
        plain = made(wide, at, kv_offset=offset, **window)
        check(plain, (places <= at).expand(2, -1))


@pytest.mark.parametrize(
    "more",
    [
        {"mask_function": lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0},
        {"mask_function": sliding_window(20), "local_size": 21},
        {
            "mask_function": lambda b, h, q_idx, kv_idx: q_idx // 100 == kv_idx // 100,
            "kv_offset": 7,
        },
    ],
    ids=["keys after the row", "a window on all keys", "another offset"],
)
@pytest.mark.parametrize("at", [310, torch.tensor(310)], ids=["int", "tensor"])
def test_other_functions_are_evaluated(more, at):
    seen = torch.arange(330) >= torch.tensor([0, 150])[:, None]
    mask = made(300, at, seen, **more)
    places = torch.arange(300) + more.get("kv_offset", 0)
    wanted = more["mask_function"](0, 0, torch.tensor(310), places) & seen[:, places]
    check(mask, wanted)
    assert torch.equal(mask.to_dense(), create_block_mask(
        lambda b, h, q, kv: wanted[b, kv], 2, None, 1, 300, "cpu").to_dense())  # fmt: skip


PADDED = torch.arange(200) >= torch.tensor([0, 150])[:, None]
WINDOW = {"local_size": 300, "kv_offset": 40}


@pytest.mark.parametrize(
    ("keys", "at", "seen", "more", "most"),
    [
        (300, torch.tensor(199), None, {}, {"index_select": 1}),
        (300, torch.tensor(199), PADDED, {}, {"index_select": 1, "cat": 1}),
        (
            5000, torch.tensor(199), PADDED, {},
            {"cat": 1, "index_select": 3, "argmax": 1, "sub.Tensor": 1, "clamp_": 1},
        ),
        (300, 199, None, WINDOW, {"full": 2}),
        (300, 199, PADDED, WINDOW, {"full": 2, "cat": 1}),
    ],
    ids=["full", "few keys, padded", "many keys, padded", "window", "window, padded"],
)  # fmt: skip
def test_a_step_takes_few_operations_and_reads_nothing_back(keys, at, seen, more, most):
    made(keys, at, seen, **more)
    with Operations() as operations:
        made(keys, at, seen, **more)
    assert operations.found == most


def test_all_that_changes_is_in_tensors_of_the_same_sizes_and_strides():
    """Anything else would have torch record another CUDA graph, or compile another kernel."""

    def facts(at, **more):
        seen = torch.ones(2, int(at) + 1, dtype=torch.bool)
        mask = made(300, at, seen, **more)
        found = [mask.kv_num_blocks, mask.kv_indices]
        functions = [mask.mask_mod]
        while functions:
            for cell in functions.pop().__closure__ or ():
                held = cell.cell_contents
                functions += [held] if callable(held) and held is not causal else []
                found += [held] if isinstance(held, torch.Tensor) else []
                assert not isinstance(held, int)
        return [(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in found]

    assert facts(torch.tensor(199)) == facts(torch.tensor(200))
    assert facts(199, **WINDOW) == facts(200, **WINDOW | {"kv_offset": 41})


def test_lists_that_never_change_are_read_where_they_lie():
    importlib.import_module("torch._dynamo")  # as a static cache of transformers does
    one, other = made(300, torch.tensor(5)), made(300, torch.tensor(290))
    assert one.kv_indices is other.kv_indices and not one.kv_indices.is_inference()
    assert one.kv_indices._dynamo_static_input_type == "unguarded"


def test_cross_attention_of_a_step_may_still_leave_its_mask_out():
    """Of an encoder's keys: transformers asks for no causal mask then, and forbids its absence."""
    call = {"mask_function": lambda b, h, q, kv: q >= 0, "allow_is_bidirectional_skip": True}
    assert made(9, 0, torch.ones(2, 9, dtype=torch.bool), **call) is None
    assert made(9, 0, **call) is None and made(9, torch.tensor(4), **call) is None
    seen = torch.arange(9) >= torch.tensor([0, 4])[:, None]
    check(made(9, 0, seen, **call), seen)


def test_transformers_functions_that_see_no_key_after_the_row():
    masking = pytest.importorskip("transformers.masking_utils", reason="make test installs it")
    plain = masking.causal_mask_function
    window = masking.sliding_window_causal_mask_function(5)
    chunk = masking.chunked_causal_mask_function(5, torch.zeros(1, dtype=int))
    packed = masking.packed_sequence_mask_function(torch.zeros(1, 4, dtype=int))
    for function in (causal, plain, window, chunk, masking.and_masks(packed, window)):
        assert not_after(function)
    both = masking.or_masks(plain, packed)
    for function in (packed, both, masking.and_masks(packed, both), sliding_window(3), None, 3):
        assert not not_after(function)


@pytest.mark.parametrize("at", [9, torch.tensor(9)], ids=["number", "tensor"])
def test_padding_of_requests_is_no_cause_for_advice(at, said):
    """Blocks of all requests are in the lists on purpose, and nobody calls create_block_mask."""
    seen = torch.ones(2, 10, dtype=torch.bool)
    seen[1, :3] = False
    mask = made(256, at, seen)
    q, (k, v) = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 4, 256, 16)
    out, _ = attend_transformers(torch.nn.Module(), q, k, v, mask)
    kept_keys = torch.arange(256) < 10
    kept_keys = kept_keys & ~((torch.arange(256) < 3) & torch.tensor([[False], [True]]))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=kept_keys[:, None, None]
    )
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    assert said() == []


def test_rows_that_see_ahead_see_no_key_behind_the_padding():
    """A mask that is shorter than a static cache removes what was not written yet."""
    seen = torch.ones(1, 2, dtype=torch.bool)

    def all_keys(b, h, q_idx, kv_idx):
        return q_idx >= 0

    mask = make_mask(
        1, 2, 7, 0, mask_function=all_keys, attention_mask=seen, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
    )  # fmt: skip
    assert mask is not None and kept(mask, 1, 7).tolist() == [[True] * 2 + [False] * 5]
