"""A random mod: its text from (seed, index) alone, and callables of it over captured tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.random_mods.captures import Capture
from tests.random_mods.reals import RealWriter
from tests.random_mods.terms import FLOATS
from tests.random_mods.writer import Writer

SIGNATURES = {
    "score": "score_mod(score, b, h, q_idx, kv_idx)",
    "mask": "mask_mod(b, h, q_idx, kv_idx)",
}
# Where a mask is tried before it is taken: most rows keep a key there.
TRIAL = {"B": 2, "H": 3, "L": 45, "S": 61}


# What is done to a score, or a truth, in the memory that a mod has made for it, and beside it by
# operations that few mods use.
OWN_SCORES = (
    "x += 0.25",
    "x -= (q_idx - kv_idx).abs().clamp(max=50) * 0.02",
    "x.mul_(0.5).add_(kv_idx * 0.01)",
    "x.sub_(0.5).neg_()",
    "x *= 0.75",
    "y = torch.asinh(x) + x * 0.25; x = x * 1.0; x.copy_(y)",
    "x = torch.hypot(x, torch.ones_like(x) * 0.5)",
    "x = x + torch.copysign(x.abs() * 0.25 + 0.5, kv_idx - q_idx + 0.5)",
    "x = torch.fmax(x, x * 0.25) - torch.fmin(x, torch.zeros_like(x)) * 0.5",
    "x = x + torch.erfinv(torch.tanh(x) * 0.75)",
    "x = x + torch.atanh(torch.tanh(x) * 0.75) - torch.acosh(x.abs() + 1.5)",
    "x = torch.logaddexp(x, x * 0.5)",
    "x = torch.lerp(x, x * 0.5, 0.3) + torch.nn.functional.mish(x)",
    "x += torch.bucketize(kv_idx, torch.tensor([3, 10, 40], device=kv_idx.device)) * 0.1",
    "x += torch.round(q_idx * 0.0717, decimals=1)",
)
OWN_MASKS = (
    "x |= q_idx - kv_idx == 3",
    "x |= (q_idx - kv_idx).abs() < 5",
    "x.logical_or_(kv_idx < 2)",
    "x |= kv_idx % 7 == 2",
    "x |= torch.bucketize(kv_idx, torch.tensor([3, 10], device=kv_idx.device)) == 1",
)


@dataclass(frozen=True, slots=True)
class Part:
    """A score_mod or mask_mod as text: statements, what it returns, what it captures."""

    kind: str
    lines: tuple[str, ...]
    result: str
    captures: tuple[Capture, ...]

    def __str__(self) -> str:
        held = "; ".join(map(str, self.captures))
        return f"{self.kind}_mod: {'; '.join((*self.lines, self.result))} [{held}]"

    @property
    def source(self) -> str:
        """A factory whose arguments the mod captures, as users write one."""
        names = ", ".join(each.name for each in self.captures)
        function = SIGNATURES[self.kind]
        body = [*self.lines, f"return {self.result}"]
        head = [f"def make({names}):", f"    def {function}:"]
        tail = [f"    return {function.partition('(')[0]}"]
        return "\n".join([*head, *(f"        {line}" for line in body), *tail, ""])

    def make(
        self, sizes: dict[str, int], device: Any, draw: torch.Generator
    ) -> Callable[..., Any]:
        """The callable, its tensors as long as `sizes` says: B, H, L and S."""
        return self.over(self.values(sizes, device, draw))

    def values(
        self, sizes: dict[str, int], device: Any, draw: torch.Generator
    ) -> list[torch.Tensor | float]:
        """What it captures."""
        return [_value(each, sizes, device, draw) for each in self.captures]

    def over(self, values: Sequence[Any], floats: str = "") -> Callable[..., Any]:
        """The callable that captures values; floats: what it casts to instead of any of these."""
        scope: dict[str, Any] = {"torch": torch}
        source = self.source
        for each in FLOATS if floats else ():
            source = source.replace(f"torch.{each}", f"torch.{floats}")
        exec(compile(source, f"<random {self.kind}_mod>", "exec"), scope)
        mod: Callable[..., Any] = scope["make"](*values)
        return mod


@dataclass(frozen=True, slots=True)
class RandomMod:
    """A score_mod, a mask_mod or both, named by a seed and an index."""

    seed: int
    index: int
    score: Part | None
    mask: Part | None

    def __str__(self) -> str:
        parts = " | ".join(str(part) for part in (self.score, self.mask) if part is not None)
        return f"(seed {self.seed}, index {self.index}) {parts}"

    def make(
        self, B: int, H: int, L: int, S: int, device: Any = "cpu"
    ) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
        """(score_mod, mask_mod), their tensors the same on every device."""
        sizes = {"B": B, "H": H, "L": L, "S": S}
        draw = torch.Generator().manual_seed(1000003 * self.seed + self.index)
        score = None if self.score is None else self.score.make(sizes, device, draw)
        mask = None if self.mask is None else self.mask.make(sizes, device, draw)
        return score, mask


def random_mod(seed: int, index: int) -> RandomMod:
    """The mod of this name: the same in every process."""
    draw = random.Random(f"{seed} {index}")
    kind = draw.choice(("score", "score", "mask", "both", "both"))
    score = _score(draw) if kind != "mask" else None
    mask = _mask(draw) if kind != "score" else None
    return RandomMod(seed, index, *own_tensors(seed, index, score, mask))


def own_tensors(
    seed: int, index: int, score: Part | None, mask: Part | None
) -> tuple[Part | None, Part | None]:
    """A score_mod and a mask_mod of which some write to tensors that they made themselves.

    Drawn apart: the others are what they were before.
    """
    draw = random.Random(f"{seed} {index} own")
    if score is not None and draw.random() < 0.4 and "inf" not in score.result:
        # Autograd may have saved what an earlier step made: each writes to a tensor of its own.
        steps = [f"x = x * 1.0; {step}" for step in draw.choices(OWN_SCORES, k=draw.randint(1, 3))]
        score = replace(score, lines=(*score.lines, f"x = {score.result}", *steps), result="x")
    if mask is not None and draw.random() < 0.4:
        # vmap writes to what has all positions.
        first = f"x = {mask.result} & (b + h + q_idx + kv_idx >= 0)"
        steps = draw.choices(OWN_MASKS, k=draw.randint(1, 2))
        mask = replace(mask, lines=(*mask.lines, first, *steps), result="x")
    return score, mask


@lru_cache(maxsize=1)
def random_mask(seed: int, index: int) -> RandomMod:
    """The mask_mod of this name, among masks alone."""
    return RandomMod(seed, index, None, _mask(random.Random(f"{seed} {index} mask")))


@lru_cache(maxsize=1)
def random_score(seed: int, index: int) -> RandomMod:
    """The mod of this name, among those with a score_mod that autograd differentiates."""
    draw = random.Random(f"{seed} {index} score")
    while not differentiable(score := _score(draw)):
        pass
    mask = _mask(draw) if draw.random() < 0.5 else None
    return RandomMod(seed, index, *own_tensors(seed, index, score, mask))


def differentiable(part: Part) -> bool:
    """Whether autograd has a derivative of each operation of a score_mod: of // it has none."""
    values = part.values(TRIAL, "cpu", torch.Generator().manual_seed(0))
    learn = [x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]
    with torch.enable_grad():
        score, *_ = [x.requires_grad_() for x in (torch.zeros(1, 1, 1, 1), *learn)]
        try:
            everywhere(part.over(values), 1, 1, 1, 1, score).sum().backward()
        except RuntimeError:
            return False
    return True


