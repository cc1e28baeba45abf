"""The example server's load test: a small run is right, and what is wrong is seen and said."""

import asyncio
import json
import os
import subprocess
import sys

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from examples.serving.build import build
from examples.serving.load import checks, figures
from examples.serving.load.__main__ import main
from examples.serving.load.run import Plan, Run, options_at
from examples.serving.load.traffic import SHARES, Answer, Ask, Prompt, asks, prompts
from examples.serving.metrics import Metrics
from examples.serving.request import Limits
from examples.serving.web import Front
from tests.example_server import options
from tests.processes import ROOT

LIMITS = Limits(batch=8, chunk=24, longest=96, page=8, pages=60, queue=16)
PLAN = Plan(
    requests=120, clients=12, distinct=25, prompt=40, answer=6, one_by_one=6, judged=3,
    killed=1, streams=2, rest=1.0,
)  # fmt: skip


def ran(change=lambda engine: None, plan=PLAN, chosen=None):
    """A run against a server in this process; change: what is done to its engine before."""

    async def go():
        watch, served = Metrics(), chosen or options(LIMITS)
        engine = build(served, watch)
        change(engine)
        server = TestServer(Front(engine, watch, served).app(), host="127.0.0.1")
        await server.start_server()
        async with server, aiohttp.ClientSession() as session:
            url = str(server.make_url("/")).rstrip("/")
            run = Run(session, url, plan, await options_at(session, url))
            assert run.options == served
            return run, await asyncio.wait_for(run.go(), 120)

    return asyncio.run(go())


def test_a_small_run_is_right_and_all_kinds_of_clients_were_there(tmp_path):
    run, row = ran()
    assert run.wrong == []
    assert {"length", "busy", "left", "cancelled", "too_long", "invalid"} <= set(row["ends"])
    assert row["compared"] > 40 and row["one_by_one"] == 6 and row["judged"] == 3
    assert row["time_between_tokens"]["p99"] >= row["time_between_tokens"]["p50"] > 0
    # Of the client that was killed, and of those that left or were cancelled.
    assert row["server"]['requests_total{outcome="cancelled"}'] >= 2
    text = figures.table(row)
    # It sent 596 for 300: what is beside those that were asked for is named.
    assert row["requests"] - row["burst"] - row["retried"] == PLAN.requests
    assert "120 requests as asked" in text
    assert "time_to_first_token" in text and "0 different; 6 one by one" in text
    figures.save(tmp_path / "figures.json", {"requests": 120}, row)
    data = json.loads((tmp_path / "figures.json").read_text())
    assert data["schema"] == 1 and data["rows"][0]["seconds"] > 0
    assert {"torch", "aiohttp", "device"} <= set(data["environments"][0])


def test_answers_that_were_mixed_up_are_seen():
    def change(engine):
        compute = engine.runner.run

        def swapped(step):
            given = compute(step)
            wanted = [i for i, token in enumerate(given) if token is not None]
            if len(wanted) > 6:
                given[wanted[0]], given[wanted[1]] = given[wanted[1]], given[wanted[0]]
            return given

        engine.runner.run = swapped

    words = " ".join(ran(change)[0].wrong)
    assert "differ from one to the same prompt" in words


def test_pages_that_are_wrong_or_lost_are_seen():
    def change(engine):
        """Every request reads a page of another one, and one page is never given back."""
        seat, give = engine.runner.seat, engine.scheduler.pages.give
        lost = []

        def wrongly(request):
            mine, request.pages[0] = request.pages[0], 1 + request.slot
            seat(request)
            request.pages[0] = mine

        def partly(pages):
            if lost or len(pages) < 2:
                give(pages)
            else:
                lost.append(pages[-1])
                give(pages[:-1])

        engine.runner.seat, engine.scheduler.pages.give = wrongly, partly

    wrong = ran(change)[0].wrong
    assert any("serving_pages_used is 1" in each for each in wrong)
    assert any("below the best one" in each for each in wrong)


def test_how_requests_may_end():
    told = [Prompt((1,), 4)]
    good = Answer(200, "length", "cmpl-1", [1, 2, 3, 4])
    assert checks.ends([(Ask("answer", 0), good)], told) == []
    for ask, answer, words in (
        (Ask("answer", 0), Answer(200, "timeout"), "kind answer ended as 'timeout'"),
        (Ask("too_long", 0), Answer(500, "too_long"), "status 500, not 400"),
        (Ask("answer", 0), Answer(200, "length", "x", [1]), "1 tokens, and 4 are wanted"),
        (Ask("answer", 0), Answer(200, "stop", wrong="b came in a"), "b came in a"),
    ):
        assert words in " ".join(checks.ends([(ask, answer)], told))


def test_memory_is_flat_within_one_percent():
    assert checks.flat("rss", [1000.0, 1010.0, 990.0]) == []
    assert checks.flat("rss", [1000.0, 980.0, 1000.0]) == ["rss went from 1000 to 980, by -2.00%"]
    assert checks.flat("rss", [1000.0, 1011.0]) == ["rss went from 1000 to 1011, by +1.10%"]
    assert checks.flat("rss", [1000.0, 1200.0, 1000.0])
    assert checks.flat("rss", []) == checks.flat("rss", [1000.0]) == []
    assert checks.flat("device", [0.0, 0.0]) == []


def test_every_request_is_counted_once():
    found = {'serving_requests_total{outcome="length"}': 3.0, "serving_steps_total": 9.0}
    assert checks.all_counted(found, 3) == []
    assert "4 requests were sent, and the server counts 3" in checks.all_counted(found, 4)[0]


def test_answers_to_one_prompt_are_compared_as_far_as_they_go():
    known = checks.Known()
    known.see(0, Answer(end="left", tokens=[9]))
    for tokens, end in (([1, 2], "length"), ([1], "left"), ([1, 3], "length")):
        known.see(0, Answer(end=end, tokens=tokens))
    assert (known.compared, known.different) == (2, 1)
    one, other = Answer(tokens=[1], logprobs=[-1.0]), Answer(tokens=[1], logprobs=[-1.0 - 1e-12])
    assert checks.same(one, other, bits=False) and not checks.same(one, other, bits=True)


def test_the_traffic_is_the_same_in_every_run_and_has_all_kinds():
    told = prompts(LIMITS, 50, 200, 9)
    assert told == prompts(LIMITS, 50, 200, 9) and len(set(told)) == 50
    assert max(len(each.tokens) + each.max_tokens for each in told) <= LIMITS.longest
    found = asks(2000, told)
    assert {each.kind for each in found} == {*SHARES, "answer"}
    assert all(each.after <= told[each.prompt].max_tokens for each in found)


def test_only_this_machine_is_asked(capsys):
    assert main(["--url", "http://example.com:80"]) == 2
    assert "on this machine alone" in capsys.readouterr().out


def test_percentiles_of_few_and_of_none():
    assert figures.percentiles([]) == {}
    assert figures.percentiles([0.001]) == {"p50": 1.0, "p99": 1.0, "max": 1.0}
    assert figures.percentiles([i / 1000 for i in range(100)])["p99"] == 99.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_command_with_a_server_of_its_own(tmp_path):
    """Two thousand requests, the first thousand of which say how much memory is wanted."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable, "-m", "examples.serving.load", "--requests", "2000",
            "--attention", "torch", "--json", tmp_path / "figures.json",
        ],
        cwd=ROOT, env=environment, text=True, capture_output=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "nothing is wrong" in done.stdout
    assert len(json.loads((tmp_path / "figures.json").read_text())["rows"]) == 1
