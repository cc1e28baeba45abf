"""One request over HTTP, and what came of it, timed where it arrives."""

import json
import time
from typing import Any

import aiohttp

from examples.serving.load.traffic import Answer, Ask


async def send(
    session: aiohttp.ClientSession, url: str, ask: Ask, posted: dict[str, object]
) -> Answer:
    """Post it, and do what a client of its kind does."""
    answer = Answer(began=time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=posted) as response:
        answer.status = response.status
        answer.id = response.headers.get("X-Request-Id", "")
        if response.content_type != "text/event-stream":
            _take(answer, await response.json(), stream=False)
            return answer
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                break
            _take(answer, json.loads(line[6:]), stream=True)
            if len(answer.tokens) != ask.after or answer.end:
                continue
            if ask.kind == "leave":
                answer.end = "left"
                response.close()
                break
            if ask.kind == "delete":
                async with session.delete(f"{url}/v1/completions/{answer.id}") as deleted:
                    await deleted.read()
    if not answer.end:
        answer.wrong = f"the stream of {answer.id} has no end"
    return answer


def _take(answer: Answer, data: dict[str, Any], stream: bool) -> None:
    if "error" in data:
        answer.end = data["error"]["type"]
        return
    choice = data["choices"][0]
    if data["id"] != answer.id:
        answer.wrong = f"{data['id']} came in the answer to {answer.id}"
    answer.tokens += choice["token_ids"]
    answer.logprobs += choice["logprobs"]["token_logprobs"]
    if stream and choice["token_ids"]:
        answer.times.append(time.perf_counter())
    answer.end = choice["finish_reason"] or ""


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The server's samples, by name and labels as they are written."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
