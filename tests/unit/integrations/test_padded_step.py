"""A step of a padded batch copies its padding to where masks read it, and waits for nothing."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from flexattn import create_block_mask
from flexattn.catalogue import sliding_window
from flexattn.integrations import decode_masks
from flexattn.integrations.decode_masks import FEW_KEYS, shared_mask
from flexattn.integrations.transformers import attend_transformers, make_mask
from flexattn.problem.mask_lists import known_class
from tests.support import Operations, inputs

LAYER = SimpleNamespace(is_causal=True, training=False)


@pytest.fixture(autouse=True)
def as_generate_runs():
    decode_masks._batches.clear()
    with torch.no_grad():
        yield


def left(*starts, keys=200):
    return torch.arange(keys) >= torch.tensor(starts)[:, None]


def right(*ends, keys=200, prompt=200):
    return ~left(*ends, keys=keys) | (torch.arange(keys) >= prompt)


def prompt(seen):
    """The mask of a prompt, which is what goes before the steps of a batch."""
    B, keys = seen.shape
    return make_mask(B, keys, keys, attention_mask=seen)


def step(seen, first=0, **more):
    """The mask of a row that sees the keys from the first one on, itself the last of them."""
    B, keys = seen.shape
    return make_mask(B, 1, keys - first, keys - 1, first, attention_mask=seen, **more)


def check(mask, seen):
    """It keeps the keys that are seen, and lists their blocks."""
    B, keys = seen.shape
    kept = mask.mask_mod(torch.arange(B)[:, None], torch.tensor(0), 0, torch.arange(keys))
    assert torch.equal(kept, seen)
    needed = create_block_mask(lambda b, h, q, kv: seen[b, kv], B, None, 1, keys, "cpu")
    assert (mask.to_dense() >= needed.to_dense()).all() and mask.kv_num_blocks[0] == -(
        -keys // 128
    )
    assert mask.seq_lengths == (1, keys) and known_class(mask)
    assert mask.q_num_blocks.shape[-1] == -(-keys // 128)


PADDINGS = {
    "left": left(0, 150, 30, keys=250),
    "right": right(250, 150, 220, keys=250),
    "holes": left(0, 20, 30, keys=250) & (torch.arange(250) % 7 > 0),
    "a row without keys": left(0, 250, 30, keys=250),
    "without the newest key": left(0, 150, 30, keys=250) & (torch.arange(250) < 249),
}


@pytest.mark.parametrize("seen", PADDINGS.values(), ids=PADDINGS)
def test_every_step_has_the_mask_of_its_keys(seen):
    for _ in range(12):  # over the end of a block
        check(step(seen), seen)
        seen = pad(seen, (0, 1), value=True)


def test_a_step_copies_its_padding_and_does_nothing_else():
    """A step of another padding takes the masks of the first, and so their launches."""
    steps = [left(0, 150, keys=keys) for keys in (200, 201, 202)]
    first = [shared_mask(step(each)) for each in steps]
    for starts in ((0, 150), (17, 0)):
        prompt(left(*starts, keys=199))
        step(left(*starts))
        steps = [left(*starts, keys=keys) for keys in (201, 202)]
        with Operations() as operations:
            again = [shared_mask(step(each)) for each in steps]
        assert operations.found == {"copy_": 2}
        assert all(one is other for one, other in zip(again, first[1:], strict=True))


def test_a_mask_that_is_held_keeps_what_it_was_made_of():
    """So does its mask_mod alone, and what was made of it."""
    paddings = [left(0, start) for start in (150, 140, 130, 120, 110, 100)]
    masks = [step(each) for each in paddings]
    mods = [step(each).mask_mod for each in paddings]
    moved = [step(each).to("cpu") for each in paddings]
    for mask, mod, other, seen in zip(masks, mods, moved, paddings, strict=True):
        check(mask, seen)
        for found in (mod, other.mask_mod):
            assert torch.equal(found(torch.arange(2)[:, None], 0, 0, torch.arange(200)), seen)


def test_a_mask_that_is_given_another_mask_mod_keeps_that():
    mask = step(left(0, 150))
    mask.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < 30
    q, k, v = inputs(2, 4, 2, 1, 200)
    got, _ = attend_transformers(LAYER, q, k, v, mask)
    wanted, _ = attend_transformers(LAYER, q, k[:, :, :30], v[:, :, :30], None)
    torch.testing.assert_close(got, wanted)


def test_a_mask_that_is_given_other_lists_keeps_those():
    """They were ignored: launches were looked up by the table's own mask, which has its own."""
    q, k, v = inputs(2, 4, 2, 1, 200)
    mask = step(left(0, 0) & (torch.arange(200) > 2))
    attend_transformers(LAYER, q, k, v, mask)
    mask.kv_num_blocks = torch.ones_like(mask.kv_num_blocks)
    got, _ = attend_transformers(LAYER, q, k, v, mask)
    wanted, _ = attend_transformers(LAYER, q, k[:, :, 3:128], v[:, :, 3:128], None)
    torch.testing.assert_close(got, wanted)
    other = step(left(0, 150))
    other.seq_lengths = (1, 199)
    assert shared_mask(other) is other


