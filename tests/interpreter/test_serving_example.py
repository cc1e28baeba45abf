"""The example server's engine over the library's plans, in the interpreter."""

import pytest
import torch

from examples.serving import model
from examples.serving.build import build, build_model
from examples.serving.load.checks import against_whole
from examples.serving.load.traffic import Answer, Prompt
from examples.serving.request import Limits
from tests.example_server import at_rest, ids, one_by_one, options, prompts, together

FEW = Limits(batch=3, chunk=5, longest=24, page=4, pages=15)


@pytest.fixture
def small(monkeypatch):
    """A model of one layer: each of them costs the interpreter seconds."""

    def make(head_dim, heads):
        shape = model.Shape(1, 32, 48, heads, head_dim)
        monkeypatch.setitem(model.SHAPES, "tiny", shape)

    return make


def counted(engine):
    """Steps that the engine runs from now on, by whether they have a cascade."""
    counts, run = {False: 0, True: 0}, engine.runner.run

    def counting(step):
        counts[step.shared is not None] += 1
        return run(step)

    engine.runner.run = counting
    return counts


def test_answers_of_chunks_pages_and_cascades_are_the_models(small):
    small(16, (2, 1))
    chosen = options(FEW, attention="plan", dtype="float32", cascade_from=8)
    asked = prompts([3, 1, 2], common=8)
    engine = build(chosen)
    counts = counted(engine)
    found = together(engine, asked[:1], 1) + together(engine, asked[1:], 3)
    assert counts[True] >= 1 and counts[False] >= 3 and at_rest(engine)
    small_model = build_model(chosen)
    exact = small_model.to(torch.float64)
    for prompt, (given, end) in zip(asked, found, strict=True):
        told = Prompt(tuple(prompt), len(given))
        assert end == "length"
        assert against_whole(small_model, exact, told, Answer(tokens=ids(given))) == ""


def test_batch_invariant_answers_have_the_bits_of_one_by_one_decoding(small):
    small(64, (1, 1))
    chosen = options(FEW, attention="plan", dtype="bfloat16", batch_invariant=True, cascade_from=1)
    assert chosen.exact and not chosen.cascades
    asked = prompts([1, 6], common=4)
    engine = build(chosen)
    found = together(engine, asked, 2)
    assert at_rest(engine) and found == one_by_one(chosen, asked, 2)