def everywhere(
    mod: Callable[..., Any], B: int, H: int, L: int, S: int, *score: torch.Tensor
) -> torch.Tensor:
    """A mod at every position, [B, H, L, S], as torch's eager flex_attention maps it.

    Broadcasting would do otherwise: a number beside a half is rounded to a half under vmap alone.
    """
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if axis == dim else None for dim in range(4))
        mod = torch.vmap(mod, in_dims=(*(0 for _ in score), *dims))
    with _Gather():
        return mod(*score, *(torch.arange(n) for n in (B, H, L, S)))


class _Gather(TorchFunctionMode):
    """Under vmap a 0-d index has no value that Python could read: `x[i]` gathers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index.Tensor(args[0], list(map(torch.as_tensor, index)))
        return func(*args, **(kwargs or {}))


def random_part(draw: random.Random, kind: type[Writer]) -> Part:
    """A score_mod of one that writes floats, else a mask_mod."""
    return _score(draw, kind) if issubclass(kind, RealWriter) else _mask(draw, kind)


def _score(draw: random.Random, kind: type[RealWriter] = RealWriter) -> Part:
    room = draw.randint(1, 4)
    while True:
        writer = kind(draw, room)
        result = writer.scored(draw.choice((1, 2, 2, 3)))
        if len(writer.captures) == room:
            return _part("score", writer, result)


def _mask(draw: random.Random, kind: type[Writer] = Writer) -> Part:
    room = draw.randint(1, 4)
    while True:
        writer = kind(draw, room)
        result = writer.truth(draw.choice((2, 3, 3, 4))).text
        if len(writer.captures) < room:
            continue
        if draw.random() < 0.4:
            result = f"(q_idx >= kv_idx) & {result}"
        part = _part("mask", writer, result)
        mod = part.make(TRIAL, "cpu", torch.Generator().manual_seed(0))
        kept = everywhere(mod, *TRIAL.values())
        if kept.any(-1).float().mean() > 0.7 and not kept.all():
            return part


def _part(kind: str, writer: Writer, result: str) -> Part:
    return Part(kind, tuple(writer.lines), result, tuple(writer.captures))


def _value(capture: Capture, sizes: dict[str, int], device: Any, draw: torch.Generator) -> Any:
    low, high = capture.low, capture.high
    if capture.dims is None:
        return low
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in capture.dims]
    dtype: torch.dtype = getattr(torch, capture.dtype)
    if capture.dtype in FLOATS:
        values = low + (high - low) * torch.rand(shape, generator=draw)
    else:
        values = torch.randint(int(low), int(high) + 1, shape, generator=draw)
    return values.to(device, dtype)
