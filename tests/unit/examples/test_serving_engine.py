"""The example server's engine without HTTP, on attention in plain torch."""

import asyncio
from dataclasses import replace

import pytest
import torch

from examples.serving.build import build, build_model
from examples.serving.load.checks import against_whole
from examples.serving.load.traffic import Answer, Prompt
from examples.serving.request import Refused
from flexattn.errors import InputError
from tests.example_server import SMALL, Asked, at_rest, ids, one_by_one, options, prompts, together


def test_a_batch_gives_what_each_request_gives_alone():
    """Prompts longer than a step, more requests than places, and prefixes that are found."""
    chosen, asked = options(), prompts([1, 30, 5, 13, 2, 40, 9], common=18)
    engine = build(chosen)
    first, again = together(engine, asked, 7), together(engine, asked[::-1], 7)[::-1]
    alone = one_by_one(chosen, asked, 7)
    for both in zip(first, again, alone, strict=True):
        tokens = [ids(given) for given, _ in both]
        assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 7
        for one, other in zip(both[0][0], both[2][0], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
    assert at_rest(engine)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_answers_are_the_models_and_a_wrong_token_is_seen(dtype):
    chosen, asked = options(dtype=dtype), prompts([3, 41])
    model = build_model(chosen)
    exact = model.to(torch.float64)
    for prompt, (given, _) in zip(asked, together(build(chosen), asked, 9), strict=True):
        answer = Answer(tokens=ids(given))
        told = Prompt(tuple(prompt), 9)
        assert against_whole(model, exact, told, answer) == ""
        answer.tokens[4] ^= 1
        assert "below the best one" in against_whole(model, exact, told, answer)


def test_every_token_depends_on_the_first_one_and_answers_differ():
    """What makes an answer that was mixed up, or a page of another request, be seen."""
    (prompt,) = prompts([60])
    changed = [prompt[0] % 255 + 1, *prompt[1:]]
    engine = build(options())
    (one, _), (other, _) = together(engine, [prompt, changed], 6)
    assert all(a.logprob != b.logprob for a, b in zip(one, other, strict=True))
    answers = [ids(a) for a, _ in together(engine, prompts([20] * 12), 6)]
    assert len(set(map(tuple, answers))) == 12
    assert sum(len(set(each)) > 2 for each in answers) > 9


def test_pages_of_a_cancelled_request_serve_the_next_one():
    asked = Asked(build(options()))
    asked.submit([5] * 70, 20)
    for _ in range(3):
        asked.engine.step()
    assert asked.engine.cancel("0") and not asked.engine.cancel("0")
    (prompt,) = prompts([50])
    asked.submit(prompt, 6)
    found = asked.finish().answers()
    assert found[0][1] == "cancelled"
    assert ids(found[1][0]) == ids(one_by_one(options(), [prompt], 6)[0][0])
    assert at_rest(asked.engine)


def test_a_step_that_raises_ends_every_request_and_takes_no_other():
    chosen = options()
    engine = build(chosen)

    def broken(step):
        raise RuntimeError("the device is gone")

    engine.runner.run = broken
    asked = Asked(engine)
    for each in prompts([3] * 6):
        asked.submit(each, 4)
    with pytest.raises(RuntimeError, match="the device is gone"):
        asyncio.run(engine.serve())
    assert [told[-1].reason for told in asked.events] == ["failed"] * 6
    assert at_rest(engine)
    with pytest.raises(Refused, match="the engine has stopped: the device is gone") as refused:
        asked.submit([1], 1)
    assert refused.value.kind == "failed"


def test_requests_come_while_steps_run():
    engine, asked = build(options()), prompts([9, 33, 2], common=8)

    async def run():
        serving = asyncio.create_task(engine.serve())
        ended = [asyncio.get_running_loop().create_future() for _ in asked]
        told = Asked(engine)
        for each, end in zip(asked, ended, strict=True):
            request = told.submit(each, 5)
            keep, told.events[-1] = request.told, told.events[-1]

            def tell(event, keep=keep, end=end):
                keep(event)
                if hasattr(event, "reason"):
                    end.set_result(event.reason)

            request.told = tell
            await asyncio.sleep(0.01)
        reasons = await asyncio.wait_for(asyncio.gather(*ended), 60)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return reasons, told.answers()

    reasons, answers = asyncio.run(run())
    assert reasons == ["length"] * 3 and at_rest(engine)
    alone = one_by_one(options(), asked, 5)
    assert [ids(a) for a, _ in answers] == [ids(a) for a, _ in alone]


def test_options_that_cannot_be():
    with pytest.raises(InputError, match="plain torch"):
        build(options(batch_invariant=True))
    with pytest.raises(InputError, match="models are tiny, toy-small, toy-llama"):
        build(options(model="large"))
    with pytest.raises(InputError, match="chunk=0"):
        build(options(replace(SMALL, chunk=0)))
