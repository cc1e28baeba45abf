"""`python -m bench.training_step`: a GPT's step under torch.compile, and attention's share of it.

Twelve layers of width 2,048 with 16 heads of 128, and rows of packed documents; a step is a
forward, a backward and AdamW's update. Blocks are compiled with torch's flex_attention in them and
with this library's call, and once around this library's eager call. The row "step" has wall times
of a step with soft-capped scores, "attention-kernels" the times of attention's kernels in a
profile of one. "packed-step" has shorter documents, plain scores, and calls that take cu_seqlens:
varlen_attn, and FlashAttention-4's, around which blocks are compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torchs

import flexattn
from bench.command import main, named
from bench.peers import OURS, Refusal
from bench.results import Gate
from bench.runner import Kind, Method, Uncounted, in_turns, wall_us
from flexattn.measure.timing import Samples

EAGER, TORCH, FA4 = f"{OURS}-eager-call", "torch-flex", "fa4"
WIDTH, HEADS, VOCABULARY, CAP = 2048, 16, 4096, 50.0
# Losses of one step in bfloat16, by different kernels and the same weights.
SAME_LOSS = 2e-3
# Names of torch's generated kernels of attention begin so; ours are known by their own names.
TORCHS_KERNELS = "triton_tem_fused"
METHOD = Method(rounds=10)
PROFILES = 3


@dataclass(frozen=True)
class TrainingRow(Uncounted):
    """A measure of steps on tokens [batch, length], in documents of `mean` tokens on average.

    packed: by cu_seqlens, without a score_mod.
    """

    name: str
    batch: int = 8
    length: int = 8192
    mean: int = 2048
    layers: int = 12
    packed: bool = False
    group = "training"


KERNELS = "attention-kernels"
ROWS = (
    TrainingRow("step"), TrainingRow(KERNELS), TrainingRow("packed-step", mean=1000, packed=True),
)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """A row's tokens int64 [B, L], and the losses of the first steps of its peers so far."""

    row: TrainingRow
    tokens: Tensor
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A peer's step, and the loss of its first one."""

    name: str
    call: Callable[[], Tensor]
    first: float

    def __call__(self) -> Tensor:
        return self.call()


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
        seen = self.attend(*qkv, mask)
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


def _by_mask(attention: Callable[..., Any], packed: bool) -> Callable[..., Any]:
    """A flex_attention as blocks call it."""
    return partial(_masked, attention, None if packed else softcap)


def _masked(
    attention: Callable[..., Any], score_mod: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any
) -> Any:
    return attention(q, k, v, score_mod=score_mod, block_mask=mask)


def _by_lengths(
    attention: Callable[..., Any], longest: int, q: Tensor, k: Tensor, v: Tensor, cu: Tensor
) -> Any:
    """A function of packed sequences on heads [B, H, L, D], whose rows follow one another."""
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    found = attention(*rows, cu, cu, longest, longest, causal=True)
    out = found[0] if isinstance(found, tuple) else found
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _fa4() -> Callable[..., Any]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    def attention(*given: Any, causal: bool) -> Any:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return flash_attn_varlen_func(
            *given[:3], **dict(zip(names, given[3:], strict=True)), causal=causal
        )

    return torch.compiler.disable(attention)  # type: ignore[no-any-return]


def attends(row: TrainingRow, device: str) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Makers of each peer's attention and its block mask, or cu_seqlens, of the same documents."""
    owner = _documents(row.batch, row.length, row.mean, device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (owner[b, q_idx] == owner[b, kv_idx])

    sizes = row.batch, None, row.length, row.length, device

    def ours() -> Any:
        return flexattn.create_block_mask(mask_mod, *sizes)

    def torchs_own() -> tuple[Any, Any]:
        mask = torchs.create_block_mask(mask_mod, *sizes, _compile=device != "cpu")
        return _by_mask(torchs.flex_attention, row.packed), mask

    if row.packed:
        begins = owner.diff(dim=1, prepend=owner[:, :1] - 1).flatten().nonzero()[:, 0]
        cu = F.pad(begins, (0, 1), value=owner.numel()).int()
        longest = int(cu.diff().max())

        def by_lengths(attention: Callable[..., Any]) -> tuple[Any, Tensor]:
            return partial(_by_lengths, attention, longest), cu

        return {
            TORCH: torchs_own,
            OURS: lambda: by_lengths(flexattn.varlen_attn),
            EAGER: lambda: by_lengths(torch.compiler.disable(flexattn.varlen_attn)),
            FA4: lambda: by_lengths(_fa4()),
        }
    eager = torch.compiler.disable(flexattn.flex_attention)
    return {
        TORCH: torchs_own,
        OURS: lambda: (_by_mask(flexattn.flex_attention, False), ours()),
        EAGER: lambda: (_by_mask(eager, False), ours()),
    }


def _make(row: TrainingRow, method: Method) -> Training:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (row.batch, row.length), device=method.device)
    return Training(row, tokens)


def _prepare(name: str, x: Training) -> Step | Refusal:
    """A peer's step after three of them, of which the first compiles."""
    known = attends(x.row, x.tokens.device.type)
    if name not in known:
        return Refusal("it is beside calls that take cu_seqlens")
    attend, mask = known[name]()
    torch.manual_seed(0)
    model = GPT(x.row.layers, attend).to(x.tokens.device, torch.bfloat16)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # One compile serves all blocks.
    for block in model.blocks:
        block.compile()

    def step() -> Tensor:
        loss: Tensor = model(x.tokens, mask)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
        return loss.detach()

    made = Step(name, step, step().item())
    x.losses[name] = made.first
    for _ in range(2):
        made()
    return made


def _judge(step: Step, x: Training) -> Gate:
    """The loss of the first step is that of the first peer's, from the same weights."""
    peer, loss = next(iter(x.losses.items()))
    said = f"loss of the first step {step.first:.5f}, {peer}'s {loss:.5f}"
    return Gate(abs(step.first - loss) <= SAME_LOSS * loss, said)


def kernels(step: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel in one step, by its name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        wall_us(step)
    return {each.key: each.device_time_total for each in profile.key_averages()}


def _of_attention(step: Step) -> float:
    """Microseconds of attention's kernels in one step."""

    def counts(kernel: str) -> bool:
        if step.name == TORCH:
            return kernel.startswith(TORCHS_KERNELS) and "flex_attention" in kernel
        return kernel.startswith("flexattn")

    found = kernels(step)
    if not any(map(counts, found)):
        raise RuntimeError(f"a profile of {step.name} has no kernel of attention: {[*found]}")
    return sum(us for kernel, us in found.items() if counts(kernel))


def _race(calls: Mapping[str, Step], x: Training, method: Method) -> dict[str, Samples]:
    if x.row.name != KERNELS:
        return in_turns(wall_us)(calls, x, method)
    return {
        name: Samples(tuple(_of_attention(step) for _ in range(PROFILES)), calls=1)
        for name, step in calls.items()
    }


TRAINING = Kind(_make, _judge, _prepare, grad=True, race=_race)  # type: ignore[arg-type]


run = partial(
    main, "training_step", ROWS, METHOD, known=named(TORCH, OURS, EAGER, FA4), kind=TRAINING
)


if __name__ == "__main__":
    sys.exit(run())
