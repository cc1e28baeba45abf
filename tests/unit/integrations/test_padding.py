"""The mask of a padded batch that decodes is made once, and compared in every step."""

import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import sliding_window
from flexattn.integrations import decode_masks
from flexattn.integrations.decode_masks import decoding_mask
from flexattn.integrations.transformers import make_mask
from flexattn.problem.mask_lists import known_class
from tests.support import Operations


@pytest.fixture(autouse=True)
def forgotten():
    decode_masks._batches.clear()


def left(*starts, keys=200):
    return torch.arange(keys) >= torch.tensor(starts)[:, None]


def grown(seen):
    return torch.nn.functional.pad(seen, (0, 1), value=True)


def check(mask, seen):
    """The keys that it keeps are those that are seen, and so are the blocks that it lists."""
    B, keys = seen.shape
    kept = mask.mask_mod(torch.arange(B)[:, None], torch.tensor(0), 0, torch.arange(keys))
    assert torch.equal(kept, seen)
    wanted = create_block_mask(lambda b, h, q, kv: seen[b, kv], B, None, 1, keys, "cpu")
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    assert mask.seq_lengths == (1, keys) and known_class(mask)
    assert torch.equal(mask.q_num_blocks, wanted.to_dense()[:, :, 0])


def test_every_step_has_the_mask_of_its_keys():
    seen = left(0, 150, 30, keys=250)
    for _ in range(12):  # over the end of a block
        check(decoding_mask(seen), seen)
        seen = grown(seen)


def test_a_step_compares_and_does_nothing_else():
    seen = left(0, 150, 30)
    first = decoding_mask(seen)
    with Operations() as operations:
        mask = decoding_mask(grown(seen))
    assert operations.found == {"constant_pad_nd": 1, "equal": 1}
    assert mask.kv_indices is first.kv_indices and mask.mask_mod is first.mask_mod
    assert decoding_mask(seen.clone()) is first  # as the prompt that is answered again


def test_another_padding_is_another_mask():
    """Masks that are still held keep what they were made of."""
    one, other, none = left(0, 150), left(20, 0), left(0, 0)
    holes = one.clone()
    holes[0, 170:190] = False
    masks = [decoding_mask(each) for each in (one, other, holes)]
    assert decoding_mask(none) is None
    masks.append(decoding_mask(left(0, 150, 3)))
    for mask, seen in zip(masks, (one, other, holes, left(0, 150, 3)), strict=True):
        check(mask, seen)


def test_who_writes_into_its_own_mask_changes_no_other():
    seen = left(0, 150)
    mask = decoding_mask(seen)
    seen[1, :160] = False
    check(mask, left(0, 150))
    check(decoding_mask(seen), left(0, 160))


def test_a_newest_key_that_is_removed_and_a_row_without_keys():
    seen = left(0, 300, keys=256)
    seen[0, 255] = False
    check(decoding_mask(seen), seen)
    later = grown(seen)
    check(decoding_mask(later), later)


def test_there_is_room_for_more_keys_than_were_foreseen(monkeypatch):
    monkeypatch.setattr(decode_masks, "_ROOM", 100)
    seen = left(0, 40, keys=120)
    for keys in (120, 256, 257, 500):
        seen = left(0, 40, keys=keys)
        check(decoding_mask(seen), seen)


def test_what_inference_mode_made_serves_outside_of_it():
    with torch.inference_mode():
        mask = decoding_mask(left(0, 150))
    assert not mask.kv_indices.is_inference() and decoding_mask(left(0, 150)) is mask
    captured = mask.mask_mod.__closure__[0].cell_contents
    assert not captured.is_inference()


STEP = {"batch_size": 2, "q_length": 1, "kv_length": 200, "q_offset": 199}


@pytest.mark.parametrize("more", [{}, {"local_size": 200}], ids=str)
def test_the_mask_of_a_step_of_a_padded_batch(more):
    given = {**STEP, "attention_mask": left(0, 150), **more}
    first = make_mask(**given)
    with Operations() as operations:
        second = make_mask(**given)
    assert operations.found == {"equal": 1} and first is second


@pytest.mark.parametrize(
    "more",
    [
        {"kv_offset": 140, "kv_length": 60, "local_size": 60},
        {"local_size": 100},
        {"attention_mask": left(0, 150).int()},
        {"kv_length": 220},
    ],
    ids=["keys that left a window", "a window", "no bool", "keys to come"],
)
def test_other_masks_are_made_for_their_step(more):
    given = {**STEP, "attention_mask": left(0, 150), "mask_function": sliding_window(99), **more}
    assert make_mask(**given) is not make_mask(**given)
    assert not any(each.padding for _, each in decode_masks._batches.items())


def test_a_padding_that_left_the_window_is_no_mask():
    """The whole padding was asked, and applied for as long as its prompt was answered."""
    given = {**STEP, "attention_mask": left(0, 150), "mask_function": sliding_window(39)}
    for first, none in ((149, False), (150, True), (160, True)):
        more = {"kv_offset": first, "kv_length": 200 - first, "local_size": 200 - first}
        assert (make_mask(**{**given, **more}) is None) == none