def test_a_padding_that_is_changed_in_place():
    seen = left(0, 150)
    mask = step(seen)
    seen[0, 20:40] = False
    check(mask, left(0, 150))
    check(step(seen), seen)


def test_a_batch_without_padding_has_no_mask_whatever_went_before():
    """Its first step may follow the last one of a padded batch."""
    step(left(0, 150, keys=200))
    prompt(left(0, 0, keys=200))
    for keys in (201, 202, 203):
        assert step(left(0, 0, keys=keys)) is None
    check(step(left(0, 3, keys=204)), left(0, 3, keys=204))
    assert step(left(0, 0, keys=300)) is None  # that of a batch which had no prompt


def test_two_kinds_of_masks_of_a_forward():
    """A layer with a window sees what is left in its cache, all of which is near enough."""
    for keys in range(200, 206):
        seen = left(0, 180, keys=keys)
        check(whole := step(seen), seen)
        more = {"local_size": 60, "mask_function": sliding_window(59)}
        check(near := step(seen, keys - 60, **more), seen[:, -60:])
        assert shared_mask(near) is not shared_mask(whole)


@pytest.mark.parametrize(
    "more",
    [
        {"local_size": 100},
        {"local_size": 100, "config": SimpleNamespace(attention_chunk_size=100)},
        {"attention_mask": left(0, 150).int()},
        {"attention_mask": left(0, 150, keys=190)},
        {"kv_length": 220},
        {"q_offset": torch.tensor(199)},
        {"allow_is_causal_skip": False},
        {"q_length": 2, "q_offset": 198},
    ],
    ids=[
        "a window", "a chunk", "no bool", "short", "keys to come", "static", "own function",
        "two rows",
    ],
)  # fmt: skip
def test_other_masks_are_made_for_their_step(more):
    given = {"batch_size": 2, "q_length": 1, "kv_length": 200, "q_offset": 199}
    mask = make_mask(**{**given, "attention_mask": left(0, 150), **more})
    assert mask is not None and shared_mask(mask) is mask and not decode_masks._batches.items()


def test_many_keys_are_compared_and_those_before_the_first_are_not_listed():
    seen = left(0, 1500, keys=FEW_KEYS // 2 + 1)
    mask = step(seen)
    assert mask is step(seen.clone()) and mask.kv_num_blocks.flatten().tolist() == [33, 22]


@pytest.mark.parametrize("cap", [None, 2.0])
def test_steps_of_batches_in_turns_attend_to_their_keys(cap):
    """Of other sizes, other paddings, and in another order of the prompts, as beams are."""
    batches = [left(0, 150), left(20, 0), right(200, 90), left(0, 0, 31), left(0, 0)]
    for _ in range(4):
        for i, seen in enumerate(batches):
            q, k, v = inputs(len(seen), 4, 2, 1, seen.shape[1], dtype=torch.float64)
            got, _ = attend_transformers(LAYER, q, k, v, step(seen), softcap=cap)
            scores = q @ k.repeat_interleave(2, 1).mT / 4
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            wanted = scores.softmax(-1) @ v.repeat_interleave(2, 1)
            torch.testing.assert_close(got, wanted.transpose(1, 2))
            batches[i] = pad(seen.flip(0), (0, 1), value=True)


def test_a_thread_writes_to_no_mask_of_another():
    def steps(start):
        with torch.no_grad():
            for keys in range(200, 230):
                seen = left(start, 0, keys=keys)
                check(step(seen), seen)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(steps, (3, 50, 100, 150)))


def test_each_step_may_run_in_another_thread():
    """As a server's do that runs them in a pool: they take the masks of the steps before."""
    first = shared_mask(step(left(0, 150)))
    with ThreadPoolExecutor(1) as pool:
        assert (
            pool.submit(torch.no_grad()(lambda: shared_mask(step(left(20, 0))))).result() is first
        )


def test_what_inference_mode_made_serves_outside_of_it():
    with torch.inference_mode():
        mask = shared_mask(step(left(0, 150)))
    assert not mask.kv_indices.is_inference() and shared_mask(step(left(20, 0))) is mask
    assert not mask.mask_mod.__closure__[0].cell_contents.is_inference()
