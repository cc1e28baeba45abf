"""Configs of the Triton backward, and what they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexattn.device import Device
from flexattn.kernels.base.config import Language, padded, pieces
from flexattn.kernels.base.features import tma_layout
from flexattn.kernels.base.knobs import knob
from flexattn.kernels.base.rule import Rule, Rules
from flexattn.kernels.printers.gradient_printer import adds_along_diagonals
from flexattn.mods.expr import reads, walk
from flexattn.problem import Structure

# Barriers and scratch, beside the tiles; registers of addresses and loop state, beside those too.
_SHARED_SLACK, _REGISTER_SLACK = 2048, 40


def _loads_for_keys(structure: Structure) -> bool:
    """Whether a score_mod reads memory inside of the loops."""
    if structure.score is None:
        return False
    loads = (each for each in walk(structure.score.mod.expr) if each.op == "load")
    return any(reads(each, "kv_idx") for each in loads)


def serialises(structure: Structure) -> bool:
    """Whether ptxas was seen to serialise the products of such a structure, unguarded."""
    return max(structure.head_dim_qk, structure.head_dim_v) > 128 or _loads_for_keys(structure)


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Two halves of one launch, with torch's names for their tiles.

    BLOCK_N1 keys are held for dK and dV, and query rows walked BLOCK_M1 at a time; BLOCK_M2 rows
    are held for dQ, and keys walked BLOCK_N2 at a time. use_tma: what is walked is read through
    tensor descriptors, by the bulk copy engine. sum_diagonals: the gradient of a relative bias is
    summed along each tile's diagonals before it is added up. guarded: whether each loop stands
    behind a condition that it has a turn; default False. A product goes on when a loop ends, and
    of a loop that may have no turn ptxas may see another instruction write its sums: then each
    wgmma of the kernel waits for the one before it (C7515). So it is on Hopper of a learned bias
    by distance, and above 128 columns of almost every call, and there the static defaults have it.
    """

    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    num_warps: int = 4
    num_stages: int = 2
    use_tma: bool = False
    sum_diagonals: bool = knob(True, False, word="scattered", moves=adds_along_diagonals)
    guarded: bool = knob(False, True, word="guarded", moves=serialises)

    heads: ClassVar[int] = 1
    language: ClassVar[Language] = "triton"

    @property
    def BLOCK_M(self) -> int:
        """Query rows of a tile that walks the keys."""
        return self.BLOCK_M2

    @property
    def BLOCK_N(self) -> int:
        """Keys that it walks at a time."""
        return self.BLOCK_N2

    @property
    def tiles(self) -> tuple[tuple[str, int], ...]:
        """The tiles by name."""
        names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
        return tuple((name, getattr(self, name)) for name in names)


@dataclass(slots=True)
class RuleCase:
    """What the rules ask: bytes of shared memory, registers of a thread, and their limits."""

    config: BackwardConfig
    itemsize: int
    qk: int
    v: int
    available: int
    max_registers: int
    threads: int
    wgmma: bool
    tma: bool
    hip: bool
    served: bool
    diagonals: bool
    shared_memory: int = 0
    registers: int = 0


def case_of(config: BackwardConfig, structure: Structure, device: Device) -> RuleCase:
    """The numbers of a config, a structure and a device."""
    wgmma = device.has_wgmma and structure.itemsize == 2 and config.num_warps >= 4
    return RuleCase(
        config,
        structure.itemsize,
        padded(structure.head_dim_qk),
        padded(structure.head_dim_v),
        device.shared_memory,
        device.max_registers,
        config.num_warps * device.warp_size,
        wgmma,
        device.has_tma and tma_layout(structure) and _whole(structure),
        device.backend == "hip",
        not structure.fp8 and not structure.kv_dtype,
        config.sum_diagonals and adds_along_diagonals(structure),
    )


def _whole(structure: Structure) -> bool:
    """Whether each head dimension is one tile, and dense rows of the output are whole 16 bytes."""
    one = len(pieces(structure.head_dim_qk)) == len(pieces(structure.head_dim_v)) == 1
    return one and structure.head_dim_v * structure.itemsize % 16 == 0


def estimate(case: RuleCase) -> None:
    """Write what a config takes into its case: of the half that takes more."""
    c, width = case.config, case.qk + case.v
    halves = (c.BLOCK_N1, c.BLOCK_M1), (c.BLOCK_M2, c.BLOCK_N2)
    held, walked = max(halves, key=sum)
    keys_half, queries_half = (case.itemsize * _shared_elements(case, *h, width) for h in halves)
    if case.diagonals:
        # Scores are turned through shared memory, in float32 and a buffer a stage.
        queries_half += 4 * c.num_stages * c.BLOCK_M2 * c.BLOCK_N2
    case.shared_memory = max(keys_half, queries_half) + _SHARED_SLACK
    keys = c.BLOCK_N1 * width + 2 * c.BLOCK_N1 * c.BLOCK_M1
    queries = c.BLOCK_M2 * case.qk + 2 * c.BLOCK_M2 * c.BLOCK_N2
    case.registers = _REGISTER_SLACK + max(keys, queries) // case.threads
    if case.itemsize == 4:
        # Without matrix instructions operands lie in registers, too.
        case.registers += (held + walked) * max(case.qk, case.v) // case.threads // 4


def _shared_elements(case: RuleCase, held: int, walked: int, width: int) -> int:
    """Elements that one half has in shared memory: tiles that are held and walked, and weights."""
    stages = case.config.num_stages
    if case.hip:  # what is held stays in registers
        return max(1, stages - 1) * walked * width
    if not case.wgmma:
        return (held + max(1, stages - 1) * walked) * width + held * walked
    # Weights stay with the warps that made them, where each has rows of its own.
    apart = held < 16 * case.config.num_warps
    return (held + stages * walked) * width + apart * held * walked


def _powers(case: RuleCase) -> bool:
    return all(size >= 16 and not size & (size - 1) for _, size in case.config.tiles)


RULES: Rules[RuleCase] = Rules(
    shape=(
        Rule("tiles", "tiles are powers of two of at least 16", _powers),
        Rule(
            "warps",
            "num_warps is 1, 2, 4, 8 or 16",
            lambda c: c.config.num_warps in (1, 2, 4, 8, 16),
        ),
        Rule("stages", "num_stages is at least 1", lambda c: c.config.num_stages >= 1),
        Rule(
            "tma",
            "tensor descriptors need sm_90, heads of one tile, and rows of 16 bytes as they lie",
            lambda c: c.tma or not c.config.use_tma,
        ),
        Rule("dtype", "inputs of one dtype of 16 or 32 bits have a backward", lambda c: c.served),
    ),
    fit=(
        Rule(
            "shared memory",
            "shared memory: about {shared_memory} bytes, {device} has {available}",
            lambda c: c.shared_memory <= c.available,
        ),
        Rule(
            "registers",
            "about {registers} registers a thread, {device} has {max_registers}",
            lambda c: c.registers <= 2 * c.max_registers,
        ),
    ),
    worth=(
        Rule(
            "spills",
            "about {registers} registers a thread, {device} has {max_registers}",
            lambda c: c.registers <= c.max_registers,
        ),
    ),
)
