"""How many keys behind one that a row keeps may count: from norms of q and k, and slopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.build import Launcher, builder
from flexattn.device import Device
from flexattn.errors import BuildError
from flexattn.fallback.outcome import concerns_the_device, outcome_of
from flexattn.problem import Problem, Structure
from flexattn.render.arguments import captured_arguments
from flexattn.render.reach import render_norms, render_reach, rows_of_part
from flexattn.render.source import Source
from flexattn.settings import current, say_once
from flexattn.space.config import Config
from flexattn.space.terms import reaches, skips_far

__all__ = ["Reach", "begin", "pays", "sources"]

# Where few keys, or few rows for each of them, are walked, two more kernels would cost what they
# save: an estimate, which nothing has measured yet.
LEAST_KEYS, LEAST_ROWS, LEAST_SCORES = 1024, 256, 10**8


def pays(problem: Problem) -> bool:
    """Whether a call is long enough for keys to be left out of it: by its shape alone."""
    scores = problem.B * problem.Hq * problem.q_len * problem.kv_len
    long = problem.kv_len >= LEAST_KEYS and problem.q_len >= LEAST_ROWS
    return long and scores >= LEAST_SCORES


def sources(structure: Structure, config: Config, target: Device) -> tuple[Source, ...]:
    """The kernels that run before one that leaves keys out: of norms, and of reaches."""
    if not skips_far(structure, config):
        return ()
    return _rendered(structure, target)


@lru_cache(maxsize=1024)
def _rendered(structure: Structure, target: Device) -> tuple[Source, Source]:
    return render_norms(structure, target), render_reach(structure, target)


def begin(structure: Structure, target: Device, index: int) -> None:
    """Start building them, while the kernel is built that they run before."""
    if index >= 0 and reaches(structure):
        for source in _rendered(structure, target):
            builder().begin(source, target, index)


@dataclass(frozen=True, slots=True)
class Reach:
    """The two kernels that find it, for one problem and one set of strides.

    size: of what they write, float32: the reaches [B, Hq] first, whole numbers, then what the
    first kernel leaves for the second. captured: which of the arguments that follow the scale are
    those that the score_mod captures.
    """

    size: int
    captured: slice
    norms: Launcher
    reach: Launcher

    @classmethod
    def of(
        cls, problem: Problem, q: Tensor, k: Tensor, before: int, target: Device, index: int
    ) -> Reach | None:
        """For tensors like q and k on the GPU with this index, or in the interpreter (-1).

        before: how many arguments follow the scale before those of the score_mod. None where the
        kernels do not build, which is said: the call then visits all keys.
        """
        try:
            return cls._of(problem, q, k, before, target, index)
        except BuildError as error:
            if current().strict or concerns_the_device(error):
                raise
            say_once(f"{problem.describe()}: far keys are not left out: {outcome_of(error)}")
            return None

    @classmethod
    def _of(
        cls, problem: Problem, q: Tensor, k: Tensor, before: int, target: Device, index: int
    ) -> Reach:
        structure = problem.structure
        rows, heads = rows_of_part(structure.head_dim_qk), problem.B * problem.Hq
        q_parts, k_parts = -(-problem.q_len // rows), -(-problem.kv_len // rows)
        q_programs, k_programs = heads * q_parts, k.shape[0] * problem.Hkv * k_parts
        layout = structure.layout
        fixed: list[Any] = [None, None, None]
        fixed += [*_strides(q, layout.q_contiguous), *_strides(k, layout.k_contiguous)]
        fixed += [problem.Hq, problem.Hkv, problem.q_len, problem.kv_len]
        fixed += [q_parts, k_parts, q_programs, heads]
        first, second = _rendered(structure, target)
        kernel = builder().kernel(first, target, index)
        norms = kernel.prepare(q_programs + k_programs, fixed, ())
        batch = 0 if k.shape[0] == 1 else problem.Hkv
        fixed = [None, problem.Hq, problem.Hq // problem.Hkv, batch]
        fixed += [problem.q_len, problem.kv_len, q_parts, k_parts]
        fixed += [heads, heads + q_programs, None]
        captured = len(captured_arguments(structure.score))
        kernel = builder().kernel(second, target, index)
        reach = kernel.prepare(heads, [*fixed, *[None] * captured], ())
        found = slice(before, before + captured)
        return cls(heads + q_programs + k_programs, found, norms, reach)

    def empty(self, device: torch.device) -> Tensor:
        """Memory for what `run` writes."""
        return torch.empty(self.size, dtype=torch.float32, device=device)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        memory: Tensor,
        scale: float,
        rest: Sequence[Any],
        stream: int,
    ) -> None:
        """Write the reaches, on a stream; rest: the arguments of attention after the scale."""
        self.norms.launch(stream, [q, k, memory])
        self.reach.launch(stream, [memory, scale, *rest[self.captured]])


def _strides(tensor: Tensor, contiguous: bool) -> list[int]:
    """As many as the kernel asks for, 0 where a dimension has one element."""
    found = [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return found[: 3 if contiguous else 4]
