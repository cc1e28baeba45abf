"""A repeated call with gradients takes the short way, forward and back, and sees what changed."""

import gc
import importlib
import weakref

import pytest
import torch

import flexattn
from flexattn import flex_attention
from flexattn.catalogue import causal, sliding_window
from flexattn.errors import UnsupportedError
from flexattn.frontend import autograd
from flexattn.frontend.launch_cache import launch_cache
from flexattn.mods.bind import stats
from flexattn.runtime.dispatch import Dispatcher
from flexattn.settings import override
from tests.support import inputs


def leaves(L=21, S=27, **more):
    return [x.requires_grad_() for x in inputs(1, 2, 2, L, S, **more)]


def added(table):
    return lambda s, b, h, q, k: 4.0 * torch.tanh(s / 4.0) + table[h]


def masked(mask_mod, L=21, S=27):
    return flexattn.create_block_mask(mask_mod, None, None, L, S, "cpu", 16)


def grads(given, *more, **call):
    out = flex_attention(*given[:3], **call)
    return torch.autograd.grad(out.square().sum(), [*given, *more])


@pytest.fixture
def long_ways(monkeypatch):
    """What the long ways did: names of the functions that they called."""
    launch_cache.clear()
    found = []
    binding = importlib.import_module("flexattn.mods.bind")
    for owner, name in (
        (autograd, "plan"), (autograd, "plan_backward"), (Dispatcher, "choose"),
        (binding, "identify"),
    ):  # fmt: skip
        made = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, _made=made, _name=name: found.append(_name) or _made(*a)
        )
    return found


