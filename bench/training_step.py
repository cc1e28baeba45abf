"""`python -m bench.training_step`: a GPT's step under torch.compile, and attention's share of it.

Twelve layers of width 2,048 with 16 heads of 128, rows of packed documents and soft-capped scores;
a step is a forward, a backward and AdamW's update. Blocks are compiled with this library's call in
them and with torch's flex_attention, and once around this library's eager call. What attention
takes is measured twice: as its kernels' times in a profile of the step, and as what the step takes
beyond one whose attention returns its values; the latter has the host's part in it, and what torch
fills with zeros.

Each peer has `--limit` seconds to be compiled, and torch's comes last: the others are reported
before it, and again beside it. A peer that is late is left out; where even that takes a minute,
the process ends and shows where it waits.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torchs

import flexattn
from bench.environment import describe
from bench.peers import OURS
from bench.refusal import Refusal
from bench.results import Gate, Report, RowResult, save
from bench.runner import Method
from bench.time_limit import time_limit
from flexattn.measure.timing import Samples, paired_ratio

__all__ = [
    "EAGER", "GPT", "NONE", "TORCH", "Late", "ended_after", "kernel_lines", "main", "measure",
    "table",
]  # fmt: skip

EAGER, TORCH, NONE = f"{OURS}-eager-call", "torch-flex", "without-attention"
WIDTH, HEADS, VOCABULARY, CAP = 2048, 16, 4096, 50.0
# Losses of one step in bfloat16, by different kernels and the same weights.
SAME_LOSS = 2e-3
# Names of torch's generated kernels of attention begin so; ours are known by their own names.
TORCHS_KERNELS = "triton_tem_fused"
METHOD = Method(rounds=10)
# Seconds that what is late has to come back to Python, before the process ends.
GRACE = 60


class Late(BaseException):
    """A peer took longer than it may; nothing that catches an Exception on the way keeps it."""


def softcap(score: Tensor, *_: Tensor) -> Tensor:
    """Gemma-2's."""
    return CAP * torch.tanh(score / CAP)


