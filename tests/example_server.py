"""The example server in small: engines, and requests run through them together or one by one."""

import random

from examples.serving.build import Options, build
from examples.serving.request import Limits, Request, Token

SMALL = Limits(batch=4, chunk=12, longest=96, page=8, pages=40, queue=20)


def options(limits=SMALL, **changes):
    """Of a server on a CPU, in plain torch and float64 where nothing else is said."""
    usual = {"attention": "torch", "device": "cpu", "dtype": "float64"}
    return Options(**usual | changes, limits=limits)


def prompts(lengths, common=0, seed=0):
    """Random prompts of these lengths behind so many tokens that all of them begin with."""
    draw = random.Random(seed)
    token = lambda: draw.randrange(1, 256)  # noqa: E731
    begin = [token() for _ in range(common)]
    return [begin + [token() for _ in range(n)] for n in lengths]


class Asked:
    """Requests with what each was told, in one engine."""

    def __init__(self, engine):
        self.engine, self.events = engine, []

    def submit(self, prompt, max_tokens, **more):
        """Its number; the id is the same in words."""
        told = []
        request = Request(str(len(self.events)), list(prompt), max_tokens, told.append, **more)
        self.engine.submit(request)
        self.events.append(told)
        return request

    def finish(self):
        """Run until nothing is left."""
        while self.engine.step():
            pass
        return self

    def answers(self):
        """Tokens and log-probabilities of each, and how it ended."""
        return [
            ([e for e in told if isinstance(e, Token)], told[-1].reason) for told in self.events
        ]


def together(engine, prompts, max_tokens):
    """Answers to prompts that are in the engine at the same time."""
    asked = Asked(engine)
    for each in prompts:
        asked.submit(each, max_tokens)
    return asked.finish().answers()


def ids(given):
    """The tokens alone."""
    return [token for token, _ in given]


def one_by_one(chosen, prompts, max_tokens):
    """Answers to prompts, each alone in an engine that has seen none before."""
    return [together(build(chosen), [each], max_tokens)[0] for each in prompts]


def at_rest(engine):
    """Whether no request is there, and every page can be taken."""
    scheduler = engine.scheduler
    pages = scheduler.pages
    return (
        not scheduler.running
        and not scheduler.waiting
        and pages.used == 0
        and pages.available == pages.usable
    )
