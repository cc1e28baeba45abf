"""Mods of many steps: each part of flexattn looks at a node once, without recursion."""

import copy
import pickle
import threading

import pytest
import torch

from flexattn.errors import UnsupportedError
from flexattn.kernels.base.mask_pieces import print_mask
from flexattn.kernels.block_mask.source import print_bounds
from flexattn.kernels.hopper.source import HOPPER
from flexattn.kernels.printers.gradient_printer import OVER_KEYS, print_gradient
from flexattn.kernels.printers.mask_printer import mask_parts, print_edges
from flexattn.kernels.printers.torch_printer import to_torch
from flexattn.kernels.printers.triton_printer import Traits, print_mod
from flexattn.mods import bind, modes, reader, refusal
from flexattn.mods.algebra import bounds_of
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.mods.expr import MAX_NODES, const, pretty, terms_of, walk
from flexattn.mods.outside import unproven
from flexattn.mods.recorded import from_data, to_data
from flexattn.mods.rules import split
from flexattn.mods.simplify import make, plug, rebuilt
from flexattn.problem import INDEX_RANGES, Captures
from tests.long_mods import CONDITIONS, MASKS, SCORES, counted, graph, nested

RANDOM = [f"random {kind} {seed}" for kind in ("score", "mask") for seed in range(2)]
STEPS = 8
# Calls of flexattn's functions a node, where a part visits each a few times.
A_NODE = 1500


def captures(mod):
    return Captures(mod, (True,))


def everywhere(mod):
    yield from to_torch(mod.expr).splitlines()
    assert len(pretty(mod.expr)) < 60 * MAX_NODES
    assert from_data(to_data(mod)) == mod
    assert pickle.loads(pickle.dumps(mod)).expr is mod.expr is copy.deepcopy(mod).expr
    assert plug(mod.expr, {}) is rebuilt(mod.expr, lambda node, args: None)
    unproven(mod.expr, [torch.zeros(9)], INDEX_RANGES)
    yield from print_mod(captures(mod), Traits()).lines


def of_score(mod):
    yield from everywhere(mod)
    terms = split(mod)
    for part in (terms.core, terms.keep, *terms.added):
        if part is not None:
            yield from print_mod(captures(mod), Traits(), expr=part).lines
    slots = (0,) if any(node.op == "load" for node in walk(mod.expr)) else ()
    yield from print_gradient(captures(mod), slots, Traits(dialect=OVER_KEYS)).lines


def of_mask(mod):
    yield from everywhere(mod)
    form = mask_form(mod.expr, INDEX_RANGES)
    for edge in print_edges(captures(mod), (*form.edges, *(form.free_edges or ())), Traits()):
        yield from (*edge.statements, edge.rest)
    yield from print_bounds(mod, bounds_of(mod)).statements
    yield from mask_parts(captures(mod), Traits(), 1, True, True).lines
    yield from print_mask(captures(mod), Traits(dialect=HOPPER), (64, 64)).lines


def work(name, steps):
    """(calls of flexattn's functions, nodes, lines) of all that is asked of a mod."""
    mod = graph(name, steps)
    with counted() as calls:
        lines = list((of_score if mod.kind == "score" else of_mask)(mod))
    return calls[0], len(list(walk(mod.expr))), lines


@pytest.mark.parametrize("name", [*SCORES, *MASKS, *CONDITIONS, *RANDOM])
def test_work_grows_as_the_mod_does(name):
    """A recurrence that uses a value twice in each of 30 steps took minutes, one of 60 for ever:
    rewriting walked the shared graph as a tree. Text of 200 operations within one another was a
    SyntaxError of Python's, and walks of as many steps a RecursionError of the user's line."""
    calls, nodes, lines = work(name, STEPS)
    assert calls < A_NODE * nodes
    many, more, more_lines = work(name, 4 * STEPS)
    assert many / more < 2.5 * calls / nodes
    for line in (*lines, *more_lines):
        assert nested(line) < 100 and len(line) < 20_000
    assert sum(map(len, more_lines)) / more < 2.5 * sum(map(len, lines)) / nodes


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("fibonacci", 400),
        ("removed", 400),
        *(
            pytest.param(name, 1000, marks=pytest.mark.long)
            for name in (*SCORES, *CONDITIONS, "random score 3", "random score 4")
        ),
    ],
)
def test_hundreds_of_steps(name, steps):
    """Nothing recurses as deeply as a graph is."""
    mod = graph(name, steps)
    for line in (of_score if mod.kind == "score" else of_mask)(mod):
        assert nested(line) < 100


def test_chains_are_sorted_up_to_a_length():
    """Each step of `kept = kept | term` sorted all terms before it anew."""
    mod = graph("kept", 1000)
    assert len(terms_of(mod.expr, "or")) == 1001
    assert pretty(graph("kept", 9).expr).startswith("(((((((((")
    shared = graph("kept", 100).expr
    assert make("or", "bool", (shared, shared)) is shared
    assert make("or", "bool", (shared, const(False, "bool"))) is shared
    assert make("or", "bool", (shared, const(True, "bool"))).value is True


@pytest.fixture
def at_most_forty(monkeypatch):
    for module in (reader, modes, refusal):
        monkeypatch.setattr(module, "MAX_NODES", 40)


@pytest.mark.parametrize(
    ("kind", "fn", "size"),
    [
        ("score", lambda s, b, h, i, j: sum((s * k for k in range(30)), start=s), "more than 40"),
        ("mask", lambda b, h, i, j: sum((i // (k + 2) for k in range(30)), i) > 0, "more than 40"),
        ("score", lambda s, b, h, i, j: s + torch.arange(64.0)[j % 64], "258"),
    ],
)
def test_a_mod_may_have_so_many_operations(kind, fn, size, at_most_forty):
    with pytest.raises(UnsupportedError, match=f"is {size} operations long") as error:
        bind(fn, kind)
    assert "at most 40" in error.value.rule and "capture" in error.value.do


def test_a_loop_without_end_is_refused(at_most_forty):
    """Its trace held the lock of all other traces for ever."""

    def endless(score, b, h, q_idx, kv_idx):
        while True:
            score = score + 1.0

    with pytest.raises(UnsupportedError, match="more than 40 operations"):
        bind(endless, "score")


def test_two_threads_trace_beside_one_another(monkeypatch):
    """One lock was held for all of a first call's tracing and rewriting: other mods waited."""
    begun, go = threading.Event(), threading.Event()
    read = reader.Reader.read

    def slow(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go.wait(30)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(reader.Reader, "read", slow)
    found = []
    other = threading.Thread(
        target=lambda: found.append(bind(lambda s, b, h, i, j: s * 2.25 + j, "score"))
    )
    other.start()
    try:
        assert begun.wait(30)
        assert "1.625" in pretty(bind(lambda s, b, h, i, j: s * 1.625 - j, "score").mod.expr)
    finally:
        go.set()
        other.join()
    assert "2.25" in pretty(found[0].mod.expr)


def test_a_mod_that_looks_up_another_waits_for_nobody():
    def inner(score, b, h, q_idx, kv_idx):
        return score * 0.75

    def outer(score, b, h, q_idx, kv_idx):
        assert bind(inner, "score").mod.expr.op == "mul"
        return score + 0.75

    assert bind(outer, "score").mod.expr.op == "add"