TABLE = torch.linspace(-1, 1, 2).requires_grad_()
SINKS = torch.linspace(-1, 1, 2).requires_grad_()
CALLS = {
    "plain": {},
    "mods": {"score_mod": added(TABLE.detach()), "block_mask": masked(causal)},
    "a table that learns": {"score_mod": added(TABLE), "block_mask": masked(causal)},
    "sinks and statistics": {"sinks": SINKS},
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_neither_traces_nor_plans(name, long_ways):
    more = {"a table that learns": [TABLE], "sinks and statistics": [SINKS]}.get(name, [])
    first = grads(leaves(), *more, **CALLS[name])
    assert long_ways.count("plan") == long_ways.count("plan_backward") == 1
    traces = stats().traces
    long_ways.clear()
    for _ in range(2):  # of other tensors, alike
        again = grads(leaves(), *more, **CALLS[name])
        for one, other in zip(again[:3], first[:3], strict=True):
            assert torch.equal(one, other)
        for one, other in zip(again[3:], first[3:], strict=True):
            torch.testing.assert_close(one, other)
    assert long_ways == [] and stats().traces == traces


def test_training_and_evaluation_in_turns(long_ways):
    """Each has a launch of its own: one wrote over the other's would make every call a new one."""
    given, mod, mask = leaves(), added(TABLE), masked(causal)
    for _ in range(3):
        wanted = grads(given, TABLE, score_mod=mod, block_mask=mask)
        with torch.no_grad():
            out, lse = flex_attention(*given, mod, mask, return_lse=True)
            plain = flex_attention(*given, mod, mask)
        assert torch.equal(out, plain) and lse.isfinite().all() and wanted[3].any()
    assert long_ways.count("plan") == long_ways.count("plan_backward") == 1


def test_which_captures_learn_is_seen(long_ways):
    given, table = leaves(), torch.ones(2, requires_grad=True)
    mod = added(table)
    for learns in (True, False, True, True):
        table.requires_grad_(learns)
        out = flex_attention(*given, mod)
        table.grad = None
        out.square().sum().backward()
        assert (table.grad is not None) == learns
    still = [x.detach() for x in given]
    for learns in (True, False, True):
        table.requires_grad_(learns)
        assert flex_attention(*still, mod).requires_grad == learns


def test_a_capture_that_is_another_tensor(long_ways):
    """Whether gradients were wanted was asked of a tensor that the mod had ceased to read."""
    given = [x.detach() for x in leaves()]
    mod = added(torch.ones(2))
    assert not flex_attention(*given, mod).requires_grad
    table = mod.__closure__[0].cell_contents = torch.ones(2, requires_grad=True)
    for _ in range(3):
        out = flex_attention(*given, mod)
        assert torch.autograd.grad(out.square().sum(), [table])[0].isfinite().all()
    assert long_ways.count("plan") == 1
    mod.__closure__[0].cell_contents = torch.ones(2)
    long_ways.clear()
    for _ in range(2):
        assert not flex_attention(*given, mod).requires_grad
    assert long_ways.count("identify") == 1


def test_a_mask_whose_lists_are_written_or_replaced():
    given, mask, other = leaves(64, 64), masked(causal, 64, 64), masked(sliding_window(3), 64, 64)
    first = grads(given, block_mask=mask)
    assert all(map(torch.equal, grads(given, block_mask=mask), first))
    wanted = grads(given, block_mask=other)
    mask.mask_mod = other.mask_mod
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks"):
        getattr(mask, name).copy_(getattr(other, name))
    mask.full_kv_indices = other.full_kv_indices
    for _ in range(2):
        found = grads(given, block_mask=mask)
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_output_in_other_layouts(long_ways):
    given = leaves()
    out = flex_attention(*given)
    dout = torch.randn(1, 2, 21, 16)
    dense = torch.autograd.grad(out, given, dout, retain_graph=True)
    turned = dout.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.stack([dout, dout], -1)[..., 0]
    negated = torch._neg_view(-dout)
    for other in (turned, spread, negated, dout):
        assert all(map(torch.equal, torch.autograd.grad(out, given, other, True), dense))
    # A kernel reads the turned one as it lies; the others are made dense.
    assert long_ways.count("plan_backward") == 3


def test_what_decides_a_backward_anew(long_ways):
    given = leaves()
    first = grads(given)
    with override(mode="off"):
        assert all(map(torch.equal, grads(given), first))
    torch.use_deterministic_algorithms(True)
    try:
        assert all(map(torch.equal, grads(given), first))
        flexible = added(TABLE)
        with pytest.raises(UnsupportedError, match="atomic"):
            flex_attention(*given, flexible)
    finally:
        torch.use_deterministic_algorithms(False)
    assert long_ways.count("plan_backward") == 3
    out = flex_attention(*given)
    with override(mode="off"):  # after the forward, which had another plan
        torch.autograd.grad(out.square().sum(), given)
    assert long_ways.count("plan_backward") == 4
    grads(given, TABLE, score_mod=flexible)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedError, match="atomic"):
            flex_attention(*given, flexible)
    finally:
        torch.use_deterministic_algorithms(False)


def test_under_autocast_what_needs_no_conversion(long_ways):
    given = leaves(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        first = grads(given)
        long_ways.clear()
        assert all(map(torch.equal, grads(given), first))
        assert long_ways == []
    with torch.autocast("cpu", torch.float16):
        assert flex_attention(*given).dtype == torch.float16


def test_torch_func_after_a_call_like_it():
    given = [x.detach() for x in leaves()]

    def loss(q):
        return flex_attention(q, *given[1:]).square().sum()

    (plain,) = torch.autograd.grad(loss(q := given[0].clone().requires_grad_()), [q])
    torch.testing.assert_close(torch.func.grad(loss)(given[0]), plain, rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_alive_by_a_loss_that_is():
    """What serves the next call holds what mods captured, and a graph must not hold that."""
    given, table = leaves(), torch.linspace(0, 1, 2)
    mod = added(table)
    losses = []
    for _ in range(3):
        losses.append(flex_attention(*given, mod).square().sum())
        losses[-1].backward()
    gone = [weakref.ref(x) for x in (mod, table)]
    del mod, table
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
