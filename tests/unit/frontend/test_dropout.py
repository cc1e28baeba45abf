"""Calls with dropout: where the seed comes from, what is refused, what stays as it was."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from flexattn import explain, flex_attention
from flexattn.catalogue import causal
from flexattn.errors import InputError, UnsupportedError
from flexattn.frontend import attention
from flexattn.frontend.attention import route_of
from flexattn.frontend.call import Call, admit, make_call
from flexattn.frontend.compiled import spec
from flexattn.frontend.launch_cache import as_given, call_key, launch_cache, remember
from flexattn.records.record import key_of
from tests.problems import problem
from tests.support import inputs

P = {"dropout_p": 0.4}


def test_the_mask_follows_from_torchs_generator():
    q, k, v = inputs()
    torch.manual_seed(1)
    one, other = (flex_attention(q, k, v, enable_gqa=True, **P) for _ in range(2))
    torch.manual_seed(1)
    with torch.no_grad():  # where torch's SDPA drops as well
        again = flex_attention(q, k, v, enable_gqa=True, **P)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_lse_and_the_mean_are_those_without_it():
    q, k, v = inputs(1, 2, 2, 16, 48)
    plain, lse = flex_attention(q, k, v, return_lse=True)
    torch.manual_seed(0)
    many = [flex_attention(q, k, v, return_lse=True, **P) for _ in range(400)]
    assert torch.equal(many[0][1], lse)
    mean = torch.stack([out for out, _ in many]).mean(0)
    assert (mean - plain).abs().max() < 0.15


def test_none_of_it_draws_nothing_and_all_of_it_gives_zeros():
    q, k, v = inputs()
    before = torch.get_rng_state()
    plain = flex_attention(q, k, v, enable_gqa=True, dropout_p=0)
    assert torch.equal(plain, flex_attention(q, k, v, enable_gqa=True))
    explain(q, k, v, enable_gqa=True, **P)
    assert torch.equal(before, torch.get_rng_state())
    assert not flex_attention(q, k, v, enable_gqa=True, dropout_p=1.0).any()


def test_what_rounds_to_none_is_a_call_without():
    """Whose launch is not found for calls that drop: keys say whether dropout_p is 0."""
    q, k, v = inputs()
    before = torch.get_rng_state()
    plain, little = (flex_attention(q, k, v, enable_gqa=True, dropout_p=p) for p in (0.0, 2**-17))
    assert torch.equal(plain, little) and torch.equal(before, torch.get_rng_state())
    given = Call(q, k, v, enable_gqa=True, dropout_p=2**-17)
    call = admit(given)
    assert call.dropout is None and call.facts() != given.facts()
    assert not as_given(given, call)
    for p in (0, 0.4):
        given = given._replace(dropout_p=p)
        assert as_given(given, admit(given))


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), "0.1", None, torch.ones(2)], ids=str)
def test_no_share(p):
    with pytest.raises(InputError, match="a number from 0 to 1"):
        flex_attention(*inputs(), enable_gqa=True, dropout_p=p)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_weights(reentrant):
    given = [x.requires_grad_() for x in inputs(1, 2, 2, 21, 27)]

    def attend(*tensors):
        return flex_attention(*tensors, **P)

    torch.manual_seed(2)
    plain = torch.autograd.grad(attend(*given).square().sum(), given)
    torch.manual_seed(2)
    checkpoint(attend, *given, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(given, plain, strict=True))


def on_a_gpu(grad=False, dtype=torch.float32, **options):
    """An admitted call of a GPU's tensors; no GPU is needed for its route."""
    q, k, v = inputs(1, 2, 2, 8, 8)
    call = make_call(q, k, v, kernel_options=options or None, **P)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 8, 16, device="cuda", dtype=dtype) for _ in "qkv")
        return call._replace(q=q.requires_grad_(grad), k=k, v=v)


@pytest.fixture
def memory_of_fakes(monkeypatch):
    """Fake tensors stand for a GPU's: that they have no memory is no matter."""
    monkeypatch.setattr(attention, "check_memory", lambda tensors: None)


@pytest.mark.usefixtures("memory_of_fakes")
def test_a_kernel_drops_on_a_gpu():
    """torch's flex_attention would drop nothing. Eight rows, which decode's would have without."""
    assert route_of(on_a_gpu())[0] == route_of(on_a_gpu(True))[0] == "kernel"


@pytest.mark.usefixtures("memory_of_fakes")
def test_what_no_kernel_drops():
    with pytest.raises(UnsupportedError, match="split-KV"):
        route_of(on_a_gpu(BACKEND="TRITON_DECODE"))
    with pytest.raises(UnsupportedError, match="float8"):
        route_of(on_a_gpu(dtype=torch.float8_e4m3fn))


def test_a_compiled_call_breaks_its_graph():
    q, k, v = inputs(1, 2, 2, 8, 8)
    assert "dropout" in spec.breaks(Call(q, k, v, **P)) and not spec.breaks(Call(q, k, v))

    def attend(q, k, v):
        return flex_attention(q, k, v, **P)

    torch.manual_seed(3)
    plain = attend(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(torch.compile(attend, backend="eager")(q, k, v), plain)


def test_a_kernel_with_it_is_filed_apart_and_others_where_they_were():
    plain = problem(mask_mod=causal)
    dropped = replace(plain, structure=replace(plain.structure, dropout=True))
    assert key_of(plain) != key_of(dropped) and "dropout" not in repr(key_of(plain))


def test_calls_are_not_remembered():
    """Every one has a seed of its own, which a remembered launch would repeat."""
    given = make_call(*inputs(1, 2, 2, 8, 8), **P)
    launch = SimpleNamespace()  # which would be asked for its problem
    key = call_key(given)
    remember(key, given, given, launch, None, ())
    assert launch_cache.find(key, given) is None
