"""What must hold of the answers: each a function that says in words what does not."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from examples.serving.load.traffic import Answer, Ask, Prompt
from examples.serving.model import Model

# Log-probabilities of float64 in another batch.
NEAR = 1e-9
# How a request of each kind may end; one that ends in time is an answer like any other.
DONE = ("stop", "length")
ENDS = {
    "answer": DONE, "burst": (*DONE, "busy"), "retried": ("busy",), "leave": (*DONE, "left"),
    "delete": (*DONE, "cancelled"), "hasty": (*DONE, "timeout"), "too_long": ("too_long",),
    "invalid": ("invalid",),
}  # fmt: skip
STATUS = {"too_long": 400, "invalid": 400, "busy": 503}


def ends(pairs: Iterable[tuple[Ask, Answer]], prompts: Sequence[Prompt]) -> list[str]:
    """That each request ended as its kind may, and whole answers have the tokens asked for."""
    wrong = []
    for ask, answer in pairs:
        if answer.wrong:
            wrong.append(answer.wrong)
        if answer.end not in ENDS[ask.kind]:
            wrong.append(f"a request of kind {ask.kind} ended as {answer.end!r}")
        expected = STATUS.get(answer.end)
        if expected is not None and answer.status != expected:
            wrong.append(f"{answer.end} has the status {answer.status}, not {expected}")
        wanted = prompts[ask.prompt].max_tokens
        if answer.end == "length" and len(answer.tokens) != wanted:
            wrong.append(f"{answer.id} has {len(answer.tokens)} tokens, and {wanted} are wanted")
    return wrong


class Known:
    """The first whole answer to each prompt, which every later one, whole or not, is held to."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.compared = self.different = 0

    def see(self, place: int, answer: Answer) -> None:
        """Compare it with the one that is known, or keep it."""
        if place in self.answers:
            self.compared += bool(answer.tokens)
            first = self.answers[place].tokens
            self.different += answer.tokens != first[: len(answer.tokens)]
        elif answer.end in DONE:
            self.answers[place] = answer


def same(one: Answer, other: Answer, bits: bool) -> bool:
    """Whether two answers have the same tokens with the same log-probabilities."""
    near = 0.0 if bits else NEAR
    return one.tokens == other.tokens and all(
        abs(a - b) <= near for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


def against_whole(model: Model, exact: Model, prompt: Prompt, answer: Answer) -> str:
    """Why an answer is not the model's; "" where it is.

    exact: the model in float64. Each token is held to the logits that all tokens before it give
    there, computed at once. It may be below the best of them by twice what the same computation in
    the model's dtype is off, for the chosen token and the best one: the library's accuracy rule.
    """
    tokens = [*prompt.tokens, *answer.tokens]
    rows = slice(len(prompt.tokens) - 1, len(tokens) - 1)
    with torch.no_grad():
        right = exact.whole(tokens)[rows]
        off = (model.whole(tokens)[rows] - right).abs().amax(-1)
    chosen = torch.tensor(answer.tokens, device=right.device)[:, None]
    below = right.amax(-1) - right.gather(1, chosen)[:, 0]
    excess = below - 4 * off - NEAR
    worst = int(excess.argmax())
    if float(excess[worst]) <= 0:
        return ""
    return (
        f"token {worst} of {answer.id} is {float(below[worst]):.3g} below the best one, and the "
        f"model's dtype is off by {float(off[worst]):.3g}"
    )


def pages_back(found: dict[str, float]) -> list[str]:
    """That nobody runs, waits or holds a page."""
    wanted = {
        "serving_requests_running": 0.0, "serving_requests_waiting": 0.0,
        "serving_pages_used": 0.0, "serving_pages_free": found["serving_pages_usable"],
    }  # fmt: skip
    return [
        f"{name} is {found[name]:.0f}, and {value:.0f} at rest"
        for name, value in wanted.items()
        if found[name] != value
    ]


def all_counted(found: dict[str, float], sent: int) -> list[str]:
    """That the server counts every request that was sent, once."""
    prefix = "serving_requests_total{"
    outcomes = Counter({n: v for n, v in found.items() if n.startswith(prefix)})
    total = int(sum(outcomes.values()))
    if total == sent:
        return []
    return [f"{sent} requests were sent, and the server counts {total}: {dict(outcomes)}"]


def flat(name: str, samples: Sequence[float], share: float = 0.01) -> list[str]:
    """That memory stays within this share of the first sample; nothing of less than two."""
    first = samples[0] if samples else 0.0
    worst = max(samples, key=lambda each: abs(each - first), default=first)
    if abs(worst - first) <= share * first:
        return []
    return [f"{name} went from {first:.0f} to {worst:.0f}, by {worst / first - 1:+.2%}"]
