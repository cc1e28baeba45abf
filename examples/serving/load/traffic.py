"""What clients ask: prompts of random lengths, some with a common beginning, in random order.

A prompt is asked many times, so that every answer but the first is known in advance, and most
clients do what they should. The others are the ones that servers have to live with.
"""

import random
from dataclasses import dataclass, field

from examples.serving.model import VOCABULARY
from examples.serving.request import Limits

# Of a hundred requests: those that leave after a few tokens, are cancelled by another one, have
# next to no time, are too long, and are no requests at all. The rest wait for their answers.
SHARES = {"leave": 4, "delete": 2, "hasty": 3, "too_long": 2, "invalid": 1}
STREAMED = 0.75


@dataclass(frozen=True)
class Prompt:
    """Tokens, and how many more are wanted."""

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Ask:
    """One request. prompt: its place in the list of prompts. after: tokens until it ends."""

    kind: str
    prompt: int
    stream: bool = True
    after: int = 1
    timeout: float | None = None


@dataclass
class Answer:
    """What a client has: end is a finish_reason, an error's type, or "left" where it went away.

    times: on the clock of `began`, of each token that came by itself. wrong: what the protocol
    does not allow.
    """

    status: int = 0
    end: str = ""
    id: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    wrong: str = ""


def prompts(limits: Limits, count: int, longest: int, answer: int) -> list[Prompt]:
    """Different prompts of 1 to `longest` tokens; every other one begins as others do."""
    draw = random.Random(3)
    token = lambda: draw.randrange(1, VOCABULARY)  # noqa: E731
    longest = min(longest, limits.longest - answer)
    common = [[token() for _ in range(longest // 2)] for _ in range(4)]
    found = []
    for i in range(count):
        begin = draw.choice(common) if i % 2 else []
        tokens = begin + [token() for _ in range(draw.randint(1, longest - len(begin)))]
        found.append(Prompt(tuple(tokens), draw.randint(1, answer)))
    return found


def asks(count: int, prompts: list[Prompt]) -> list[Ask]:
    """The requests of a run, in the order in which they are sent."""
    draw = random.Random(4)
    kinds = [kind for kind, share in SHARES.items() for _ in range(-(-count * share // 100))]
    kinds += ["answer"] * (count - len(kinds))
    draw.shuffle(kinds)
    found = []
    for kind in kinds:
        place = draw.randrange(len(prompts))
        stream = kind in ("leave", "delete") or draw.random() < STREAMED
        after = draw.randint(1, prompts[place].max_tokens)
        timeout = draw.uniform(0.001, 0.05) if kind == "hasty" else None
        found.append(Ask(kind, place, stream, after, timeout))
    return found


def body(ask: Ask, prompt: Prompt, limits: Limits, salt: str = "") -> dict[str, object]:
    """What is posted."""
    found: dict[str, object] = {
        "prompt": list(prompt.tokens), "max_tokens": prompt.max_tokens, "stream": ask.stream,
        "logprobs": 1, "cache_salt": salt,
    }  # fmt: skip
    if ask.timeout is not None:
        found["timeout"] = ask.timeout
    if ask.kind == "too_long":
        found["prompt"] = [1] * limits.longest
    if ask.kind == "invalid":
        found["prompt"] = [1, VOCABULARY]
    return found
