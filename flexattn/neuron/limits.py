"""Limits of the NKI templates for prefill and decode: what fits a NeuronCore, and rules.

config.py counts the bytes of SBUF and the banks of PSUM as the interpreter does, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexattn.device.neuroncore import (
    BANK_BYTES,
    PARTITIONS,
    PSUM_BANKS,
    STATIONARY_MAX,
    NeuronCore,
)
from flexattn.kernels.base.limits import Limits, Rule
from flexattn.neuron.config import NkiConfig, NkiShape, memory_of, shape_of
from flexattn.problem import Problem

# Numbers of fp32 of a PSUM bank.
BANK_COLUMNS = BANK_BYTES // 4


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a problem's mods, with masks and scores in one form.

    tiles: of each pool. range_select: whether the mask uses it. refused: why they cannot be
    expressed, "" if they can.
    """

    tiles: tuple[tuple[str, int], ...] = ()
    range_select: bool = False
    refused: str = ""


@dataclass(eq=False)
class NkiCase:
    """A config for a problem on a core, whose mods need what `needs` says."""

    config: NkiConfig
    problem: Problem
    core: NeuronCore
    needs: Needs = Needs()

    @cached_property
    def shape(self) -> NkiShape:
        """The numbers of the template."""
        return shape_of(self.problem, self.config)

    @cached_property
    def memory(self) -> tuple[int, int]:
        """Bytes of a partition of SBUF, and banks of PSUM."""
        return memory_of(self.problem, self.config, dict(self.needs.tiles), self.shape)

    @property
    def turned(self) -> bool:
        """True where keys lie on the partitions, so that nothing need transpose P."""
        return self.config.form == "st"

    @property
    def dma(self) -> bool:
        """True where DMA transposes P."""
        return self.config.transpose == "dma" and not self.turned


def _at_least_one(name: str) -> Rule[NkiCase]:
    words = f"{name}={{c.config.{name}}} is below 1"
    return Rule("at least one", words, lambda c: bool(getattr(c.config, name) >= 1))


NKI_LIMITS: Limits[NkiCase] = Limits(
    NkiCase,
    shape=(
        *map(
            _at_least_one,
            (
                "BLOCK_M",
                "BLOCK_N",
                "num_splits",
                "section",
                "score_buffers",
                "value_buffers",
                "buffers",
                "kv_buffers",
            ),
        ),
        Rule(
            "rows",
            f"BLOCK_M={{c.config.BLOCK_M}}: a matmul has {STATIONARY_MAX} stationary columns",
            lambda c: c.config.BLOCK_M <= STATIONARY_MAX,
        ),
        Rule(
            "keys",
            f"BLOCK_N={{c.config.BLOCK_N}} is less than a chunk of {PARTITIONS} keys",
            lambda c: c.config.BLOCK_N >= PARTITIONS,
        ),
    ),
    fit=(
        Rule("mods", "{c.needs.refused}", lambda c: not c.needs.refused),
        Rule(
            "sbuf",
            "SBUF: {c.memory[0]} bytes of a partition, {c.core.name} has {c.core.sbuf_bytes}",
            lambda c: c.memory[0] <= c.core.sbuf_bytes,
        ),
        Rule(
            "psum",
            f"PSUM: {{c.memory[1]}} banks, there are {PSUM_BANKS}",
            lambda c: c.memory[1] <= PSUM_BANKS,
        ),
        Rule(
            "dma transpose",
            "transpose=dma: {c.core.name} has no DMA transpose",
            lambda c: not c.dma or c.core.has_dma_transpose,
        ),
        Rule(
            "dma transpose",
            "transpose=dma: it moves elements of 2 bytes",
            lambda c: not c.dma or c.shape.itemsize == 2,
        ),
        Rule(
            "form",
            "mask=range: range_select compares along the free dimension, and form=st has rows "
            "there",
            lambda c: not (c.turned and c.needs.range_select),
        ),
        Rule(
            "form",
            "form=st: tiles of BLOCK_M={c.config.BLOCK_M} rows cross the end of a PSUM bank",
            lambda c: (
                not c.turned
                or c.core.has_bf16_psum
                or c.config.score_buffers * c.shape.lanes <= BANK_COLUMNS
                or BANK_COLUMNS % c.config.BLOCK_M == 0
            ),
        ),
        Rule(
            "range_select",
            "mask=range: {c.core.name} has no range_select",
            lambda c: not c.needs.range_select or c.turned or c.core.has_range_select,
        ),
    ),
)
