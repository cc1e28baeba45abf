"""`python -m bench.training_step`: a GPT's step under torch.compile, and attention's share of it.

Twelve layers of width 2,048 with 16 heads of 128, rows of packed documents and soft-capped scores;
a step is a forward, a backward and AdamW's update. Blocks are compiled with this library's call in
them and with torch's flex_attention, and once around this library's eager call. What attention
takes is measured twice: as its kernels' times in a profile of the step, and as what the step takes
beyond one whose attention returns its values; the latter has the host's part in it, and what torch
fills with zeros.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
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
from bench.results import Gate, Report, RowResult, save
from bench.runner import Method
from flexattn.measure.timing import Samples, paired_ratio

__all__ = ["EAGER", "GPT", "NONE", "TORCH", "main", "table"]

EAGER, TORCH, NONE = f"{OURS}-eager-call", "torch-flex", "without-attention"
WIDTH, HEADS, VOCABULARY, CAP = 2048, 16, 4096, 50.0
# Losses of one step in bfloat16, by different kernels and the same weights.
SAME_LOSS = 2e-3
# Names of torch's generated kernels of attention begin so; ours are known by their own names.
TORCHS_KERNELS = "triton_tem_fused"
METHOD = Method(rounds=10)


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
        self.blocks = nn.ModuleList(_Block(attend) for _ in range(layers))
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


def _steps(asked: argparse.Namespace) -> dict[str, Callable[[], Tensor]]:
    """A training step of each peer, with the same weights, tokens and documents; losses."""
    device = "cuda"
    owner = _documents(asked.batch, asked.length, asked.mean, device)
    tokens = torch.randint(VOCABULARY, (asked.batch, asked.length), device=device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (owner[b, q_idx] == owner[b, kv_idx])

    sizes = asked.batch, None, asked.length, asked.length, device
    made = flexattn.create_block_mask(mask_mod, *sizes)
    attends = {
        OURS: (flexattn.flex_attention, made),
        EAGER: (torch.compiler.disable(flexattn.flex_attention), made),
        TORCH: (torchs.flex_attention, torchs.create_block_mask(mask_mod, *sizes, _compile=True)),
        NONE: (lambda q, k, v, **_: v, made),
    }
    return {name: _step(asked, tokens, *each) for name, each in attends.items()}


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


def _of_attention(step: Callable[[], Tensor], name: str) -> dict[str, float]:
    """Microseconds of each kernel of attention in one step, by its name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _seconds(step)
    found = {each.key: each.device_time_total for each in profile.key_averages()}
    kernels = {key: us for key, us in found.items() if _is_attention(key, name)}
    if not kernels:
        raise RuntimeError(f"a profile of {name} has no kernel of attention: {sorted(found)}")
    return kernels


def _is_attention(kernel: str, name: str) -> bool:
    if name == TORCH:
        return kernel.startswith(TORCHS_KERNELS) and "flex_attention" in kernel
    return kernel.startswith("flexattn")


def measure(asked: argparse.Namespace) -> Report:
    """Steps of all peers in turns, and profiles of them in turns."""
    steps, first = _steps(asked), {}
    for name, step in steps.items():
        begin = time.perf_counter()
        first[name] = step().item()
        for _ in range(3):
            step()
        print(f"{name}: four steps, compiled, in {time.perf_counter() - begin:.0f} s", flush=True)
    whole: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(asked.rounds):
        for name, step in steps.items():
            whole[name].append(_seconds(step) * 1e6)
    floor = whole.pop(NONE)
    kernels: dict[str, list[float]] = {name: [] for name in whole}
    for _ in range(3):
        for name in whole:
            kernels[name].append(sum(_of_attention(steps[name], name).values()))
    beyond = {name: [us - f for us, f in zip(whole[name], floor, strict=True)] for name in whole}
    gates = {
        name: Gate(
            abs(first[name] - first[TORCH]) <= SAME_LOSS * first[TORCH],
            f"loss of the first step {first[name]:.5f}, torch's {first[TORCH]:.5f}",
        )
        for name in whole
    }
    found = {"step": whole, "attention-kernels": kernels, "attention-beyond": beyond}
    rows = tuple(_row(name, us, gates) for name, us in found.items())
    facts = replace(METHOD, rounds=asked.rounds).facts() | {
        each: getattr(asked, each) for each in ("batch", "length", "mean", "layers")
    }
    return Report("training_step", facts, (describe(),), rows)


def _row(name: str, found: dict[str, list[float]], gates: dict[str, Gate]) -> RowResult:
    red = {peer: gate.message for peer, gate in gates.items() if not gate.passed}
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
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: a step is timed on one", file=sys.stderr)
        return 2
    report = measure(asked)
    if asked.out:
        save(report, asked.out)
    print(table(report))
    return 0 if all(gate.passed for row in report.rows for gate in row.gates.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
