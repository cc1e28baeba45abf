"""Every argument of a kernel has the value of its name, or the launch is refused in words."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import alibi, causal
from flexattn.errors import ArgumentError
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.binding import bind_arguments
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.mods import bind as bind_mod
from flexattn.runtime import launch
from flexattn.runtime.launch import Lists, prepare_launch
from tests.launches import Recorded
from tests.problems import A100, H200, choices, problem

TAKEN = (
    Argument("Q", "tensordesc<bf16[1, 1, 64, 64]>"),
    Argument("n", "i32"),
    Argument("K", "*i8"),
)


def test_values_are_found_by_name():
    found = bind_arguments(TAKEN, {"n": 3}, ("K", "unused", "Q"), {"Q": "box"}, spare=("unused",))
    assert (found.fixed, found.given, found.passed) == ((None, 3, None), ((0, 2), (2, 0)), 3)
    assert found.boxes == ("box",)


def test_other_values_of_the_same_names_are_bound_anew():
    """What names decide is remembered, for arguments that cannot change."""
    for n in (3, 4):
        found = bind_arguments(TAKEN, {"n": n}, ("K", "Q"), {"Q": n})
        assert (found.fixed, found.boxes) == ((None, n, None), (n,))
    changing = [*TAKEN]
    bind_arguments(changing, {"n": 3}, ("K", "Q"), {"Q": 3})
    changing[1] = Argument("m", "i32")
    with pytest.raises(ArgumentError, match="for m of"):
        bind_arguments(changing, {"n": 3}, ("K", "Q"), {"Q": 3})


@pytest.mark.parametrize(
    ("fixed", "given", "boxes", "words"),
    [
        ({}, ("Q", "K"), ("Q",), "nothing is given for n of"),
        ({"n": 1}, ("K",), ("Q",), "nothing is given for Q of"),
        ({"n": 1}, ("Q", "K"), (), "nothing is given for the box of Q"),
        ({"n": 1, "m": 2}, ("Q", "K"), ("Q",), "m for a kernel that takes Q, n, K"),
        ({"n": 1}, ("Q", "K", "m"), ("Q",), "m for a kernel that takes Q, n, K"),
        ({"n": 1}, ("Q", "K", "n"), ("Q",), "n for a kernel"),
        ({"n": 1}, ("Q", "K"), ("Q", "K"), "the box of K"),
        ({"n": 1}, ("Q", "K", "K"), ("Q",), "K twice among what a launch passes"),
    ],
)
def test_what_does_not_match_is_refused_in_words(fixed, given, boxes, words):
    with pytest.raises(ArgumentError, match=words):
        bind_arguments(TAKEN, fixed, given, dict.fromkeys(boxes, "box"))


CASES = {
    "hopper": ("prefill", H200, Options(exact=HopperPrefillConfig(2, 128, 2, 240))),
    "hopper counts": (
        "prefill", H200,
        Options(exact=HopperPrefillConfig(2, 128, 2, 240, tile_scheduler="dynamic")),
    ),
    "triton": ("prefill", A100, NONE),
    "decode": ("decode", H200, NONE),
}  # fmt: skip


def launched(case, shuffle):
    """What the kernels of a call were given by name, their arguments in another order."""
    kind, device, options = CASES[case]
    slopes = torch.arange(32.0)
    score = alibi(32, "cpu")
    wanted = problem(kind, mask_mod=causal, score_mod=score, sinks="float32")
    choice = next(choices(wanted, device, options))
    kernels = []
    for source in (choice.source, choice.combine):
        if source is not None:
            arguments = list(source.arguments)
            shuffle(arguments)
            source = replace(source, arguments=tuple(arguments))
        kernels.append(source and Recorded(source))
    choice = replace(choice, kernels=tuple(filter(None, kernels)))
    stub = SimpleNamespace(choose=lambda *args: choice)
    q_len = wanted.q_len
    q, k, v = (torch.empty(2, h, n, 128, dtype=torch.bfloat16) for h, n in
               ((32, q_len), (8, 8192), (8, 8192)))  # fmt: skip
    lists = Lists.of(create_block_mask(causal, None, None, q_len, 8192, "cpu"))
    made = prepare_launch(wanted, device, torch.device("cpu"), stub, options, q, k, v, lists)
    bound = bind_mod(score, "score"), bind_mod(causal, "mask")
    rest = made.rest_of(lists, *bound)
    out = made.run(q, k, v, 0.5, rest, slopes)
    (attend,) = kernels[0].launched
    assert attend["Q"] is q and attend["K"] is k and attend["V"] is v
    assert attend["OUT"] is out.out and attend["LSE"] is out.lse and attend["SINKS"] is slopes
    assert attend["stride_kn"] == 128 and attend["stride_kh"] == 8192 * 128
    assert attend["KV_IDX"] is lists.kv_idx and attend["FULL_NUM"] is lists.full_num
    assert attend["score_buf0"] is bound[0].tensors[0] and attend["sm_scale"] == 0.5
    assert None not in attend.values()
    fixed = [kernel.fixed for kernel in kernels if kernel]
    if kernels[1]:
        (merge,) = kernels[1].launched
        assert merge["OUT"] is out.out and merge["WORKSPACE"] is attend["WORKSPACE"]
        assert None not in merge.values()
    return fixed, made


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_arguments_decides_nothing(case):
    """Once a launch rebuilt the kernel's order by hand, and two strides that had changed places
    were as many as before.
    """
    usual, _ = launched(case, lambda arguments: None)
    for seed in range(3):
        assert launched(case, random.Random(seed).shuffle)[0] == usual


@pytest.mark.parametrize("case", CASES)
def test_an_argument_that_nobody_binds_is_an_error(case):
    with pytest.raises(ArgumentError, match="nothing is given for stride_of_nothing"):
        launched(case, lambda arguments: arguments.append(Argument("stride_of_nothing", "i64")))
    with pytest.raises(ArgumentError, match="stride_vh for a kernel that takes"):
        launched(case, without("stride_vh"))


def without(name):
    """What takes an argument out of a kernel's, where it is there."""

    def edit(arguments):
        arguments[:] = [argument for argument in arguments if argument.name != name]

    return edit


def test_a_launch_names_all_that_it_passes():
    _, made = launched("hopper counts", lambda arguments: None)
    assert len(set(launch._GIVEN)) == len(launch._GIVEN)
    assert not set(launch._GIVEN) & set(made.rest)
