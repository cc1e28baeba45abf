"""A call is one value: its facts make the keys of its launches, and its checks run once."""

import ast
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

from flexattn import create_block_mask, explain, flex_attention
from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.errors import NoKernelError
from flexattn.frontend import call as calls, plan as plans
from flexattn.frontend.call import TENSORS, Call, make_call
from flexattn.frontend.launch_cache import call_key, launch_cache
from flexattn.kernels.choose import options
from flexattn.kernels.choose.options import Options
from flexattn.mods import bind
from flexattn.mods.identity import identify
from flexattn.problem import checks
from flexattn.problem.facts import TensorFacts, facts_of
from flexattn.problem.inputs import Dropout
from tests.problems import problems_asked

HEADS = torch.ones(1, 2)


def tensor(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def mask_of(mod):
    return create_block_mask(mod, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)


BASE = Call(*(tensor(1, 2, 32, 64) for _ in range(3)))
# For each argument another value: an argument that is added has to be added here.
OTHERS = {
    "q": tensor(3, 2, 32, 64),
    "k": tensor(1, 2, 32, 64).mT.contiguous().mT,
    "v": tensor(1, 2, 32, 8),
    "score_mod": alibi(2, "cpu"),
    "block_mask": mask_of(causal),
    "scale": -1.0,
    "enable_gqa": True,
    "return_lse": True,
    "kernel_options": {"BLOCK_M": 64},
    "return_aux": AuxRequest(max_scores=True),
    "sinks": torch.zeros(2),
    "q_descale": HEADS,
    "k_descale": HEADS,
    "v_descale": HEADS,
    "dropout_p": 0.25,
}
# What admit() found the arguments to be: those of one call follow from the others.
FOUND = {"score": bind(alibi(2, "cpu"), "score"), "mask": bind(causal, "mask"),
         "options": Options(kind="decode"),
         "looks": (identify(alibi(2, "cpu"), "score"), None), "dropout": Dropout(3),
         "beyond": NoKernelError("a mod that no kernel computes")}  # fmt: skip
# Arguments that must fit the inputs, of float8 here, before a plan is made.
EIGHT = {"q_descale", "k_descale", "v_descale"}


def test_every_field_is_looked_at_here():
    assert {*OTHERS, *FOUND} == {*Call._fields}
    assert len(BASE.tensors) == len(TENSORS)


@pytest.mark.parametrize("name", OTHERS)
def test_calls_that_differ_in_one_argument_are_not_taken_for_each_other(name):
    """Two keys listed the arguments by hand: what one forgot, it took for the call before."""
    other = BASE._replace(**{name: OTHERS[name]})
    assert call_key(other) != call_key(BASE) == call_key(Call(*BASE))
    changed = isinstance(OTHERS[name], torch.Tensor)
    assert any(x is OTHERS[name] for x in other.tensors) == changed


def test_other_options_are_another_call():
    given = BASE._replace(kernel_options={"BLOCK_M": 128})
    assert call_key(given) != call_key(BASE._replace(kernel_options=OTHERS["kernel_options"]))


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_of_a_call_is_no_part_of_its_key(name):
    assert call_key(BASE._replace(**{name: FOUND[name]})) == call_key(BASE)


PLAIN = torch.zeros(1, 2, 32, 16)
CHANGED = {
    "kind": torch.nn.Parameter(PLAIN),
    "shape": PLAIN[:, :1],
    "strides": PLAIN.mT.contiguous().mT,
    "dtype": PLAIN.to(torch.int32),
    "offset": torch.zeros(PLAIN.numel() + 1)[1:].view(PLAIN.shape),
    "negated": torch._neg_view(PLAIN),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_fact_of_a_tensor_that_differs(name):
    one, other = TensorFacts(*facts_of(PLAIN)), TensorFacts(*facts_of(CHANGED[name]))
    assert getattr(one, name) != getattr(other, name)
    prefill, decode = BASE, BASE._replace(q=BASE.q[:, :, :1])  # whose keys are written apart
    for base, field in product((prefill, decode), ("q", "k", "v", "sinks", *sorted(EIGHT))):
        given = base._replace(**{field: PLAIN})
        key, changed = call_key(given), call_key(given._replace(**{field: CHANGED[name]}))
        # A decode's number of keys alone is told behind what an entry is found by.
        assert key[0] != changed[0]
    # The index of a GPU is all that is left.
    assert {*CHANGED, "device"} == {*TensorFacts._fields}


@pytest.fixture
def prepared(monkeypatch):
    """The Problems of the launches that plans prepare; nothing is built."""
    yield problems_asked(monkeypatch)
    launch_cache.clear()


@pytest.mark.parametrize("name", OTHERS)
def test_a_launch_is_found_again_by_the_facts(name, prepared):
    base = BASE
    if name in EIGHT:
        base = base._replace(**{x: base[0].to(torch.float8_e4m3fn) for x in "qkv"})
    for given in (base, base._replace(**{name: OTHERS[name]})):
        for _ in range(2):
            plans.plan(make_call(*given[: len(OTHERS)]))
    assert len(prepared) == 2


def test_masks_and_scales_that_one_launch_serves(prepared):
    mask = OTHERS["block_mask"]
    for scale, shown in ((0.5, mask), (2.0, mask), (None, mask_of(causal))):
        plans.plan(make_call(*BASE[:3], None, shown, scale))
    assert len(prepared) == 1
    plans.plan(make_call(*BASE[:3], None, mask_of(sliding_window(3))))
    assert len(prepared) == 2


WAYS = {
    "reference": lambda *given: flex_attention(*given[:9], sinks=given[10]),
    "explain": lambda *given: explain(*given[:9], sinks=given[10]),
    "plan": lambda *given: plans.plan(make_call(*given)),
}
RULES = ("check_dense", "check_devices", "check_tensors", "check_sinks", "check_block_mask")


@pytest.mark.parametrize("way", WAYS)
def test_each_rule_is_asked_once(way, prepared, monkeypatch):
    """Plain torch's way asked of sinks twice, of kernel_options in three places."""
    asked = []

    def counted(module, name):
        rule = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: asked.append(name) or rule(*args))

    for name in RULES:
        counted(checks, name)
    counted(options, "parse")
    calls._options.clear()
    given = BASE._replace(
        block_mask=OTHERS["block_mask"], sinks=OTHERS["sinks"], kernel_options={"BLOCK_M": 32}
    )
    WAYS[way](*given[:11])
    assert sorted(asked) == sorted([*RULES, "parse"])


# From a call's entry down to what all of them share.
ORDER = ("explain", "attention", "plan", "launch_cache", "call")


@pytest.mark.parametrize("name", ORDER)
def test_a_call_goes_downwards(name):
    path = Path(plans.__file__).with_name(f"{name}.py")
    modules = [x.module for x in ast.walk(ast.parse(path.read_text()))
               if isinstance(x, ast.ImportFrom) and x.module]  # fmt: skip
    others = {x.rpartition(".")[2] for x in modules if x.startswith("flexattn.frontend.")}
    assert others & {*ORDER} <= {*ORDER[ORDER.index(name) + 1 :]}
