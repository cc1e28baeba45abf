"""A traced mod gives Python no value of a captured tensor; what else Python asks is a guard."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from flexattn import flex_attention
from flexattn.errors import ModError, UnsupportedError
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind, watch

NAMES = ("score", "b", "h", "q_idx", "kv_idx")
VALUES = (
    "t.tolist()[1]", "t.cpu().tolist()[1]", "t.float().tolist()[1]", "t.flatten().tolist()[1]",
    "t.clone().tolist()[1]", "t[1:].tolist()[0]", "torch.tensor(t.tolist())[1]", "max(t.tolist())",
    "t.numpy()[1]", "t.cpu().numpy()[1]", "float(np.from_dlpack(t)[1])", "np.asarray(t)[1]",
    "t.__dlpack__() and 1", "t[1].item()", "float(t[1])", "int(t[1])", "bool(t[1])",
    "(2 if t[1] > 1 else 1)", "list(t)[1].item()", "len(repr(t))", "len(str(t))",
    "len(f'{t}')", "(print(t), 1)[1]", "float(f'{t[1]}')", "(2.0 in t) * 1.0",
    "len(pickle.dumps(t))", "(torch.save(t, io.BytesIO()), 1)[1]", "copy.deepcopy(t)[1]",
    "t.untyped_storage()[5]", "bytes(t.untyped_storage())[5]", "t.storage()[1]",
    "float(torch.equal(t, t.clone()))", "float(torch.allclose(t, t + 1))",
    "torch.unique(t).shape[0]", "torch.nonzero(t).shape[0]", "t[t > 1].shape[0]", "max(t)",
    "sorted(t)[0]", "t.argmax().item()", "t.sum().item()", "[1.0, 2.0, 3.0][t.long()[1]]",
)  # fmt: skip
QUESTIONS = (
    "t.nbytes / 4", "t.T.nbytes", "torch.numel(t)", "t.numel()", "len(t)", "t.shape[0]",
    "t.stride(0)", "t.T.stride()[0]", "t.dim_order()[0]", "t.is_contiguous()", "t.is_neg()",
    "t.is_same_size(torch.zeros(2, 2))", "torch.is_same_size(t, torch.zeros(2, 2))",
    "t.data.nbytes", "np.shape(t)[0]", "t.storage_offset()", "t.requires_grad", "t._version",
)  # fmt: skip
SWAPS = {
    "another size": lambda t: setattr(t, "data", torch.zeros(5, 4)),
    "a view": lambda t: setattr(t, "data", torch.zeros(4, 4).T[1:3, :2]),
    "a negative": lambda t: setattr(t, "data", torch._neg_view(torch.zeros(2, 2))),
    "that requires grad": lambda t: t.requires_grad_(),
}


def reading(text, t):
    scope = {"torch": torch, "np": np, "pickle": pickle, "io": io, "copy": copy, "t": t}
    exec(f"def mod(s, b, h, q, k): return s + torch.zeros_like(s) + {text}", scope)
    return scope["mod"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("text", VALUES)
def test_values_are_refused(text):
    """tolist(), from_dlpack() and repr() gave the numbers of the first call for ever."""
    with pytest.raises((ModError, UnsupportedError), match="score_mod 'mod'"):
        bind(reading(text, torch.tensor([1.0, 2.0])), "score")


@pytest.mark.parametrize("text", ["t.tolist()[1]", "len(repr(t))", "len(pickle.dumps(t))"])
def test_a_refusal_says_how_it_was_read(text):
    with pytest.raises(ModError, match="value of a captured tensor in Python") as said:
        bind(reading(text, torch.tensor([1.0, 2.0])), "score")
    assert "when the kernel runs" in said.value.rule and "compute with" in said.value.do


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("text", QUESTIONS)
def test_questions_are_asked_again(text):
    """nbytes, torch.numel and dim_order kept their answers under other data."""
    t = torch.zeros(2, 2)
    mod = reading(text, t)
    env = {name: torch.tensor(4) for name in NAMES} | {"score": torch.tensor(1.0)}
    seen = None
    for swap in (lambda t: None, *SWAPS.values()):
        swap(t)
        if seen is None or not seen.hold(mod):
            bound = bind(mod, "score")
            seen = watch(mod, "score", bound)
        got = evaluate(bound.mod, env, bound.tensors, bound.scalars)
        assert got.item() == mod(*env.values()).item()


def test_a_compiled_mod_is_refused_in_words():
    """torch's error about FX came through as it was."""
    compiled = torch.compile(lambda s, b, h, q, k: s * 2, backend="eager")
    for mod in (compiled, lambda *args: compiled(*args) + 1):
        with pytest.raises(UnsupportedError, match=r"torch\.compile made") as said:
            bind(mod, "score")
        assert "pass the function" in said.value.do


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mod", [None, lambda s, *_: s * 1.7])
def test_torchscript_is_refused_in_words(mod):
    """'Tensor' object has no attribute 'bit_length'."""
    x = torch.zeros(1, 1, 9, 16)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda q: flex_attention(q, x, x, score_mod=mod), (x,), check_trace=False)
