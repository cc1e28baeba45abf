"""What a batch may not do, in the interpreter: nothing outside of the cache is read, runs end."""

import random
import threading
import time
from dataclasses import replace

import pytest
import torch

import flexattn.serving.decode as decoding
from flexattn.catalogue import causal, sliding_window
from flexattn.device import INTERPRETER
from flexattn.errors import InputError
from flexattn.runtime.build import TritonLaunch
from flexattn.serving import DecodePlan, ServingConfig, flex_decode, kernels
from flexattn.settings import override
from tests.serving import SMALL, assert_right, batch, plan_for, poisoned_pages
from tests.watched_memory import watched

INVARIANT = ServingConfig(16, 128, 4, 1, 1, 1, "await", "heads")
PLANS = {
    "last": (SMALL, {}),
    "launch": (ServingConfig(16, 16, 4, 2, combine="launch"), {"mask_mod": sliding_window(40)}),
    "chunks": (SMALL, {"total_q": 9, "mask_mod": causal}),
    "heads": (ServingConfig(8, 32, 2, 1, 2, combine="await", split_policy="heads"), {}),
    "round": (ServingConfig(8, 32, 2, 1, combine="await", split_policy="round"), {}),
    "invariant": (None, {"batch_invariant": True}),
}
WILD = [0, 1, 17, 64, 65, 200, 201, 10**6, -5, 2**31 - 1, -(2**31)]


def made(name):
    """A plan over 2 x 8 heads of pages of 16 keys, with inputs for it."""
    config, more = PLANS[name]
    count = 1 if name == "round" else 3
    plan = DecodePlan(
        batch=count, kv_len=200, heads=(8, 2), head_dim=64, page_size=16, device="cpu",
        config=config, lse=True, **more,
    )  # fmt: skip
    q = torch.randn(count, 1, 8, 64, dtype=torch.bfloat16)
    call = {
        "seq_lens": torch.tensor([200, 3, 70][:count], dtype=torch.int32),
        "block_table": torch.arange(13 * count, dtype=torch.int32).view(count, 13) % 32,
    }
    if "total_q" in more:
        q = q.repeat(3, 1, 1, 1)[:, 0]
        call["cu_seqlens_q"] = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    return plan, q, call


def owned(plan, q, call, pool):
    own = (plan._workspace, plan._count, plan._out, plan._lse)
    return [*own, q, *call.values(), *pool]


