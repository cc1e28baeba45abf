"""Continuous batching over a paged cache: random arrivals, chunked prefill, one CUDA graph.

A toy language model of one attention layer (its queries, keys, values and next tokens come from
tables) is served the way real ones are: requests arrive at random, prompts are read in chunks
beside the requests that decode, pages are taken as keys come and given back at the end. Every step
is one replay of one captured graph. It is a load test too: no page may be lost, and the outputs of
sampled requests are held to the float64 oracle.

    python examples/serving.py [--requests 10000] [--batch 64] [--rate 8.0]

Without a GPU: FLEXATTN_INTERPRET=1 python examples/serving.py --requests 6 --batch 3 --rate 1
"""

import argparse
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import torch

import flexattn
from flexattn.catalogue import causal
from flexattn.measure.gate import judge
from flexattn.reference import Precision, attention
from flexattn.serving import DecodePlan

VOCABULARY, HQ, HKV, PAGE = 512, 8, 2, 16


@dataclass
class Request:
    """A prompt and what was made of it; outputs are kept where it is to be judged."""

    arrived: float
    tokens: list
    wanted: int
    prompt: int
    judged: bool
    pages: list = field(default_factory=list)
    done: int = 0  # keys in the cache
    outputs: list = field(default_factory=list)
    times: list = field(default_factory=list)

    @property
    def finished(self):
        return len(self.times) == self.wanted


