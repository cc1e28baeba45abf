"""A request on its way through the server, and the reasons for which one is not served."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Token(NamedTuple):
    """One more token of an answer, and its log-probability."""

    token: int
    logprob: float


class End(NamedTuple):
    """The last event of a request: stop, length, cancelled, timeout or failed."""

    reason: str


class Refused(Exception):
    """A request that is not taken; `kind` names the rule, for clients and metrics."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Limits:
    """What the server has room for.

    batch: requests in a step. chunk: rows of prompts in a step, beside a row for each request.
    longest: tokens of a request, prompt and answer. pages, page: of the cache, and tokens of one.
    queue: requests that may wait.
    """

    batch: int = 32
    chunk: int = 64
    longest: int = 512
    page: int = 16
    pages: int = 400
    queue: int = 256

    @property
    def rows(self) -> int:
        """Rows of the largest step."""
        return self.batch + self.chunk

    def pages_of(self, tokens: int) -> int:
        """Pages that hold the keys of so many tokens."""
        return -(-tokens // self.page)


@dataclass(eq=False, slots=True)
class Request:
    """What is asked, and how far it is.

    tokens: the prompt, then the answer. done: how many of them have keys in the cache. keys: names
    of the full pages. told: receives each Token, then the End. deadline: on time.monotonic.
    """

    id: str
    tokens: list[int]
    max_tokens: int
    told: Callable[[Token | End], None]
    salt: bytes = b""
    deadline: float = float("inf")
    arrived: float = field(default_factory=time.monotonic)
    prompt: int = 0
    cached: int = 0
    done: int = 0
    slot: int = -1
    last: float = 0.0
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    ended: str = ""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def made(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt
