"""HTTP in front of an engine: completions as JSON or server-sent events, health, metrics."""

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from examples.serving.build import Options
from examples.serving.engine import Engine
from examples.serving.metrics import Metrics
from examples.serving.protocol import (
    ENDS,
    STATUS,
    Completion,
    Writer,
    error_body,
    read_completion,
    usage,
)
from examples.serving.request import End, Refused, Request, Token

MAX_BODY = 1 << 20
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Exchange:
    """A client's request that the engine has taken, and what comes of it."""

    http: web.Request
    asked: Completion
    request: Request
    events: asyncio.Queue[Token | End]


class Front:
    """The routes, over one engine; timeout: seconds that a request has at most."""

    def __init__(
        self, engine: Engine, metrics: Metrics, options: Options, timeout: float = 600.0
    ) -> None:
        self._engine, self._metrics, self._options = engine, metrics, options
        self._timeout = timeout
        metrics.read(engine.scheduler)

    def app(self) -> web.Application:
        """The application; the engine serves as long as it runs."""
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes([
            web.post("/v1/completions", self.complete),
            web.delete("/v1/completions/{id}", self.cancel),
            web.get("/v1/models", self.models),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        ])  # fmt: skip
        app.cleanup_ctx.append(self._serving)
        return app

    async def _serving(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._engine.serve())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions. A client that closes its connection cancels its request."""
        id = f"cmpl-{uuid.uuid4().hex}"
        events: asyncio.Queue[Token | End] = asyncio.Queue()
        try:
            asked = read_completion(await http.read(), self._options.model)
            now = time.monotonic()
            request = Request(
                id, asked.tokens, asked.max_tokens, events.put_nowait, asked.salt,
                now + min(self._timeout, asked.timeout or self._timeout), now,
            )  # fmt: skip
            self._engine.submit(request)
        except Refused as refused:
            self._metrics.refused(refused.kind)
            wait = {"Retry-After": "1"} if refused.kind == "busy" else {}
            body = error_body(refused.kind, str(refused))
            return web.json_response(body, status=STATUS[refused.kind], headers=wait)
        try:
            # The status is known only when something came: a request may end while it waits.
            first = await events.get()
            if isinstance(first, End) and first.reason in ENDS:
                return _failed(id, first)
            send = self._stream if asked.stream else self._whole
            return await send(Exchange(http, asked, request, events), first)
        finally:
            # By now it has ended, but where the client has gone or this handler was cancelled.
            self._engine.cancel(id)

    async def _whole(self, each: Exchange, event: Token | End) -> web.StreamResponse:
        given: list[Token] = []
        while isinstance(event, Token):
            given.append(event)
            event = await each.events.get()
        if event.reason in ENDS:
            return _failed(each.request.id, event)
        body = Writer(each.request.id, each.asked, self._options.model).body(
            [t.token for t in given], [t.logprob for t in given], event.reason
        )
        counts = usage(each.request.prompt, len(given), each.request.cached)
        return web.json_response(
            {**body, "usage": counts}, headers={"X-Request-Id": each.request.id}
        )

    async def _stream(self, each: Exchange, event: Token | End) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream", "Cache-Control": "no-cache",
                "X-Request-Id": each.request.id,
            }
        )  # fmt: skip
        writer, made = Writer(each.request.id, each.asked, self._options.model), 0
        with contextlib.suppress(ConnectionError):  # the client has gone
            await response.prepare(each.http)
            while isinstance(event, Token):
                made += 1
                await _send(response, writer.body([event.token], [event.logprob]))
                event = await each.events.get()
            if event.reason in ENDS:
                await _send(response, error_body(event.reason, _words(event)))
            else:
                counts = usage(each.request.prompt, made, each.request.cached)
                await _send(response, {**writer.body([], [], event.reason), "usage": counts})
            await response.write(b"data: [DONE]\n\n")
        return response

    async def cancel(self, http: web.Request) -> web.Response:
        """DELETE /v1/completions/ID, of the header X-Request-Id."""
        id = http.match_info["id"]
        if self._engine.cancel(id):
            return web.json_response({"id": id, "cancelled": True})
        return web.json_response(error_body("unknown", f"no request {id!r} is served"), status=404)

    async def models(self, http: web.Request) -> web.Response:
        """GET /v1/models: the one that is served, and how."""
        about = {"id": self._options.model, "object": "model", "exact": self._options.exact}
        listed = {**about, **dataclasses.asdict(self._options)}
        return web.json_response({"object": "list", "data": [listed]})

    async def health(self, http: web.Request) -> web.Response:
        """GET /health: 200 while steps can run."""
        failure = self._engine.failure
        if failure is None:
            return web.json_response({"status": "ok"})
        return web.json_response(error_body("failed", repr(failure)), status=500)

    async def metrics(self, http: web.Request) -> web.Response:
        """GET /metrics, for Prometheus."""
        return web.Response(body=self._metrics.text(), headers={"Content-Type": PROMETHEUS})


async def _send(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")


def _words(end: End) -> str:
    return {
        "timeout": "the request's time is over",
        "cancelled": "the request was cancelled",
        "failed": "the engine has stopped",
    }[end.reason]


def _failed(id: str, end: End) -> web.Response:
    body = error_body(end.reason, _words(end))
    return web.json_response(body, status=ENDS[end.reason], headers={"X-Request-Id": id})