class Model:
    """One attention layer between tables: token -> q, k, v, and its output -> next token."""

    def __init__(self, device, dtype, D):
        draw = torch.Generator().manual_seed(0)
        make = lambda *shape: torch.randn(shape, generator=draw).to(device, dtype)  # noqa: E731
        self.q, self.k, self.v = (make(VOCABULARY, heads, D) for heads in (HQ, HKV, HKV))
        self.head = make(HQ * D, VOCABULARY)
        self.D, self.dtype, self.device = D, dtype, device

    def judge(self, request):
        """The gate's verdict on each new token's output, from all tokens of the request."""
        tokens = torch.tensor(request.tokens[: request.done], device=self.device)
        q, k, v = (x[tokens].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        q = q[:, :, request.prompt - 1 :]
        past = request.prompt - 1
        runs = []
        for precision in (Precision.ORACLE, Precision.ROUNDED):
            mask = flexattn.create_block_mask(
                lambda b, h, m, n: m + past >= n, None, None, q.shape[2], k.shape[2], self.device
            )
            found = attention(q, k, v, block_mask=mask, precision=precision)
            runs.append((found.out, found.lse, None))
        got = torch.stack(request.outputs).view(-1, HQ, self.D).transpose(0, 1)[None]
        return judge((got, None, None), *runs, self.dtype)


class Engine:
    """Static buffers, the plan, and the step that a graph captures."""

    def __init__(self, model, batch, chunk, longest, pages):
        self.model, self.batch, self.rows = model, batch, batch + chunk
        self.free = deque(range(1, pages))  # rows that are not used write to page 0
        device = model.device
        self.cache = [
            torch.zeros(pages, PAGE, HKV, model.D, device=device, dtype=model.dtype) for _ in "kv"
        ]
        self.plan = DecodePlan(
            batch=batch, total_q=self.rows, kv_len=longest, heads=(HQ, HKV), head_dim=model.D,
            dtype=model.dtype, device=device, page_size=PAGE, mask_mod=causal,
        )  # fmt: skip
        ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)  # noqa: E731
        self.table = ints(batch, -(-longest // PAGE))
        # Tokens, pages and offsets of each row; then lengths, ends and last rows of each request.
        self.numbers = ints(3 * self.rows + batch + batch + 1 + batch)
        self.result = None
        self.graph = None

    def _step(self):
        rows, batch = self.rows, self.batch
        sizes = (rows, rows, rows, batch, batch + 1, batch)
        tokens, page, offset, lens, ends, last = self.numbers.split(sizes)
        for cache, source in zip(self.cache, (self.model.k, self.model.v), strict=True):
            cache[page.long(), offset.long()] = source[tokens.long()]
        out = self.plan.run(
            self.model.q[tokens.long()], tuple(self.cache), seq_lens=lens,
            block_table=self.table, cu_seqlens_q=ends,
        )  # fmt: skip
        kept = out[last.long()].flatten(1)
        return kept, (kept @ self.model.head).argmax(-1)

    def capture(self):
        """One graph for every batch that will come."""
        if self.model.device.type != "cuda":
            return
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self._step()

    def step(self, running):
        """Give every running request its chunk of keys; returns those that got a token."""
        left = self.rows - len(running)
        tokens, page, offset, lens, ends, last = [], [], [], [], [0], []
        for slot, request in enumerate(running):
            # Each gets one row, and prompts share what is left.
            count = min(len(request.tokens) - request.done, 1 + left)
            left -= count - 1
            for at in range(request.done, request.done + count):
                if at // PAGE == len(request.pages):
                    request.pages.append(self.free.popleft())
                    self.table[slot, at // PAGE] = request.pages[-1]
                tokens.append(request.tokens[at])
                page.append(request.pages[at // PAGE])
                offset.append(at % PAGE)
            request.done += count
            lens.append(request.done)
            ends.append(len(tokens))
            last.append(len(tokens) - 1)
        fill = lambda xs, n, x=0: xs + [x] * (n - len(xs))  # noqa: E731
        rows, batch = self.rows, self.batch
        packed = fill(tokens, rows) + fill(page, rows) + fill(offset, rows) + fill(lens, batch)
        packed += fill(ends, batch + 1, ends[-1]) + fill(last, batch)
        self.numbers.copy_(torch.tensor(packed, dtype=torch.int32))
        if self.graph is None:
            self.result = self._step()
        else:
            self.graph.replay()
        outputs, following = self.result
        return outputs, following.tolist()

    def seat(self, slot, request):
        """Write a request's pages into its row of the table."""
        if request.pages:
            self.table[slot, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)


def serve(engine, requests, rate):
    """Run all requests; they arrive in random groups of `rate` a step on average."""
    waiting, running, step_times, arrivals = deque(), [], [], deque(requests)
    chance = random.Random(2)
    while arrivals or waiting or running:
        begin = time.perf_counter()
        for _ in range(min(len(arrivals), round(chance.expovariate(1 / rate)))):
            arrivals[0].arrived = begin
            waiting.append(arrivals.popleft())
        reserved = sum(-(-(r.prompt + r.wanted) // PAGE) - len(r.pages) for r in running)
        while waiting and len(running) < engine.batch:
            needed = -(-(waiting[0].prompt + waiting[0].wanted) // PAGE)
            if reserved + needed > len(engine.free):
                break
            reserved += needed
            running.append(waiting.popleft())
        if not running:
            continue
        outputs, following = engine.step(running)
        now = time.perf_counter()
        for slot, request in enumerate(running):
            if request.done == len(request.tokens):
                request.times.append(now)
                request.tokens.append(following[slot])
                if request.judged:
                    request.outputs.append(outputs[slot].clone())
        for slot in reversed(range(len(running))):
            if running[slot].finished:
                engine.free.extend(running[slot].pages)
                last = running.pop()
                if slot < len(running):
                    running[slot] = last
                    engine.seat(slot, last)
        step_times.append(now - begin)
    return step_times


def made(count, prompt, answer, judged):
    """Requests with random prompts, a few of which are judged."""
    draw = random.Random(1)
    chosen = set(draw.sample(range(count), min(judged, count)))
    found = []
    for i in range(count):
        tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, prompt))]
        found.append(Request(0.0, tokens, draw.randint(1, answer), len(tokens), i in chosen))
    return found


def table(requests, steps):
    """Latencies in milliseconds: median and 99th percentile."""
    first = [r.times[0] - r.arrived for r in requests]
    between = [b - a for r in requests for a, b in zip(r.times, r.times[1:], strict=False)]
    lines = [f"{'':<24}{'median':>10}{'p99':>10}   ms"]
    named = (("first token", first), ("between tokens", between), ("step", steps))
    for name, values in named:
        if len(values) > 1:
            low, high = statistics.median(values), statistics.quantiles(values, n=100)[98]
            lines.append(f"{name:<24}{low * 1e3:>10.3f}{high * 1e3:>10.3f}")
    return "\n".join(lines)


def main(argv=None):
    """Serve, print the latencies, and fail where a page is lost or an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals of a step on average")
    parser.add_argument("--judged", type=int, default=100)
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    prompt, answer, chunk = (700, 60, 448) if on_gpu else (40, 5, 20)
    model = Model(device, torch.bfloat16 if on_gpu else torch.float32, 128 if on_gpu else 16)
    longest = prompt + answer
    # A third fewer pages than the longest requests would need: admission must wait for them.
    pages = 1 + max(-(-longest // PAGE), args.batch * -(-longest // PAGE) * 2 // 3)
    engine = Engine(model, args.batch, chunk, longest, pages)
    engine.capture()
    requests = made(args.requests, prompt, answer, args.judged)
    with torch.no_grad():
        begin = time.perf_counter()
        steps = serve(engine, requests, args.rate)
        spent = time.perf_counter() - begin
        wrong = [v for r in requests if r.judged and not (v := model.judge(r)).passed]
    tokens = sum(len(r.times) for r in requests)
    print(f"{len(requests)} requests, {tokens} tokens in {len(steps)} steps and {spent:.1f} s")
    print(table(requests, steps))
    lost = pages - 1 - len(set(engine.free))
    judged = sum(r.judged for r in requests)
    print(f"pages lost: {lost}; outputs judged: {judged}, wrong: {len(wrong)}")
    for verdict in wrong[:3]:
        print(verdict.message())
    return int(bool(lost or wrong or any(not r.finished for r in requests)))


if __name__ == "__main__":
    raise SystemExit(main())
