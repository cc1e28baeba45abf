"""Which tiles a backward visits where those of far keys have no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import BuildError
from flexattn.kernels.decay_skip.source import render_blocks
from flexattn.problem import Problem
from flexattn.runtime.build import Launcher, builder
from flexattn.runtime.decay_skip import DecaySkip, pays
from flexattn.runtime.outcomes import concerns_the_device, memory, outcome_of
from flexattn.settings import current, say_once

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
