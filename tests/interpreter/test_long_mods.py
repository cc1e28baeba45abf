"""Mods of many steps, in Triton's interpreter; and a process that forks while it traces them."""

import faulthandler
import os
import threading

import pytest
import torch

import flexattn
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import bind
from tests.gradients import assert_gradients
from tests.long_mods import (
    fibonacci,
    functions,
    halved,
    kept,
    polynomial,
    removed,
    vectors,
    windows,
)
from tests.serving import SMALL, assert_right, batch, plan_for, run
from tests.support import assert_accurate, block_mask, inputs


def long(*row):
    return pytest.param(*row, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("rows", "score_mod", "mask_mod"),
    [
        (19, fibonacci(60), halved(40)),
        (1, fibonacci(90), removed(200)),
        long(19, functions(200), windows(200)),
        long(19, polynomial(120), windows(60)),
        long(19, vectors(60), kept(1200)),
        long(1, fibonacci(1000), halved(400)),
    ],
)
def test_forward(rows, score_mod, mask_mod):
    """Linear recurrences of 30 steps took minutes, those of 60 had no end; 200 operations in a row
    raised SyntaxError, or RecursionError, of which the user's line was said to be guilty."""
    q, k, v = inputs(B=1, Hq=2, L=rows, S=23)
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=block_mask(mask_mod, q, k, 16))


@pytest.mark.parametrize(
    "score_mod", [fibonacci(60), long(polynomial(120)), long(functions(200)), long(vectors(60))]
)
def test_backward(score_mod):
    q, k, v = inputs(B=1, Hq=1, L=17, S=19)
    assert_gradients(q, k, v, make=lambda: score_mod)


@pytest.mark.parametrize(
    ("score_mod", "mask_mod"),
    [(fibonacci(30), removed(60)), long(polynomial(120), halved(40)), long(None, windows(60))],
)
def test_a_plan(score_mod, mask_mod):
    each = batch([1, 1], [17, 5])
    call = {"score_mod": score_mod, "mask_mod": mask_mod}
    assert_right(run(plan_for(each, config=SMALL, **call), each), each, **call)


def test_explain():
    q, k, v = inputs(B=1, Hq=1, L=17, S=19)
    mask = block_mask(halved(40), q, k, 16)
    call = {"score_mod": fibonacci(60), "block_mask": mask}
    assert "q_len=17" in str(flexattn.explain(q, k, v, **call))


@pytest.mark.parametrize("mask_mod", [halved(40), removed(70), long(kept(70)), long(windows(70))])
def test_block_masks(mask_mod):
    """Blocks of a mask are those of its dense form, however its bounds are cut short."""
    at = torch.arange(70)
    dense = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    zero = torch.zeros((), dtype=torch.int64)
    tiles = torch.nn.functional.pad(dense(zero, zero, at, at), (0, 10, 0, 10))
    tiles = tiles.unflatten(1, (5, 16)).unflatten(0, (5, 16)).any(3).any(1)
    found = flexattn.create_block_mask(mask_mod, None, None, 70, 70, "cpu", 16)
    assert torch.equal(found.to_dense()[0, 0].bool(), tiles)


def test_a_mod_read_again_is_the_same():
    q, k, v = inputs(B=1, Hq=1, L=17, S=19)
    bound, mask = bind(fibonacci(60), "score"), bind(halved(40), "mask")
    flexattn.flex_attention(q, k, v, score_mod=fibonacci(60))
    assert bind(score_callable(bound), "score") and bind(mask_callable(mask), "mask")
    assert bind(fibonacci(60), "score").mod is bound.mod


def score_of(number):
    return lambda s, b, h, i, j: s * (number + 0.5) + j * number


def mask_of(number):
    return lambda b, h, i, j: i + number >= j


def in_child(number):
    """Fork; the status of a child that makes a block mask and attends, or says where it hangs."""
    q, k, v = inputs(B=1, Hq=1, L=17, S=19)
    child = os.fork()
    if not child:
        try:
            faulthandler.dump_traceback_later(60, exit=True)
            mask = block_mask(mask_of(number), q, k, 16)
            flexattn.flex_attention(q, k, v, score_mod=score_of(-number), block_mask=mask)
            os._exit(0)
        finally:
            os._exit(3)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_children_of_a_process_that_traces_and_interprets():
    """A child's first call waited for ever for locks that threads of its parent had held."""
    q, k, v = inputs(B=1, Hq=1, L=17, S=19)
    stop, numbers = threading.Event(), iter(range(100, 10**6))

    def serve():
        while not stop.is_set():
            # Other code each time: a callable of known code is only recognised.
            score_mod = eval(f"lambda s, b, h, i, j: s * {next(numbers)}.5 + j", {})
            flexattn.flex_attention(q, k, v, score_mod=score_mod)

    flexattn.flex_attention(
        q, k, v, score_mod=score_of(1), block_mask=block_mask(mask_of(1), q, k)
    )
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(2)]
    for each in threads:
        each.start()
    try:
        assert [in_child(number) for number in range(2, 5)] == [0] * 3
    finally:
        stop.set()
        for each in threads:
            each.join()