class _Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = self.attend(*qkv, score_mod=softcap, block_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return found


class GPT(nn.Module):
    """The mean loss of tokens int64 [B, L] under a block mask."""

    def __init__(self, layers: int, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        # A graph that a peer breaks calls whatever `attend` a block has, so it would serve all
        # peers; by its class a block is known to Dynamo's guards.
        block = type("Block", (_Block,), {})
        self.blocks = nn.ModuleList(block(attend) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor, mask: Any) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        logits = F.linear(self.norm(x), self.embed.weight)
        loss: Tensor = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        return loss


def _documents(batch: int, length: int, mean: int, device: str) -> Tensor:
    """int32 [B, L]: the document of each token, of random lengths with this mean."""
    draw = torch.Generator().manual_seed(0)
    begins = torch.rand(batch, length, generator=draw) < 1 / mean
    return begins.cumsum(1).to(device, torch.int32)


def _attends(
    asked: argparse.Namespace, device: str
) -> dict[str, Callable[[], tuple[Callable[..., Any], Any]]]:
    """What makes each peer's attention and its block mask, of the same documents; torch's last."""
    owner = _documents(asked.batch, asked.length, asked.mean, device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (owner[b, q_idx] == owner[b, kv_idx])

    sizes = asked.batch, None, asked.length, asked.length, device

    def ours() -> Any:
        return flexattn.create_block_mask(mask_mod, *sizes)

    def torch_own() -> Any:
        return torchs.create_block_mask(mask_mod, *sizes, _compile=True)

    return {
        NONE: lambda: (lambda q, k, v, **_: v, ours()),
        OURS: lambda: (flexattn.flex_attention, ours()),
        EAGER: lambda: (torch.compiler.disable(flexattn.flex_attention), ours()),
        TORCH: lambda: (torchs.flex_attention, torch_own()),
    }


def _step(
    asked: argparse.Namespace, tokens: Tensor, attend: Callable[..., Any], mask: Any
) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = GPT(asked.layers, attend).to(tokens.device, torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # One compile serves all blocks.
    for block in model.blocks:
        block.compile()

    def step() -> Tensor:
        loss: Tensor = model(tokens, mask)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
        return loss.detach()

    return step


def _seconds(step: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _kernels(step: Callable[[], Tensor]) -> dict[str, tuple[float, int]]:
    """Microseconds of each kernel in one step, and how often it runs, by its name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _seconds(step)
    return {each.key: (each.device_time_total, each.count) for each in profile.key_averages()}


def kernel_lines(
    ours: Mapping[str, tuple[float, int]], other: Mapping[str, tuple[float, int]], most: int
) -> list[str]:
    """Kernels whose time differs most between ours and a peer: ours, the peer's, and the name."""
    nothing = (0.0, 0)
    pairs = {name: (ours.get(name, nothing), other.get(name, nothing)) for name in {*ours, *other}}
    apart = sorted(pairs.items(), key=lambda each: -abs(each[1][0][0] - each[1][1][0]))
    return [
        f"{a[0] / 1e3:9.2f} ms in {a[1]:4} {b[0] / 1e3:9.2f} ms in {b[1]:4}  {name}"
        for name, (a, b) in apart[:most]
    ]


def _of_attention(step: Callable[[], Tensor], name: str) -> dict[str, float]:
    """Microseconds of each kernel of attention in one step, by its name."""
    found = {kernel: us for kernel, (us, _) in _kernels(step).items()}
    kernels = {key: us for key, us in found.items() if _is_attention(key, name)}
    if not kernels:
        raise RuntimeError(f"a profile of {name} has no kernel of attention: {sorted(found)}")
    return kernels


def _is_attention(kernel: str, name: str) -> bool:
    if name == TORCH:
        return kernel.startswith(TORCHS_KERNELS) and "flex_attention" in kernel
    return kernel.startswith("flexattn")


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise Late where the block takes longer, or end the process where that does not help."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with time_limit(seconds + GRACE):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _prepared(
    name: str, make: Callable[[], Callable[[], Tensor]], limit: float
) -> tuple[Callable[[], Tensor], float] | Refusal:
    """A peer's step after four of them, of which the first compiles, and the first one's loss."""
    begin = time.perf_counter()
    try:
        with ended_after(limit):
            step = make()
            first = step().item()
            for _ in range(3):
                step()
    except Late:
        return Refusal(f"not compiled within {limit:g} s")
    except Exception as error:
        return Refusal.of(error)
    print(f"{name}: four steps, compiled, in {time.perf_counter() - begin:.0f} s", flush=True)
    return step, first


def measure(asked: argparse.Namespace, device: str = "cuda") -> Iterator[Report]:
    """Steps of the peers in turns, and profiles of them: without torch's, then beside it."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (asked.batch, asked.length), device=device)
    steps: dict[str, Callable[[], Tensor]] = {}
    first: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, made in _attends(asked, device).items():
        if name == TORCH:
            yield _measured(asked, steps, first, refused)
            if asked.kernels and OURS in steps and EAGER in steps:
                print(f"kernels of {OURS}, of {EAGER}:")
                both = (_kernels(steps[peer]) for peer in (OURS, EAGER))
                print(*kernel_lines(*both, asked.kernels), sep="\n", flush=True)
        found = _prepared(name, lambda made=made: _step(asked, tokens, *made()), asked.limit)
        if isinstance(found, Refusal):
            refused[name] = found.reason
            print(f"{name}: {found.reason}", flush=True)
        else:
            steps[name], first[name] = found
    if TORCH in steps:
        yield _measured(asked, steps, first, refused)


def _measured(
    asked: argparse.Namespace,
    steps: Mapping[str, Callable[[], Tensor]],
    first: Mapping[str, float],
    refused: Mapping[str, str],
) -> Report:
    """first: the losses of first steps. refused: why a peer is not among the steps."""
    whole: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(asked.rounds):
        for name, step in steps.items():
            whole[name].append(_seconds(step) * 1e6)
    floor = whole.pop(NONE, [])
    kernels: dict[str, list[float]] = {name: [] for name in whole}
    unseen: dict[str, str] = {}
    for _ in range(3):
        for name in (each for each in whole if each not in unseen):
            try:
                kernels[name].append(sum(_of_attention(steps[name], name).values()))
            except RuntimeError as error:
                unseen[name] = str(error)
    beyond = {
        name: [us - f for us, f in zip(whole[name], floor, strict=True)] for name in whole if floor
    }
    # Of the same weights; beside torch's where there is one.
    peer = TORCH if TORCH in first else EAGER
    gates = {
        name: Gate(
            abs(first[name] - first[peer]) <= SAME_LOSS * first[peer],
            f"loss of the first step {first[name]:.5f}, {peer}'s {first[peer]:.5f}",
        )
        for name in whole
        if peer in first
    }
    seen = {name: us for name, us in kernels.items() if name not in unseen}
    rows = (
        _row("step", whole, gates, refused),
        _row("attention-kernels", seen, gates, {**refused, **unseen}),
        _row("attention-beyond", beyond, gates, refused),
    )
    facts = replace(METHOD, rounds=asked.rounds).facts() | {
        each: getattr(asked, each) for each in ("batch", "length", "mean", "layers")
    }
    return Report("training_step", facts, (describe(),), rows)


def _row(
    name: str,
    found: Mapping[str, list[float]],
    gates: dict[str, Gate],
    refused: Mapping[str, str],
) -> RowResult:
    red = dict(refused) | {peer: gate.message for peer, gate in gates.items() if not gate.passed}
    samples = {peer: Samples(tuple(us), calls=1) for peer, us in found.items() if peer not in red}
    return RowResult(name, "training", 0.0, 0, gates, samples, red)


def table(report: Report) -> str:
    """A line each row: milliseconds of each peer, and how often ours goes into theirs."""
    lines = []
    for row in report.rows:
        cells = [f"{peer}: {why}" for peer, why in row.refused.items()]
        for peer, samples in row.samples.items():
            ratio = paired_ratio(samples, row.samples[OURS]).value if OURS in row.samples else nan
            cells.append(f"{peer} {samples.median / 1e3:.2f} ms ({ratio:.3f} of ours)")
        lines.append(f"{row.name}: " + ", ".join(cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the status is 1 where a loss is not torch's, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.training_step", description=__doc__)
    for option, number in (
        ("batch", 8), ("length", 8192), ("mean", 2048), ("layers", 12), ("rounds", METHOD.rounds)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=number)
    parser.add_argument("--limit", type=float, default=180.0, metavar="SECONDS")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N",
        help="print the N kernels that differ most between our call inside the graph and outside",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: a step is timed on one", file=sys.stderr)
        return 2
    red = False
    for report in measure(asked):
        if asked.out:
            save(report, asked.out)
        print(table(report), flush=True)
        red |= not all(gate.passed for row in report.rows for gate in row.gates.values())
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
