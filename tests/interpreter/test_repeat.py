"""A repeated call takes the short way, and whatever changed since is seen all the same."""

import builtins
import functools
import gc
import importlib
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import _create_empty_block_mask

import flexattn
from flexattn.catalogue import causal, sliding_window
from flexattn.errors import InputError
from flexattn.frontend import attention
from flexattn.frontend.call import Call
from flexattn.frontend.launch_cache import launch_cache
from flexattn.records.store import renew
from flexattn.settings import override
from tests.support import KINDS, PREFILL, assert_accurate, block_mask, inputs

SCALE = 2.0
binding = importlib.import_module("flexattn.mods.bind")


def scaled(score, b, h, q_idx, kv_idx):
    return score * SCALE


def biased(bias, weight=1.0):
    def mod(score, b, h, q_idx, kv_idx):
        return score + weight * bias[kv_idx]

    return mod


@pytest.fixture
def long_ways(monkeypatch):
    """How many calls made a plan."""
    launch_cache.clear()
    count = []
    made = attention.plan

    def counted(call, facts):
        count.append(call)
        return made(call, facts)

    monkeypatch.setattr(attention, "plan", counted)
    return count


def call(q, k, v, **more):
    return assert_accurate(q, k, v, kernel_options=PREFILL, **more)


def test_the_second_call_makes_no_plan(long_ways):
    q, k, v = inputs()
    mod, mask = biased(torch.linspace(-1, 1, 53)), block_mask(causal, q, k)
    sinks = torch.nn.Parameter(torch.randn(3))
    for more in ({}, {"score_mod": mod}, {"block_mask": mask}, {"sinks": sinks}):
        long_ways.clear()
        first = call(q, k, v, **more)
        for _ in range(3):
            again = call(*(x.clone() for x in (q, k, v)), **more)
        assert len(long_ways) == 1, more
        torch.testing.assert_close(again.out, first.out, rtol=0, atol=0)


def test_a_record_that_was_written_since_is_looked_for(long_ways):
    q, k, v = inputs()
    for _ in range(2):
        call(q, k, v)
    renew()
    call(q, k, v)
    assert len(long_ways) == 2


def test_the_long_way_looks_at_everything_once(monkeypatch):
    """It read the facts of the tensors twice, and walked through each mod for its guard anew."""
    q, k, v = inputs()
    mod, mask = biased(torch.linspace(-1, 1, 53)), block_mask(causal, q, k)
    more = {"score_mod": mod, "block_mask": mask, "enable_gqa": True, "kernel_options": PREFILL}
    flexattn.flex_attention(q, k, v, **more)
    launch_cache.clear()
    looked = []

    def counted(at):
        return lambda *given: looked.append(at) or at(*given)

    monkeypatch.setattr(binding, "identify", counted(binding.identify))
    monkeypatch.setattr(Call, "facts", counted(Call.facts))
    flexattn.flex_attention(q, k, v, **more)
    assert len(looked) == 3  # two mods, and the tensors
    flexattn.flex_attention(q, k, v, **more)
    assert len(looked) == 4  # what was kept is as good as ever: no mod is walked through


def test_parameters_are_tensors_like_others(long_ways):
    """Queries that could learn went the long way each time, also where nobody wanted gradients."""
    q, k, v = inputs()
    learned = torch.nn.Parameter(q)
    with torch.no_grad():
        for _ in range(2):
            call(learned, k, v)
    assert len(long_ways) == 1
    out = flexattn.flex_attention(learned, k, v, enable_gqa=True, kernel_options=PREFILL)
    assert out.requires_grad and len(long_ways) == 1