@pytest.mark.parametrize("name", PLANS)
def test_lengths_and_pages_that_change_under_a_launch(name):
    """At every load of a program others may have written anything: it stays in what is its own."""
    plan, q, call = made(name)
    memory = [torch.zeros(96, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
    pool = tuple(each[32:64] for each in memory)
    draw = random.Random(name)

    def meddle():
        for each in call.values():
            if draw.random() < 0.2:
                each.view(-1)[draw.randrange(each.numel())] = draw.choice(WILD)

    with override(check=False):
        for _ in range(3):
            with watched(owned(plan, q, call, pool), meddle):
                plan.run(q, pool, **call)
    # What is left in the workspace is nobody's: another plan is as good as ever.
    plan, q, call = made(name)
    with override(check=False), watched(owned(plan, q, call, pool)):
        out, lse = plan.run(q, pool, **call)
    assert not out.any() and lse.isfinite().all()


def test_rows_that_overlap_leave_their_parts_in_the_workspace(monkeypatch):
    """34 tiles of rows, of a plan whose rows are at most 7 and 9 ends of requests."""
    monkeypatch.setattr(kernels, "detect", lambda device: replace(INTERPRETER, num_sms=51))
    plan = DecodePlan(
        batch=9, kv_len=1536, heads=(16, 1), head_dim=64, total_q=7, device="cpu", page_size=256,
        config=INVARIANT, batch_invariant=True,
    )  # fmt: skip
    assert plan._slots == 1
    q = torch.randn(7, 16, 64, dtype=torch.bfloat16)
    pool = tuple(torch.zeros(5, 256, 1, 64, dtype=torch.bfloat16) for _ in "kv")
    call = {
        "seq_lens": torch.full((9,), 1025, dtype=torch.int32),
        "block_table": torch.arange(6, dtype=torch.int32).repeat(9, 1) % 5,
        "cu_seqlens_q": torch.tensor([0, 7] * 4 + [0, 6], dtype=torch.int32),
    }
    known = (plan._workspace, plan._count, plan._out, q, *call.values(), *pool)
    with override(check=False), watched(known):
        plan.run(q, pool, **call)


@pytest.mark.parametrize("name", ["last", "heads"])
def test_a_page_or_a_length_out_of_range_is_clamped(name):
    plan, q, call = made(name)
    pool = tuple(torch.zeros(32, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv")
    good = {key: value.clone() for key, value in call.items()}
    for page, length in ((-1, 200), (32, 201), (2**31 - 1, 2**31 - 1), (-(2**31), -1)):
        call["block_table"][:, 1], call["seq_lens"][1] = page, length
        with override(check=False), watched(owned(plan, q, call, pool)):
            out, _ = plan.run(q, pool, **call)
        assert not out.any()
        for key, words in (("block_table", "cache has pages"), ("seq_lens", "keys|negative")):
            if key == "seq_lens" and length == 200:
                continue
            with override(check=True), pytest.raises(InputError, match=words):
                plan.run(q, pool, **good | {key: call[key]})


def test_the_watch_sees_a_read_behind_the_cache():
    """The first page of the first request is left out of what may be read."""
    plan, q, call = made("last")
    pool = tuple(torch.zeros(32, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv")
    known = owned(plan, q, call, [pool[0][1:], pool[1]])
    with pytest.raises(Exception, match=r"OutOfBounds\('create_masked_load at"), watched(known):
        plan.run(q, pool, **call)


def test_checked_mode_launches_what_it_looked_at(monkeypatch):
    """Lengths, pages and rows that another stream writes between the look and the launch."""
    each = batch([2] * 3, [53, 2, 17], 6, 2)
    plan = plan_for(each, page=4, config=SMALL, mask_mod=causal)
    cache, table = poisoned_pages(each, 4)
    # With a gap between the rows, which the copies of it have too.
    wide = torch.full((3, table.shape[1] + 5), -7, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    call = {"seq_lens": each.numbers(each.kv_lens), "block_table": wide[:, : table.shape[1]]}
    launch = TritonLaunch.launch

    def late(*given):
        for written in call.values():
            written.fill_(2**31 - 1)
        launch(*given)

    monkeypatch.setattr(TritonLaunch, "launch", late)
    with override(check=True):
        got = plan.run(each.q.unflatten(0, (3, 2)), cache, **call)
        assert_right([x.flatten(0, 1) for x in got], each, mask_mod=causal)
        with pytest.raises(InputError, match="2147483647"):
            plan.run(each.q.unflatten(0, (3, 2)), cache, **call)


@pytest.mark.parametrize("rows", [[2, 2, 2], [1, 3, 2]], ids=["uniform", "ragged"])
def test_checked_mode_refuses_rows_that_stand_before_all_keys(rows):
    """A first row stood at -1 by the manual: the kernel moved all rows of the request by one, so
    that a window saw other keys, and checked mode said nothing. Without mods all is right."""
    each = batch(rows, [53, min(rows[1] - 1, 2), 17], 6, 2)
    cache, table = poisoned_pages(each, 4)
    call = {"seq_lens": each.numbers(each.kv_lens), "block_table": table}
    q = each.q
    if len(set(rows)) > 1:
        call["cu_seqlens_q"] = each.numbers([0, 1, 4, 6])
    else:
        q = q.unflatten(0, (3, 2))
    ragged = len(set(rows)) > 1
    with override(check=True):
        plan = plan_for(each, page=4, config=SMALL, mask_mod=causal, ragged=ragged)
        with pytest.raises(
            InputError, match=rf"request 1 has {rows[1]} rows and {rows[1] - 1} keys"
        ):
            plan.run(q, cache, **call)
        plan = plan_for(each, page=4, config=SMALL, ragged=ragged)
        got = plan.run(q, cache, **call)
    assert_right(
        [x.reshape(6, *x.shape[-2:]) if i == 0 else x.reshape(6, -1) for i, x in enumerate(got)],
        each,
    )


def called(page=4):
    """A call of flex_decode."""
    each = batch([1] * 3, [9, 1, 17], 2, 1)
    cache, table = poisoned_pages(each, page)
    call = {"seq_lens": each.numbers(each.kv_lens), "block_table": table}
    return lambda: flex_decode(each.q[:, None], cache, **call)


def test_threads_that_share_a_plan_of_flex_decode_take_turns(monkeypatch):
    """Its second kernel, which merges, read parts that another thread's first one had left."""
    call, begin, inside, most = called(), threading.Barrier(3), [], []
    call()  # the plan is there
    run = DecodePlan.run

    def watched_run(*given, **named):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        try:
            return run(*given, **named)
        finally:
            inside.pop()

    monkeypatch.setattr(DecodePlan, "run", watched_run)
    threads = [threading.Thread(target=lambda: (begin.wait(), call())) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1, 1, 1]


def test_a_graph_captures_a_plan_of_its_own(monkeypatch):
    """Of a kept one a graph has addresses alone, and another graph may be what fills it."""
    call, made = called(page=8), []
    init = DecodePlan.__init__

    def counted(self, **about):
        made.append(self)
        init(self, **about)

    monkeypatch.setattr(DecodePlan, "__init__", counted)
    wanted = call()
    monkeypatch.setattr(decoding, "_captured", lambda q: True)
    assert torch.equal(call(), wanted) and torch.equal(call(), wanted) and len(made) == 3
    monkeypatch.undo()
    monkeypatch.setattr(DecodePlan, "__init__", None)
    assert torch.equal(call(), wanted)
