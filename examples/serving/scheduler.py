"""What runs next: admission, chunks of prompts beside requests that decode, and who leaves.

Nothing here touches a tensor or a socket. A request is admitted once the pages of its whole prompt
and its longest answer can be taken, and they are taken then: no request that has begun has to wait
for pages or to be preempted, so its tokens come at the pace of the steps. The price is pages that
lie idle where answers end early; `max_tokens` bounds it. Requests are admitted in the order of
their arrival, and a large one is not overtaken, so none waits for ever.
"""

import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from examples.serving.pages import Pages
from examples.serving.prefix import Shared, most_shared, page_keys
from examples.serving.request import End, Limits, Refused, Request, Token

END_OF_TEXT = 0


@dataclass(frozen=True)
class Piece:
    """Tokens first to last of a request, whose keys a step writes; it gives one where `wanted`."""

    request: Request
    first: int
    last: int

    @property
    def wanted(self) -> bool:
        return self.last == len(self.request.tokens)


@dataclass(frozen=True)
class Step:
    """Pieces of one batch, and the prefix that some of them are decoded behind in a cascade."""

    pieces: tuple[Piece, ...]
    shared: Shared | None = None


class Scheduler:
    """Requests that wait and run.

    cascade_from: keys that a cascade must save a step to be used; 0 for never.
    """

    def __init__(self, limits: Limits, cascade_from: int = 0) -> None:
        self.limits, self.cascade_from = limits, cascade_from
        self.pages = Pages(limits.pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(reversed(range(limits.batch)))
        self._known: dict[str, Request] = {}

    def submit(self, request: Request) -> None:
        """Let a request wait. Raises Refused where it could never run, or the queue is full."""
        limits = self.limits
        if not request.tokens:
            raise Refused("invalid", "the prompt is empty: give at least one token")
        total = request.prompt + request.max_tokens
        room = min(limits.longest, self.pages.usable * limits.page)
        if total > room:
            raise Refused(
                "too_long",
                f"a prompt of {request.prompt} tokens and an answer of up to {request.max_tokens} "
                f"make {total}, and a request has at most {room}: shorten one of them",
            )
        if request.id in self._known:
            raise Refused("invalid", f"a request with the id {request.id!r} is being served")
        if len(self.waiting) >= limits.queue:
            raise Refused("busy", f"{len(self.waiting)} requests are waiting: try again later")
        self._known[request.id] = request
        self.waiting.append(request)

    def cancel(self, id: str) -> bool:
        """End a request before the next step; False where none of this id is known."""
        request = self._known.get(id)
        if request is None or request.ended:
            return False
        request.ended = "cancelled"
        return True

    def schedule(self) -> tuple[Step | None, list[Request], list[Request]]:
        """The next step, None where nothing runs; whose first one it is; and who has ended."""
        gone = self._reap(time.monotonic())
        seated = self._admit()
        if not self.running:
            return None, seated, gone
        left, pieces = self.limits.chunk, []
        for request in self.running:
            # Each has a row, and prompts share what is left, those that came first before others.
            count = min(len(request.tokens) - request.done, 1 + left)
            left -= count - 1
            pieces.append(Piece(request, request.done, request.done + count))
        return Step(tuple(pieces), self._cascade(pieces)), seated, gone

    def took(self, step: Step, given: list[Token | None]) -> list[Request]:
        """Account for a step that has run, with what it gave each piece; returns who has ended."""
        for piece, token in zip(step.pieces, given, strict=True):
            request = piece.request
            request.done = piece.last
            self._publish(request)
            if request.ended or token is None:
                continue
            request.tokens.append(token.token)
            request.told(token)
            if token.token == END_OF_TEXT:
                request.ended = "stop"
            elif request.made == request.max_tokens:
                request.ended = "length"
        return self._reap(time.monotonic())

    def fail(self) -> list[Request]:
        """End every request, and return them: no more steps will run."""
        for request in self._known.values():
            request.ended = request.ended or "failed"
        return self._reap(time.monotonic())

    def _reap(self, now: float) -> list[Request]:
        gone = []
        for request in self._known.values():
            if not request.ended and now > request.deadline:
                request.ended = "timeout"
            if request.ended:
                gone.append(request)
        for request in gone:
            del self._known[request.id]
            if request.slot >= 0:
                self.running.remove(request)
                self._slots.append(request.slot)
                self.pages.give(request.pages)
                request.slot = -1
            else:
                self.waiting.remove(request)
            request.told(End(request.ended))
        return gone

    def _admit(self) -> list[Request]:
        seated = []
        while self.waiting and self._slots:
            request, size = self.waiting[0], self.limits.page
            # One token of the prompt is left to compute: its logits are the first answer.
            keys = list(page_keys(request.tokens[:-1], size, request.salt))
            found = self.pages.match(keys)
            needed = self.limits.pages_of(request.prompt + request.max_tokens) - len(found)
            if not self.pages.can_take(needed, found):
                break
            self.waiting.popleft()
            self.pages.hold(found)
            request.pages = found + self.pages.take(needed)
            request.keys = keys[: len(found)]
            request.done = request.cached = len(found) * size
            request.slot = self._slots.pop()
            self.running.append(request)
            seated.append(request)
        return seated

    def _publish(self, request: Request) -> None:
        """Let others find the pages that have become full."""
        size, known = self.limits.page, len(request.keys)
        before = request.keys[-1] if request.keys else request.salt
        new = request.tokens[known * size : request.done]
        for page, key in zip(request.pages[known:], page_keys(new, size, before), strict=False):
            self.pages.publish(page, key)
            request.keys.append(key)

    def _cascade(self, pieces: list[Piece]) -> Shared | None:
        """The prefix that is worth three launches in place of one."""
        if not self.cascade_from:
            return None
        size, decoding = (
            self.limits.page,
            [i for i, p in enumerate(pieces) if p.last - p.first == 1],
        )
        shared = most_shared(
            [
                list(
                    takewhile(
                        self.pages.shared, pieces[i].request.pages[: pieces[i].first // size]
                    )
                )
                for i in decoding
            ]
        )
        if shared is None:
            return None
        saved = (len(shared.members) - 1) * len(shared.pages) * size
        if saved < self.cascade_from:
            return None
        return Shared(shared.pages, frozenset(decoding[i] for i in shared.members))
