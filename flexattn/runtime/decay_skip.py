"""Which keys of a decaying score may count: by norms of q and k, and by tiles of a backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import BuildError
from flexattn.kernels.base.binding import strides
from flexattn.kernels.base.config import Config
from flexattn.kernels.base.features import decays, skips_far
from flexattn.kernels.base.source import Source
from flexattn.kernels.decay_skip.source import (
    render_blocks,
    render_norms,
    render_window,
    rows_of_part,
)
from flexattn.problem import Problem, Structure
from flexattn.runtime.build import Launcher, builder
from flexattn.runtime.outcomes import concerns_the_device, memory, outcome_of
from flexattn.settings import current, say_once

# Where few keys, or few rows for each of them, are walked, two more kernels would cost what they
# save: an estimate, which nothing has measured yet.
LEAST_KEYS, LEAST_ROWS, LEAST_SCORES = 1024, 256, 10**8


def pays(problem: Problem) -> bool:
    """Whether a call is long enough for keys to be left out of it: by its shape alone."""
    scores = problem.B * problem.Hq * problem.q_len * problem.kv_len
    long = problem.kv_len >= LEAST_KEYS and problem.q_len >= LEAST_ROWS
    return long and scores >= LEAST_SCORES


def sources(structure: Structure, config: Config, target: Device) -> tuple[Source, ...]:
    """The kernels that run before one that leaves keys out: of norms, and of windows."""
    if not skips_far(structure, config):
        return ()
    return _rendered(structure, target)


@lru_cache(maxsize=1024)
def _rendered(structure: Structure, target: Device) -> tuple[Source, Source]:
    return render_norms(structure, target), render_window(structure, target)


def begin(structure: Structure, target: Device, index: int) -> None:
    """Start building them, while the kernel is built that they run before."""
    if index >= 0 and decays(structure):
        for source in _rendered(structure, target):
            builder().begin(source, target, index)


@dataclass(frozen=True, slots=True)
class DecaySkip:
    """The two kernels that find it, for one problem and one set of strides.

    size: of what they write, float32: the windows [B, Hq] first, whole numbers, then what the
    first kernel leaves for the second.
    """

    size: int
    norms: Launcher
    window: Launcher

    @classmethod
    def of(
        cls,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        given: Sequence[str],
        target: Device,
        index: int,
    ) -> DecaySkip | None:
        """For tensors like q and k on the GPU with this index, or in the interpreter (-1).

        given: the names of what `run` is given. What these kernels write is "DECAY_WINDOW" there.
        None where the kernels do not build, which is said: the call then visits all keys.
        """
        structure = problem.structure
        sources = _rendered(structure, target)
        known = [memory().find(each, target) for each in sources]
        if not current().strict and any(each is not None and not each.built for each in known):
            return None
        rows, heads = rows_of_part(structure.head_dim_qk), problem.B * problem.Hq
        q_parts, k_parts = -(-problem.q_len // rows), -(-problem.kv_len // rows)
        q_programs, k_programs = heads * q_parts, k.shape[0] * problem.Hkv * k_parts
        shared = {
            "Hq": problem.Hq, "q_len": problem.q_len, "kv_len": problem.kv_len, "q_parts": q_parts,
            "k_parts": k_parts, "start": heads,
        }  # fmt: skip
        layout = structure.layout
        of_norms = {
            **shared,
            **strides("stride_q", "bhm" if layout.q_contiguous else "bhmd", q),
            **strides("stride_k", "bhn" if layout.k_contiguous else "bhnd", k),
            "Hkv": problem.Hkv,
            "q_programs": q_programs,
        }
        of_window = {
            **shared,
            "group": problem.Hq // problem.Hkv,
            "stride_kb": 0 if k.shape[0] == 1 else problem.Hkv,
            "k_start": heads + q_programs,
        }
        passed = ["NORMS" if name == "DECAY_WINDOW" else name for name in given]
        launchers = []
        try:
            for source, programs, fixed in zip(
                sources, (q_programs + k_programs, heads), (of_norms, of_window), strict=True
            ):
                kernel = builder().kernel(source, target, index)
                launchers.append(kernel.prepare(programs, fixed, passed, spare=passed))
        except BuildError as error:
            if current().strict or concerns_the_device(error):
                raise
            outcome = outcome_of(error)
            say_once(f"{problem.describe()}: far keys are not left out: {outcome}")
            for source in sources:
                # Of two it is not known which: neither is compiled again.
                memory().note(source, target, outcome, problem.describe())
            return None
        return cls(heads + q_programs + k_programs, *launchers)

    def empty(self, device: torch.device) -> Tensor:
        """Memory for what `run` writes."""
        return torch.empty(self.size, dtype=torch.float32, device=device)

    def run(self, given: Sequence[Any], stream: int) -> None:
        """Write the windows, on a stream; given: what attention is given, with `empty` in it."""
        self.norms.launch(stream, given)
        self.window.launch(stream, given)


# What the kernels are given, and what is there in place of it where nothing is left out.
TILES_FOUND = ("DECAY_WINDOW", "M_BLOCK_MAX", "N_BLOCK_MIN")
VISITS_ALL = dict.fromkeys(TILES_FOUND, 0)
# Of fewer keys the three kernels cost what they save or more, on an H200: 16 heads of 128 columns,
# with a causal mask and ALiBi's slopes. What a forward asks for is asked for as well.
LEAST_BACKWARD_KEYS = 2048


@dataclass(frozen=True, slots=True)
class DecayBlocks:
    """The kernels that find windows, and the one that finds tiles by them, for one problem.

    shapes: of M_BLOCK_MAX and N_BLOCK_MIN.
    """

    skip: DecaySkip
    blocks: Launcher
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        problem: Problem,
        tile: tuple[int, int],
        inputs: Sequence[Tensor],
        fixed: Mapping[str, Any],
        given: Sequence[str],
        target: Device,
        index: int,
    ) -> DecayBlocks | None:
        """For the kernels of a problem's backward, whose tiles have `tile` rows and keys.

        inputs: q, k and v. fixed, given: values that the backward's kernels have, and names of
        those that `run` is given. None where these kernels cost more than they save, or do not
        build, which is said: the backward then visits all tiles.
        """
        if problem.kv_len < LEAST_BACKWARD_KEYS or not pays(problem):
            return None
        skip = DecaySkip.of(problem, inputs[0], inputs[1], given, target, index)
        if skip is None:
            return None
        source = render_blocks(problem.structure, *tile, target)
        known = memory().find(source, target)
        if known is not None and not known.built and not current().strict:
            return None
        m_blocks, n_blocks = -(-problem.q_len // tile[0]), -(-problem.kv_len // tile[1])
        told = {**fixed, "m_blocks": m_blocks, "n_blocks": n_blocks}
        try:
            kernel = builder().kernel(source, target, index)
        except BuildError as error:
            if current().strict or concerns_the_device(error):
                raise
            outcome = outcome_of(error)
            say_once(f"{problem.describe()}: far tiles are not left out: {outcome}")
            memory().note(source, target, outcome, problem.describe())
            return None
        heads = problem.B, problem.Hq
        blocks = kernel.prepare(heads[0] * heads[1], told, given, spare=(*told, *given))
        return cls(skip, blocks, ((*heads, n_blocks), (*heads, m_blocks)))

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Memory for what `run` writes, in the order of TILES_FOUND."""
        tiles = (torch.empty(x, dtype=torch.int32, device=device) for x in self.shapes)
        return self.skip.empty(device), *tiles

    def run(self, given: Sequence[Any], stream: int) -> None:
        """Find the tiles, on a stream; given: what the backward is given, `empty`'s among it."""
        self.skip.run(given, stream)
        self.blocks.launch(stream, given)
