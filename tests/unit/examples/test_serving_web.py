"""The example server over HTTP: answers, streams, refusals, clients that go away, metrics."""

import asyncio
import contextlib
import json
import time

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from examples.serving.build import build
from examples.serving.load.client import metrics
from examples.serving.metrics import Metrics
from examples.serving.web import MAX_BODY, Front
from tests.example_server import SMALL, at_rest, ids, one_by_one, options, prompts

PATH = "/v1/completions"


class Served:
    """A client of a server in this process, and its engine."""

    def __init__(self, client, engine):
        self.client, self.engine = client, engine

    async def post(self, status=200, **body):
        async with self.client.post(PATH, json=body) as response:
            found = await response.json()
            assert response.status == status, found
            return found

    async def refused(self, status, kind, **body):
        error = (await self.post(status, **body))["error"]
        assert error["type"] == kind
        return error["message"]

    async def events(self, **body):
        async with self.client.post(PATH, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            return [line[6:-1] async for line in response.content if line != b"\n"]

    async def metrics(self):
        return await metrics(self.client.session, str(self.client.make_url("/")).rstrip("/"))

    async def rest(self):
        for _ in range(200):
            if at_rest(self.engine):
                return True
            await asyncio.sleep(0.01)
        return False


def served(test, slow=0.0, limits=SMALL, **more):
    """Run a coroutine of a Served; slow: seconds that each step takes in addition."""

    async def run():
        watch = Metrics()
        chosen = options(limits)
        engine = build(chosen, watch)
        compute = engine.runner.run

        def slowly(step):
            time.sleep(slow)
            return compute(step)

        engine.runner.run = slowly
        server = TestServer(Front(engine, watch, chosen, **more).app(), host="127.0.0.1")
        async with TestClient(server) as client:
            await asyncio.wait_for(test(Served(client, engine)), 60)

    asyncio.run(run())


def test_an_answer_at_once_and_the_same_one_in_a_stream():
    (prompt,) = prompts([21])
    expected = one_by_one(options(), [prompt], 6)[0][0]

    async def test(on):
        found = await on.post(prompt=prompt, max_tokens=6, logprobs=1, model="tiny")
        (choice,) = found["choices"]
        assert choice["token_ids"] == ids(expected)
        given = choice["logprobs"]["token_logprobs"]
        assert given == pytest.approx([logprob for _, logprob in expected], abs=1e-9)
        assert choice["finish_reason"] == "length" and found["object"] == "text_completion"
        assert choice["text"] == bytes(choice["token_ids"]).decode("utf-8", "replace")
        assert found["usage"] == {
            "prompt_tokens": 21, "completion_tokens": 6, "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip
        events = await on.events(prompt=prompt, max_tokens=6)
        assert events.pop() == b"[DONE]"
        chunks = [json.loads(each) for each in events]
        parts = [each["choices"][0] for each in chunks]
        assert [token for each in parts for token in each["token_ids"]] == choice["token_ids"]
        assert len(parts) == 7 and "logprobs" not in parts[0]
        assert "".join(each["text"] for each in parts) == choice["text"]
        assert [each["finish_reason"] for each in parts] == [None] * 6 + ["length"]
        assert len({each["id"] for each in chunks}) == 1 and chunks[0]["id"] != found["id"]
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        salted = await on.post(prompt=prompt, max_tokens=6, cache_salt="mine")
        assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert salted["choices"][0]["token_ids"] == choice["token_ids"]

    served(test)


def test_text_is_bytes():
    async def test(on):
        text = await on.post(prompt="häuser", max_tokens=3)
        assert text["usage"]["prompt_tokens"] == 7
        same = await on.post(prompt=list("häuser".encode()), max_tokens=3)
        assert text["choices"] == same["choices"]

    served(test)


def test_bad_requests_are_told_what_is_wrong():
    async def test(on):
        for body, words in (
            ({}, "prompt"),
            ({"prompt": ""}, "the prompt is empty"),
            ({"prompt": [1, 256]}, "less than 256"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "a", "max_tokens": "3"}, "max_tokens"),
            ({"prompt": "a", "temperature": 0.7}, "temperature"),
            ({"prompt": "a", "timeout": -1}, "timeout"),
            ({"prompt": "a", "best_of": 3}, "best_of"),
            ({"prompt": "a", "model": "gpt"}, "'gpt' is not served here, 'tiny' is"),
        ):
            assert words in await on.refused(400, "invalid", **body), body
        words = await on.refused(400, "too_long", prompt=[1] * 90, max_tokens=7)
        assert "make 97, and a request has at most 96" in words
        async with on.client.post(PATH, data=b"{") as response:
            assert response.status == 400
        async with on.client.post(PATH, data=b" " * (MAX_BODY + 1)) as response:
            assert response.status == 413
        found = await on.metrics()
        assert found['serving_requests_total{outcome="invalid"}'] == 10
        assert found['serving_requests_total{outcome="too_long"}'] == 1
        assert at_rest(on.engine)

    served(test)


def test_a_full_queue_refuses_the_rest_and_says_when_to_come_back():
    async def test(on):
        async def one(i):
            async with on.client.post(PATH, json={"prompt": [1 + i], "max_tokens": 4}) as response:
                await response.read()
                return response.status, response.headers.get("Retry-After")

        found = await asyncio.gather(*map(one, range(60)))
        assert set(found) == {(200, None), (503, "1")}
        assert sum(status == 200 for status, _ in found) >= 20
        assert await on.rest()

    served(test, slow=0.01)


def test_time_that_is_over_before_and_after_the_first_token():
    async def test(on):
        last = (await on.events(prompt="b", max_tokens=90, timeout=0.6))[-2:]
        assert json.loads(last[0])["error"]["type"] == "timeout" and last[1] == b"[DONE]"
        others = [asyncio.create_task(on.post(prompt="c", max_tokens=60)) for _ in range(4)]
        while len(on.engine.scheduler.running) < 4:
            await asyncio.sleep(0.01)
        words = await on.refused(504, "timeout", prompt="d", timeout=0.05, stream=True)
        assert "time is over" in words
        for each in others:
            each.cancel()
        assert await on.rest()

    served(test, slow=0.02)


def test_the_servers_own_limit_of_time():
    async def test(on):
        await on.refused(504, "timeout", prompt="a", max_tokens=60, timeout=50.0)

    served(test, slow=0.01, timeout=0.1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waiting", [True, False])
def test_a_client_that_goes_away_gives_its_pages_back(stream, waiting):
    async def test(on):
        count = 6 if waiting else 1
        asked = {"prompt": "gone", "max_tokens": 80, "stream": stream}
        tasks = [asyncio.create_task(on.post(**asked)) for _ in range(count)]
        # The pages are enough for three of them.
        while (len(on.engine.scheduler.waiting), len(on.engine.scheduler.running)) != (
            (3, 3) if waiting else (0, 1)
        ):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await on.rest()
        found = await on.metrics()
        assert found['serving_requests_total{outcome="cancelled"}'] == count

    served(test, slow=0.01)


def test_a_request_can_be_cancelled_by_its_id():
    async def test(on):
        async with on.client.post(
            PATH, json={"prompt": "a", "max_tokens": 80, "stream": True}
        ) as response:
            id = response.headers["X-Request-Id"]
            await response.content.readline()
            async with on.client.delete(f"{PATH}/{id}") as deleted:
                assert (await deleted.json()) == {"id": id, "cancelled": True}
            rest = (await response.read()).split(b"\n\n")
        assert json.loads(rest[-3][6:])["error"]["type"] == "cancelled"
        async with on.client.delete(f"{PATH}/{id}") as deleted:
            assert deleted.status == 404
        assert await on.rest()

    served(test, slow=0.01)


def test_metrics_are_prometheus_and_add_up():
    async def test(on):
        for each in prompts([20, 20, 7], common=16):
            await on.post(prompt=each, max_tokens=5)
        async with on.client.get("/metrics") as response:
            assert response.content_type == "text/plain"
            families = {
                each.name: each for each in text_string_to_metric_families(await response.text())
            }
        one = lambda name: families[name].samples[0].value  # noqa: E731
        tokens = {s.labels["kind"]: s.value for s in families["serving_tokens"].samples
                  if s.name.endswith("_total")}  # fmt: skip
        assert tokens == {"made": 15, "prompt": 36 + 20 + 7, "cached": 32}
        assert one("serving_pages_usable") == one("serving_pages_free") == SMALL.pages - 1
        assert one("serving_pages_used") == one("serving_requests_running") == 0
        counts = {s.name: s.value for f in families.values() for s in f.samples}
        assert counts["serving_time_to_first_token_seconds_count"] == 3
        assert counts["serving_time_between_tokens_seconds_count"] == 12
        assert counts["process_resident_memory_bytes"] > 2**20

    served(test)


def test_what_is_served_and_how_it_is():
    async def test(on):
        async with on.client.get("/health") as response:
            assert response.status == 200
        async with on.client.get("/v1/models") as response:
            (about,) = (await response.json())["data"]
        assert about["id"] == "tiny" and about["exact"] and about["limits"]["pages"] == SMALL.pages

        def broken(step):
            raise RuntimeError("the device is gone")

        on.engine.runner.run = broken
        assert "the engine has stopped" in await on.refused(500, "failed", prompt="a")
        assert "the device is gone" in await on.refused(500, "failed", prompt="a")
        async with on.client.get("/health") as response:
            assert response.status == 500

    with contextlib.suppress(RuntimeError):
        served(test)