def test_numbers_globals_and_code_that_change(monkeypatch, long_ways):
    q, k, v = inputs()
    mod = biased(torch.linspace(-1, 1, 53))
    for _ in range(2):
        call(q, k, v, score_mod=mod)
    mod.__closure__[1].cell_contents = -3.0
    call(q, k, v, score_mod=mod)
    mod.__code__ = (lambda bias, weight: lambda s, b, h, q, k: s - weight * bias[k])(0, 0).__code__
    call(q, k, v, score_mod=mod)
    for value in (2.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", value)
        call(q, k, v, score_mod=scaled)
        call(q, k, v, score_mod=scaled)
    assert len(long_ways) == 6


def test_tensors_that_change(long_ways):
    q, k, v = inputs()
    bias = torch.linspace(-1, 1, 53)
    mod = biased(bias)
    call(q, k, v, score_mod=mod)
    bias.mul_(3)
    call(q, k, v, score_mod=mod)
    assert len(long_ways) == 1
    bias.data = torch.linspace(-1, 1, 106)[::2]
    call(q, k, v, score_mod=mod)
    bias.data = torch.linspace(-1, 1, 61).half()
    call(q, k, v, score_mod=mod)
    mod.__closure__[0].cell_contents = torch.linspace(-1, 1, 53)
    call(q, k, v, score_mod=mod)
    assert len(long_ways) == 4


def test_a_block_mask_that_changes(long_ways):
    q, k, v = inputs(1, 2, 1, 45, 45)
    mask, other = (block_mask(mod, q, k, 16) for mod in (causal, sliding_window(3)))
    call(q, k, v, block_mask=mask)
    for name in ("mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks"):
        setattr(mask, name, getattr(other, name))
    mask.full_kv_indices = other.full_kv_indices
    call(q, k, v, block_mask=mask)
    # Written into the lists: nothing is to be kept of them but where they lie.
    mask.kv_num_blocks.zero_()
    mask.full_kv_num_blocks.zero_()
    out = flexattn.flex_attention(
        q, k, v, block_mask=mask, enable_gqa=True, kernel_options=PREFILL
    )
    assert not out.any()


def test_lists_of_a_block_mask_that_become_narrower(long_ways):
    """The short way kept the old width: rows were read from where they no longer began."""
    q, k, v = inputs(1, 2, 1, 64, 64)
    mask = block_mask(lambda b, h, q, k: (q // 16 + k // 16) % 2 == 0, q, k, 16)
    for _ in range(2):
        call(q, k, v, block_mask=mask)
    assert len(long_ways) == 1
    for lists in (mask.kv_indices, mask.full_kv_indices):
        lists.data = lists[..., :2].contiguous()
    call(q, k, v, block_mask=mask)
    assert len(long_ways) == 2


def test_runs_of_a_block_mask_whose_lists_are_given_other_data(long_ways):
    q, k, v = inputs(1, 2, 1, 64, 64)
    mask, other = (block_mask(mod, q, k, 16) for mod in (causal, sliding_window(3)))
    call(q, k, v, block_mask=mask)
    mask.mask_mod = other.mask_mod
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        getattr(mask, name).data = getattr(other, name)
    call(q, k, v, block_mask=mask)
    assert len(long_ways) == 2


def test_a_scale_in_a_tensor_is_read_by_every_call(long_ways):
    q, k, v = inputs()
    scale = torch.tensor(0.5)
    for value in (0.5, 5.0):
        call(q, k, v, scale=scale.fill_(value))
    assert len(long_ways) == 2


def test_a_view_that_negates_its_memory_is_read_as_it_shows():
    """As a conjugate's imaginary part is: kernels read the number behind it."""
    q, k, v = inputs()
    negated = torch.complex(torch.zeros_like(q), q).conj().imag
    assert negated.is_neg()
    bias = torch._neg_view(torch.linspace(-1, 1, 53))
    for _ in range(2):
        call(negated, k, v)
        call(q, torch._neg_view(k), torch._neg_view(v))
        call(q, k, v, score_mod=biased(bias), sinks=bias[:3].contiguous())
        call(q, k, v)


@pytest.mark.parametrize(
    "mod",
    [
        functools.partial(lambda w, s, b, h, q, k: s * w[0], [2.0]),
        lambda s, b, h, q, k, table=[3.0]: s * table[0],
    ],
    ids=["partial", "list"],
)
def test_what_may_change_unseen_goes_the_long_way(mod, long_ways):
    q, k, v = inputs()
    for _ in range(2):
        call(q, k, v, score_mod=mod)
    holder = mod.args[0] if isinstance(mod, functools.partial) else mod.__defaults__[0]
    holder[0] = 7.0
    call(q, k, v, score_mod=mod)
    assert len(long_ways) == 3


def test_what_changes_beside_a_mods_names(monkeypatch, long_ways):
    """The short way served the first call's kernel: it looked at none of these."""
    q, k, v = inputs()
    bias = torch.linspace(-1, 1, 53)
    bias.weight = 1.0

    def weighted(score, b, h, q_idx, kv_idx):
        return score + bias.weight * bias[kv_idx]

    def distant(score, b, h, q_idx, kv_idx):
        return score + 0.1 * abs(q_idx - kv_idx)

    for mod in (weighted, distant):
        call(q, k, v, score_mod=mod)
    bias.weight = -3.0
    call(q, k, v, score_mod=weighted)
    monkeypatch.setattr(builtins, "abs", lambda x: 2 * x)
    call(q, k, v, score_mod=distant)
    assert len(long_ways) == 4


def test_other_arguments_are_other_calls(long_ways):
    q, k, v = inputs()
    call(q, k, v)
    mask = block_mask(causal, q, k)
    sinks = torch.linspace(-1, 1, 6)
    for change in (
        {"scale": 0.3},
        {"scale": -0.3},
        {"score_mod": scaled},
        {"block_mask": mask},
        {"sinks": sinks[:3]},
        {"sinks": sinks[:3].half()},
        {"sinks": sinks[::2]},
    ):
        call(q, k, v, **change)
    assert len(long_ways) == 8
    shifted = [torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x) for x in (q, k, v)]
    call(*shifted)
    call(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    call(*(x.half() for x in (q, k, v)))
    assert len(long_ways) == 11
    with override(mode="off"):
        call(q, k, v)
    assert len(long_ways) == 12


def test_grad_and_autocast_are_seen():
    q, k, v = inputs()
    bias = torch.linspace(-1, 1, 53)
    mod = biased(bias)
    call(q, k, v, score_mod=mod)
    run = functools.partial(flexattn.flex_attention, enable_gqa=True, kernel_options=PREFILL)
    bias.requires_grad_()
    run(q, k, v, mod).sum().backward()
    assert bias.grad is not None
    assert run(q.clone().requires_grad_(), k, v).requires_grad
    assert run(q, k, v, sinks=torch.nn.Parameter(torch.randn(3))).requires_grad
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert run(q, k, v).dtype == torch.float16


def test_what_autocast_converted_serves_nobody_else(long_ways):
    """A query that autocast left as it was kept a launch that read wider keys as if converted."""
    q, k, v = inputs()
    q = q.half()
    run = functools.partial(flexattn.flex_attention, enable_gqa=True, kernel_options=PREFILL)
    with torch.autocast("cpu", torch.float16):
        run(q, k, v)
    with pytest.raises(InputError, match="one dtype"):
        run(q, k, v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1, 1), (7, 53), (37, 20)], ids=str)
def test_torchs_mask_of_everything_is_no_mask(lengths, kind, long_ways):
    """It is made for lengths of 1 and fits all: every call but those was refused."""
    q, k, v = inputs(2, 2, 1, *lengths)
    mask = _create_empty_block_mask(q, k)
    run = functools.partial(
        flexattn.flex_attention, q, k, v, enable_gqa=True, kernel_options=KINDS[kind]
    )
    wanted = run()
    long_ways.clear()
    assert torch.equal(run(block_mask=mask), wanted) and torch.equal(run(block_mask=mask), wanted)
    assert len(long_ways) == 1, "the second call is known"
    assert flexattn.explain(q, k, v, block_mask=mask, enable_gqa=True).mask_mod is None
    if lengths != (1, 1):
        mask.kv_num_blocks.zero_()
        with pytest.raises(InputError, match="made for lengths"):
            run(block_mask=mask)


def test_mods_masks_and_what_they_capture_are_not_kept_alive():
    q, k, v = inputs()
    bias = torch.linspace(-1, 1, 53)
    mod, mask = biased(bias), block_mask(sliding_window(torch.tensor(7)), q, k)
    call(q, k, v, score_mod=mod, block_mask=mask)
    call(q, k, v, score_mod=mod, block_mask=mask)
    left = [weakref.ref(each) for each in (bias, mod, mask, mask.kv_indices)]
    del bias, mod, mask
    gc.collect()
    assert [each() for each in left] == [None] * 4


def test_no_garbage_is_collected_while_a_plan_is_made():
    """A collection of the whole process added 0.15 s to one first call of a mod in six."""
    q, k, v = inputs()
    collecting = []

    def mod(score, b, h, q_idx, kv_idx):
        collecting.append(gc.isenabled())
        return 0.625 * score

    call(q, k, v, score_mod=mod)
    assert collecting[0] is False
    assert gc.isenabled()


def test_a_tangent_is_not_dropped():
    """A dual tensor has the memory of a plain one: the launch of the call before served it."""
    q, k, v = inputs(1, 2, 2, 3, 8, 16)
    wanted = flexattn.flex_attention(q, k, v)
    with forward_ad.dual_level():
        found = flexattn.flex_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        primal, tangent = forward_ad.unpack_dual(found)
    torch.testing.assert_close(primal, wanted)
    assert tangent is not None and bool((tangent != 0).any())
