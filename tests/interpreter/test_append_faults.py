"""What an append may not do, in the interpreter: read or write what is not its own, lose a key."""

import random

import pytest
import torch

from flexattn.errors import InputError, UnsupportedError
from flexattn.serving import AppendPlan, Rope
from flexattn.settings import override
from tests.appending import empty_cache, empty_scales, new_tokens
from tests.watched_memory import watched

E4M3 = torch.float8_e4m3fn
PAGES, PAGE = 7, 4
WILD = [0, 1, 5, 27, 28, -1, -5, 10**6, 2**31 - 1]


def made(scaled=False, Hkv=3, D=16, rope=None, **options):
    """A plan, new tokens, their cache with its scales, and the tensors that are its own."""
    k, v = new_tokens(6, Hkv, D, D, torch.bfloat16)
    cache = empty_cache(PAGES, PAGE, Hkv, (D, D), E4M3, "NHD")
    call, own = {}, [k, v, *cache]
    if scaled:
        k_scale, v_scale = empty_scales(scaled, PAGES, PAGE, Hkv, "NHD")
        call = {"k_scale": k_scale, "v_scale": v_scale}
    plan = AppendPlan(
        heads=Hkv, head_dim=D, page_size=PAGE, kv_dtype=E4M3, scaled=scaled, rope=rope,
        device="cpu", **options,
    )  # fmt: skip
    if rope is not None and rope.base is not None:
        own.append(plan._inv_freq)
    return plan, (k, v, cache), call, own


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("Hkv", [3, 600])
def test_heads_that_there_are_not_are_not_read(Hkv, interleaved):
    """Of 600 heads a program has 512, then 88: it read 424 more, behind the last token's keys."""
    plan, given, call, own = made("token", Hkv, rope=Rope(16, interleaved, 100.0))
    call |= {"slot_mapping": torch.arange(6), "positions": torch.arange(6)}
    with watched([*own, *call.values()]):
        plan.run(*given, **call)
    assert not given[2][0].view(torch.uint8)[0].eq(0x5B).all()


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("scaled", ["page", "token_head"])
def test_lengths_and_pages_that_change_under_a_launch(scaled, ragged):
    """At every load others may have written anything: it stays in what is its own."""
    plan, given, call, own = made(
        scaled, rope=Rope(8, base=100.0) if ragged else None, slots=None, ragged=ragged
    )
    call |= {
        "block_table": torch.arange(12, dtype=torch.int32).view(3, 4) % PAGES,
        "seq_lens": torch.tensor([2, 9, 16], dtype=torch.int32),
    }
    if ragged:
        call["cu_seqlens_q"] = torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    draw = random.Random(1)

    def meddle():
        for name in ("block_table", "seq_lens", "cu_seqlens_q"):
            if name in call and draw.random() < 0.3:
                each = call[name].view(-1)
                each[draw.randrange(each.numel())] = draw.choice(WILD)

    with override(check=False):
        for _ in range(5):
            with watched([*own, *call.values()], meddle):
                plan.run(*given, **call)


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
def test_checked_mode_names_the_page_that_a_key_is_lost_for(ragged):
    """What no new token needs may say anything: older pages are not looked at, nor later ones."""
    plan, given, call, _ = made(slots=None, ragged=ragged)
    call |= {
        "block_table": torch.tensor([[-1, 1, -1], [2, 6, 99], [-1, -1, -1]], dtype=torch.int32),
        "seq_lens": torch.tensor([6, 8, 0], dtype=torch.int32),
    }
    if ragged:
        call["cu_seqlens_q"] = torch.tensor([0, 2, 6, 6], dtype=torch.int32)
    with override(check=True):
        plan.run(*given, **call)
        for b, place, page in ((0, 1, -1), (1, 1, PAGES)):
            table = call["block_table"].clone()
            table[b, place] = page
            with pytest.raises(InputError, match=rf"block_table\[{b}, {place}\] is {page}"):
                plan.run(*given, **call | {"block_table": table})


def test_checked_mode_asks_no_position_of_a_token_that_is_left_out():
    """A graph's padding has slots of -1, and positions that nobody set."""
    plan, given, call, _ = made(rope=Rope(8))
    call |= {name: torch.ones(10, 4) for name in ("cos", "sin")}
    slots = torch.tensor([3, 4, 5, -1, -1, -1])
    positions = torch.tensor([3, 4, 9, -7, 10, 2**40])
    with override(check=True):
        plan.run(*given, slot_mapping=slots, positions=positions, **call)
        with pytest.raises(InputError, match="positions from 3 to 10"):
            plan.run(*given, slot_mapping=slots, positions=positions + positions.eq(9), **call)


def test_checked_mode_asks_for_a_turn_of_each_key():
    plan, given, call, _ = made(rope=Rope(8), slots=None)
    call |= {name: torch.ones(8, 4) for name in ("cos", "sin")}
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    with override(check=True):
        for length in (8, 9):
            call |= {"block_table": table, "seq_lens": torch.tensor([3, length]).int()}
            if length == 9:
                with pytest.raises(InputError, match="request of 9 keys"):
                    plan.run(*given, **call)
            else:
                plan.run(*given, **call)


def test_a_batch_without_requests_stores_nothing():
    for ragged in (False, True):
        plan, (k, v, cache), call, _ = made(slots=None, ragged=ragged)
        call |= {
            "block_table": torch.zeros(0, 3, dtype=torch.int32),
            "seq_lens": torch.zeros(0, dtype=torch.int32),
        }
        if ragged:
            call["cu_seqlens_q"] = torch.zeros(1, dtype=torch.int32)
        plan.run(k[:0], v[:0], cache, **call)
        assert (cache[0].view(torch.uint8) == 0x5B).all()
        with pytest.raises(InputError, match="6 tokens of 0 requests"):
            plan.run(k, v, cache, **call)


def test_keys_that_want_a_gradient_are_refused():
    plan, (k, v, cache), _, _ = made()
    call = {"slot_mapping": torch.arange(6)}
    learned = v.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="v requires grad"):
        plan.run(k, learned, cache, **call)
    with torch.no_grad():
        plan.run(k, learned, cache, **call)


def test_launches_that_another_thread_forgets_are_prepared_anew():
    """Between two looks for a known launch another thread forgot all, and nothing was stored."""
    plan, (k, v, cache), _, _ = made()

    class Forgotten(dict):
        def __contains__(self, key):
            found = super().__contains__(key)
            self.clear()
            return found

    call = {"slot_mapping": torch.arange(6)}
    plan.run(k, v, cache, **call)
    plan._ready = Forgotten(plan._ready)
    cache[0].view(torch.uint8).fill_(0x5B)
    plan.run(k, v, cache, **call)
    assert not (cache[0].view(torch.uint8) == 0x5B).all()
