"""A run: the traffic, what goes on beside it, and afterwards the same prompts one by one."""

import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import torch

from examples.serving.build import DTYPES, Options, build_model
from examples.serving.load import checks
from examples.serving.load.client import metrics, send
from examples.serving.load.figures import percentiles
from examples.serving.load.processes import killed_client
from examples.serving.load.traffic import Answer, Ask, Prompt, asks, body, prompts
from examples.serving.request import Limits

# Seconds before a request that was refused is sent again.
RETRY = 0.25
# At one moment a step may hold tensors that it gives back at once: the median of five looks, one
# every hundred requests, is a sample. Two of them are the first thousand, in which heaps grow.
LOOKS, WARM = 5, 2
MEMORY = ("process_resident_memory_bytes", "serving_device_memory_bytes")


@dataclass(frozen=True)
class Plan:
    """How much is asked.

    clients: requests at a time. killed: client processes, of so many streams. every: requests
    between two looks at memory. rest: seconds for the server to come to rest in.
    """

    requests: int
    clients: int = 48
    distinct: int = 500
    prompt: int = 120
    answer: int = 30
    one_by_one: int = 100
    judged: int = 20
    killed: int = 3
    streams: int = 8
    every: int = 100
    rest: float = 10.0


@dataclass
class Run:
    """One run against a server, whose options it has asked for."""

    session: aiohttp.ClientSession
    url: str
    plan: Plan
    options: Options
    pairs: list[tuple[Ask, Answer]] = field(default_factory=list)
    known: checks.Known = field(default_factory=checks.Known)
    memory: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in MEMORY})
    looks: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in MEMORY})
    wrong: list[str] = field(default_factory=list)
    sent: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.prompts = prompts(self.options.limits, plan.distinct, plan.prompt, plan.answer)

    async def go(self) -> dict[str, Any]:
        """The whole run; returns its figures, and leaves in `wrong` what does not hold."""
        began = time.perf_counter()
        await self._traffic()
        seconds = time.perf_counter() - began
        answers = [answer for _, answer in self.pairs]
        await self._rest()
        different = await self._one_by_one()
        judged = await asyncio.to_thread(self._judge)
        found = await self._rest()
        self.wrong += checks.ends(self.pairs, self.prompts)
        self.wrong += checks.pages_back(found) + checks.all_counted(found, self.sent)
        for name, samples in self.memory.items():
            self.wrong += checks.flat(name, samples[WARM:])
        if self.options.exact and self.known.different:
            self.wrong.append(f"{self.known.different} answers differ from one to the same prompt")
        kinds = Counter(ask.kind for ask, _ in self.pairs)
        return {
            "requests": len(answers), "burst": kinds["burst"], "retried": kinds["retried"],
            "seconds": seconds,
            "tokens": sum(len(each.tokens) for each in answers),
            "ends": dict(Counter(each.end for each in answers)),
            "server": {
                name.removeprefix("serving_"): value for name, value in found.items()
                if name.startswith("serving_") and "bucket" not in name and "_created" not in name
            },
            "time_to_first_token": percentiles([x.times[0] - x.began for x in answers if x.times]),
            "time_between_tokens": percentiles([
                b - a for x in answers for a, b in zip(x.times, x.times[1:], strict=False)
            ]),
            "memory": self.memory, "compared": self.known.compared,
            "different": self.known.different,
            "one_by_one": min(self.plan.one_by_one, len(self.known.answers)),
            "one_by_one_different": different, "judged": judged,
        }  # fmt: skip

    async def _traffic(self) -> None:
        plan, limits = self.plan, self.options.limits
        left = iter(asks(plan.requests, self.prompts))

        async def client() -> None:
            for ask in left:
                await self._ask(ask)

        async def disturbances() -> None:
            # First of all, so that memory is looked at after the largest queue that there will be.
            await self._burst(limits.batch + limits.queue + plan.clients)
            for number in range(plan.killed):
                await self._until(0.3 + 0.5 * number / plan.killed)
                await self._killed()

        await asyncio.gather(*(client() for _ in range(plan.clients)), disturbances())

    async def _ask(self, ask: Ask, salt: str = "") -> Answer:
        prompt = self.prompts[ask.prompt]
        posted = body(ask, prompt, self.options.limits, salt)
        while True:
            self.sent += 1
            answer = await send(self.session, self.url, ask, posted)
            if answer.end != "busy" or ask.kind == "burst":
                break
            self.pairs.append((replace(ask, kind="retried"), answer))
            await asyncio.sleep(RETRY)
        self.pairs.append((ask, answer))
        if answer.tokens and not salt:
            self.known.see(ask.prompt, answer)
        self.done += 1
        if self.done % self.plan.every == 0 and self.done <= self.plan.requests:
            await self._look()
        return answer

    async def _look(self) -> None:
        """Note the server's memory."""
        found = await metrics(self.session, self.url)
        for name, looks in self.looks.items():
            looks.append(found[name])
            if len(looks) == LOOKS:
                self.memory[name].append(statistics.median(looks))
                looks.clear()
        if not self.looks[MEMORY[0]]:
            print(
                f"{self.done} requests, {self.memory[MEMORY[0]][-1] / 2**20:.1f} MiB", flush=True
            )

    async def _until(self, share: float) -> None:
        while self.done < share * self.plan.requests:
            await asyncio.sleep(0.05)

    async def _killed(self) -> None:
        """Kill a client in the middle of its answers."""
        limits = self.options.limits
        self.sent += self.plan.streams
        posted = {"prompt": "killed", "max_tokens": limits.longest - 6, "stream": True}
        await killed_client(self.url, posted, self.plan.streams)

    async def _burst(self, count: int) -> None:
        """More requests at once than may run and wait: some are refused, and all are answered."""
        draw = random.Random(5)
        burst = [Ask("burst", draw.randrange(len(self.prompts))) for _ in range(count)]
        answers = await asyncio.gather(*map(self._ask, burst))
        if not any(each.end == "busy" for each in answers):
            self.wrong.append(f"of {count} requests at once none was refused")

    async def _rest(self) -> dict[str, float]:
        """The server's metrics once it has nothing to do, or when it had time enough."""
        for _ in range(1 + int(10 * self.plan.rest)):
            found = await metrics(self.session, self.url)
            if not checks.pages_back(found):
                break
            await asyncio.sleep(0.1)
        return found

    async def _one_by_one(self) -> int:
        """The same prompts again, each alone and without pages that others have filled."""
        different = 0
        for place in sorted(self.known.answers)[: self.plan.one_by_one]:
            alone = await self._ask(Ask("answer", place), salt=f"alone {place}")
            before = self.known.answers[place]
            if not checks.same(before, alone, self.options.batch_invariant):
                different += 1
        if different and self.options.exact:
            self.wrong.append(f"{different} answers are not those of one-by-one decoding")
        return different

    def _judge(self) -> int:
        """Answers held to the model itself, computed in this process."""
        model = build_model(self.options)
        exact = model.to(torch.float64)
        places = sorted(self.known.answers)[: self.plan.judged]
        for place in places:
            prompt: Prompt = self.prompts[place]
            words = checks.against_whole(model, exact, prompt, self.known.answers[place])
            self.wrong += [words] * bool(words)
        return len(places)


async def options_at(session: aiohttp.ClientSession, url: str) -> Options:
    """The options of the server at an address."""
    async with session.get(f"{url}/v1/models") as response:
        about = (await response.json())["data"][0]
    names = Options.__dataclass_fields__
    found = {name: about[name] for name in names if name != "limits"}
    assert found["dtype"] in DTYPES
    return Options(**found, limits=Limits(**about["limits"]))
