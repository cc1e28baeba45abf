"""A program that catches what torch's flex_attention raises goes on catching it here."""

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxRequest

import flexattn
from flexattn.catalogue import causal
from flexattn.errors import FlexAttnError, ModError, SignatureError

BUILT_IN = (ValueError, NotImplementedError, RuntimeError, TypeError)


def ones(*shape, **more):
    return torch.ones(*shape, **more)


def mask(B=1, L=8, device="cpu"):
    return theirs.create_block_mask(causal, B, None, L, L, device=device)


NESTED = torch.nested.nested_tensor([ones(3, 16), ones(5, 16)], layout=torch.jagged)
# Arguments that replace those of a good call.
CALLS = {
    "nested": {"query": NESTED},
    "one dimension": {"query": ones(16)},
    "three dimensions": dict.fromkeys(("query", "key", "value"), ones(2, 8, 16)),
    "devices": {"key": ones(1, 2, 8, 16, device="meta")},
    "no device of ours": dict.fromkeys(
        ("query", "key", "value"), ones(1, 2, 8, 16, device="meta")
    ),
    "head dimensions": {"query": ones(1, 2, 8, 24)},
    "heads": {"query": ones(1, 4, 8, 16)},
    "heads that do not divide": {"query": ones(1, 3, 8, 16), "enable_gqa": True},
    "batches": {"query": ones(2, 2, 8, 16), "key": ones(3, 2, 8, 16), "value": ones(3, 2, 8, 16)},
    "a mask that is shorter": {"block_mask": mask(L=4)},
    "a mask that is longer": {"block_mask": mask(L=16)},
    "a mask elsewhere": {"block_mask": mask(device="meta")},
    "a sliced mask": {"block_mask": mask()[0]},
    "lse twice": {"return_lse": True, "return_aux": AuxRequest(lse=True)},
    "scale in words": {"scale": "1"},
}


def raised(fn, arguments):
    with pytest.raises(Exception) as caught:
        fn(**arguments)
    return caught.value


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name):
    good = dict.fromkeys(("query", "key", "value"), ones(1, 2, 8, 16))
    arguments = good | CALLS[name]
    ours = raised(flexattn.flex_attention, arguments)
    assert isinstance(ours, FlexAttnError) and ours.got and (ours.rule or ours.__cause__)
    if name != "scale in words":  # torch compiles before it meets it: a TypeError
        assert isinstance(ours, built_in(raised(theirs.flex_attention, arguments)))
    else:
        assert isinstance(ours, TypeError)


def built_in(error):
    found = [each for each in type(error).__mro__ if each in BUILT_IN]
    assert found, f"torch raised {type(error)}"
    return found[0]


MASKS = {
    "in another order": (1, 1, 8, 8, causal),
    "a device for a length": (causal, None, None, 8, "cpu"),
    "a device for a batch": (causal, "cpu", None, 8, 8),
    "a length that is no integer": (causal, None, None, 8.5, 8),
    "no pair of block sizes": (causal, None, None, 8, 8, "cpu", (1, 2, 3)),
    "no device": (causal, None, None, 8, 8, "gpu"),
}

# Which argument of each is named.
WRONG = dict(zip(MASKS, (4, 4, 1, 3, 6, 5), strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask(name):
    """What Python says of comparing a function with a number named neither argument nor order."""
    with pytest.raises(FlexAttnError) as ours:
        flexattn.create_block_mask(*MASKS[name])
    assert repr(MASKS[name][WRONG[name]]) in ours.value.got
    assert ours.value.rule and ours.value.do
    if WRONG[name] < 5:
        assert "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN" in ours.value.rule
    if name == "a length that is no integer":  # torch rounds it up
        assert isinstance(ours.value, TypeError)
        return
    with pytest.raises(Exception) as torchs:
        theirs.create_block_mask(*MASKS[name])
    assert isinstance(ours.value, built_in(torchs.value))


def test_lengths_may_be_any_integers():
    """torch takes tensors and numpy's integers; a mask of a tensor's length held the tensor."""
    found = flexattn.create_block_mask(causal, None, None, torch.tensor(8), 9, "cpu", [4, 4])
    assert found.seq_lengths == (8, 9) and type(found.seq_lengths[0]) is int


@pytest.mark.parametrize(
    ("mod", "error"),
    [
        (lambda s, b, h, q, k: s if q > k else -s, ModError),
        (lambda s, b: s, SignatureError),
        (3.0, SignatureError),
        (lambda s, b, h, q, k: 1, SignatureError),
        (lambda s, b, h, q, k: None, SignatureError),
    ],
)
def test_a_mod(mod, error):
    """torch raises RuntimeErrors of its compiler, TypeErrors of Python, ValueErrors of vmap."""
    x = ones(1, 2, 8, 16)
    ours = raised(flexattn.flex_attention, {"query": x, "key": x, "value": x, "score_mod": mod})
    assert type(ours) is error and isinstance(ours, RuntimeError)
    assert error is ModError or isinstance(ours, (TypeError, ValueError))
