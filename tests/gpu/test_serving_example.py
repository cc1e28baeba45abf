"""The example server's engine on a GPU: captured steps, cascades, bits, memory."""

import pytest
import torch

from examples.serving.build import build, build_model
from examples.serving.load.checks import against_whole
from examples.serving.load.traffic import Answer, Prompt
from examples.serving.request import Limits
from tests.example_server import at_rest, ids, one_by_one, options, prompts, together

LIMITS = Limits(batch=16, chunk=112, longest=700, page=16, pages=400)
LENGTHS = [1, 300, 17, 64, 150, 5, 33, 90, 250, 2, 128, 47, 81, 9, 200, 15, 16, 31, 63, 111]


def on_gpu(**changes):
    usual = {"model": "toy-small", "attention": "plan", "device": "cuda", "dtype": "bfloat16"}
    return options(LIMITS, **usual | changes)


@pytest.mark.parametrize("cascade_from", [0, 64], ids=["plain", "cascades"])
def test_answers_are_the_models(cascade_from):
    chosen = on_gpu(cascade_from=cascade_from)
    engine, forms = build(chosen), set()
    run = engine.runner.run

    def seen(step):
        forms.add(step.shared is not None)
        return run(step)

    engine.runner.run = seen
    asked = prompts(LENGTHS, common=200)
    found = together(engine, asked[:1], 1) + together(engine, asked[1:], 24)
    assert at_rest(engine) and forms == ({False, True} if cascade_from else {False})
    model = build_model(chosen)
    exact = model.to(torch.float64)
    for prompt, (given, end) in zip(asked, found, strict=True):
        assert end in ("length", "stop")
        told = Prompt(tuple(prompt), len(given))
        assert against_whole(model, exact, told, Answer(tokens=ids(given))) == ""


def test_batch_invariant_answers_have_the_bits_of_one_by_one_decoding():
    chosen = on_gpu(batch_invariant=True)
    asked = prompts(LENGTHS, common=40)
    engine = build(chosen)
    found, again = together(engine, asked, 16), together(engine, asked[::-1], 16)[::-1]
    assert found == again
    assert found[:6] == one_by_one(chosen, asked[:6], 16)


def test_steps_allocate_nothing():
    engine = build(on_gpu())
    together(engine, prompts(LENGTHS[:4]), 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    together(engine, prompts(LENGTHS, common=100, seed=1), 30)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert at_rest(engine)
