"""HopperBackwardConfig, one variant of the warp-specialised backward, and its launch's sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import (
    TWO_BLOCKS_KEYS,
    Geometry,
    Language,
    knob,
    power_above,
    walks_runs,
)
from flexattn.kernels.ptx.assembler import waits_meet
from flexattn.problem import Problem, Structure

# Two consumer warpgroups, which share a tile: of 240 registers a thread, beside 24 of the loading
# warp's.
BLOCK_WARPS = 8
BACKWARD_REGISTERS = 240
PIPELINED = ("", "dk")
EARLY = ("", "half", "all")


@dataclass(frozen=True, slots=True)
class HopperBackwardConfig:
    """A block holds BLOCK_N keys and walks the rows BLOCK_M at a time; dQ is summed in float32.

    BLOCK_M: query rows of a tile, 64 or 128.
    BLOCK_N: keys of a tile; 128, of which each of the two consumer warpgroups has 64 rows of dK
    and dV in registers, or 64: each then has half the columns of both, or one of the two. Above
    128 columns 128 keys fit if dK and dV have 320 columns together (is_lean), and 96 up to 192
    columns, by_product (chunks).
    num_stages: tiles of Q, and of dO, in shared memory at once, 1 to 4; the loads run that far
    ahead.
    mha: whether each key head has one query head, of one batch; default False: a block walks the
    rows of every query head that reads its keys. It spares a counter in registers, and is not
    taken where weights are dropped.
    even_n: whether BLOCK_N divides the number of keys; default False. It spares a comparison of
    each score. Both follow from a problem's sizes.
    ds_stages: tiles of dS in shared memory, 1 or 2; default 1. With two in turn the warpgroups
    meet once a tile, behind the store, and not in front of it as well: 2 to 3 % faster at D 64 and
    128 on an H100, nothing at 256. Tiles of 96 keys have two in any case.
    pipelined: whose product goes on when the next tile begins; default "", nobody's. "dk": dK's,
    beside the next scores: 7 to 10 % faster at D 256 with a causal mask on an H200, slower at 64
    and 128. It takes two stages.
    dp_rs: whether dP's product reads 64 columns of V from registers, which hold them for all
    tiles; default False: from shared memory. They take 16 registers of each thread. At 64 columns
    such a product reads half as much of shared memory, at 128 three quarters: of all of V ptxas
    would serialise products there. For tiles of 128 keys, on an H200: beside persistent 2 to 3 %
    faster at 64 columns without a mask; with a causal one ptxas spills. At 128 columns 3 to 5 %
    faster beside ds_first and half of an early lse, and slower where what a mask asks for besides
    a band takes the registers.
    shift_rows: whether the blocks of a head begin at different rows where no mask is; default
    False. Those that run together then do not add to one tile of dQ at once: 2 % faster at 128
    columns on an H200.
    waves: how many tiles of keys, over the device's SMs, the heads of a section have; default 1.
    Its longest tiles start first (longest processing time first). A section of more heads ends
    with more short tiles: 2 to 3 % faster where a mask has short ones throughout, as of documents
    and windows, on an H200. 16: documents that see both
    ways were 6 to 15 % faster than with 4 at 8k tokens, and slower at 4k.
    trimmed: whether a kernel before this one trims the ends of a mask's runs, which are blocks, to
    the tiles of which the mask keeps something; default False. It takes runs, and no order. Of
    eight documents of 8k tokens 6 % of the tiles go; so does 7 % of the time, on an H200.
    persistent: whether one block an SM takes tiles of keys until there are none, as of Hopper's
    prefill; default False: a block has one. While its dK and dV are stored, by way of the tiles of
    dS and dQ, the next Q, dO, K and V are loaded. It takes dq_tma as a whole, and neither order,
    dropout nor pipelined. 3 to 6 % faster at 64 columns and with short masks on an
    H200, within 1 % at 128 without a mask.
    early_lse: what is read of a tile's lse before the product of its scores is issued; default "",
    nothing. Issued behind it a read takes some 340 cycles (H100, by the profile). "all": 4 to 6 %
    faster at D 128 and 2 to 3 % at D 256 on an H100; delta is then read before dP is awaited.
    "half": where registers have no place for more; 1 % at D 64. Beside a score_mod or dropout
    nothing is read early of tiles in which a mask_mod other than a band is evaluated. In tiles
    that the warpgroups share by columns it is read through shared memory.
    dq_tma: whether a tile of dQ passes through shared memory and the copy engine adds it, as in
    FlashAttention-3; default False: each thread adds what it holds. It spares the consumers
    instructions and registers, and takes 32 KB. 4 to 20 % faster up to 128 columns on an H100.
    dq_halves: whether each warpgroup hands on its half of a tile of dQ by itself, to a warp of its
    own; default False: both wait for the whole tile. It takes dq_tma, without deterministic and
    dropout. Faster without a mask and with a causal one; in a window ptxas serialises products.
    ds_first: whether dS is stored before dV's product is issued, as in FlashAttention-4; default
    False: after. A store behind a product waits until the tensor cores have taken all of that. It
    spares registers as well, on an H200: 3 to 6 % faster in tiles of 128 rows, and at D 128 1 %
    with a causal mask, 1 to 2 % beside V in registers and a quarter with soft-capping; without
    a mask and V in registers 1 % slower there.
    deterministic: whether the blocks of a head add to dQ in the order in which they start, a
    semaphore for each tile; default False: in any order. dQ then has the same bits in every run.
    It takes dq_tma: a warp waits for a block's turn, not the consumers.
    remat: whether addresses of tiles are computed anew in each turn of the loop; default False.
    What is known from before it takes registers, which beside masks and counters are lacking.
    head_parts: the blocks over which the query heads of a tile of keys are split, with packed
    sequences; default 1. Each block stores its sums of dK and dV in float32, and a later kernel
    adds them. If all blocks start at once, the longest block decides the time, and is shorter so.
    by_product: whether one warpgroup makes scores, weights and dV of a tile, and the other dP, dS
    and dK; default False: they share each product. For tiles of 64 rows and keys, of which half a
    product of scores reads shared memory for longer than it multiplies. Without dropout and
    captured gradients, which take scores and dP in one warpgroup. Weights times the mod's
    derivative are rounded to 16 bits between the two. 8 to 20 % faster at D 192 and 256 (H200).
    """

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    mha: bool = False
    even_n: bool = False
    ds_stages: int = 1
    pipelined: str = knob(*PIPELINED, word="pipelined")
    dp_rs: bool = knob(False, True, word="dp-rs")
    shift_rows: bool = knob(False, True, word="shifted", moves=lambda s: s.sparsity is None)
    waves: int = knob(1, 4, 16, word="waves", moves=lambda s: s.sparsity is not None)
    trimmed: bool = knob(
        False, True, word="trimmed", moves=lambda s: s.sparsity is not None and s.sparsity.runs
    )
    persistent: bool = knob(False, True, word="persistent")
    early_lse: str = knob(*EARLY, word="early")
    dq_tma: bool = knob(False, True, word="dq-tma")
    dq_halves: bool = knob(False, True, word="halves")
    ds_first: bool = knob(False, True, word="ds-first")
    deterministic: bool = knob(False, True, word="deterministic")
    remat: bool = knob(False, True, word="remat")
    by_product: bool = knob(False, True, word="by-product")
    head_parts: int = knob(1, 2, 4, 8, word="parts", moves=lambda s: s.ragged_kv)

    # Fields of earlier versions, with the value that every kernel has now.
    retired: ClassVar[dict[str, object]] = {
        "dk_rs": True, "ex2_emulated": 0, "lpt": True, "ping_pong": False,
    }  # fmt: skip

    heads: ClassVar[int] = 1
    num_warps: ClassVar[int] = BLOCK_WARPS
    language: ClassVar[Language] = "gluon"

    @property
    def split(self) -> bool:
        """True if the warpgroups share the columns of a tile, not its keys."""
        return self.BLOCK_N == 64 and not self.by_product

    @property
    def flags(self) -> str:
        """The tensor that says how far a tile's sums are, where the copy engine adds dQ."""
        return "DQ_SEMAPHORES" if self.deterministic else "DQ_FLAGS"


def columns(structure: Structure) -> int:
    """Columns of every tile: a power of two of at least 64, past a head's the copy engine gives 0.

    How many of them wgmma multiplies: see multiplied_columns.
    """
    return max(64, power_above(max(structure.head_dim_qk, structure.head_dim_v)))


def is_lean(structure: Structure, config: HopperBackwardConfig) -> bool:
    """True of tiles of 128 keys whose heads have more than 128 columns.

    Their registers have no place for a tile's scores beside gradients of weights: each product is
    awaited, and weights stay in 16 bits.
    """
    return config.BLOCK_N == 128 and columns(structure) == 256


def chunks(structure: Structure, config: HopperBackwardConfig) -> tuple[int, int] | None:
    """Chunks of 64 columns of q and k, and of v, in tiles of 96 keys; None of other tiles."""
    if config.BLOCK_N != TWO_BLOCKS_KEYS:
        return None
    qk, v = (-(-each // 64) for each in structure.head_dims)
    return qk, v


def value_columns(structure: Structure, config: HopperBackwardConfig) -> int:
    """Columns of tiles of V and dO."""
    if not is_lean(structure, config):
        return columns(structure)
    return max(64, power_above(structure.head_dim_v))


def multiplied_columns(head_dim: int) -> int:
    """Columns of a head dimension that wgmma multiplies: 16 at a time are summed."""
    return -(-head_dim // 16) * 16


# One block fills an SM, of which a Hopper has 132 at most.
BLOCKS_AT_ONCE = 128
# Of Q, dO and sums of dQ of a section's rows, beside those of the next one in L2.
SECTION_BYTES = 35_000_000
# Where blocks add to dq in their turns, so many of a head start side by side: each starts a few
# tiles of queries behind the one before.
DETERMINISTIC_AT_ONCE = 4


def at_sizes(config: HopperBackwardConfig, problem: Problem) -> HopperBackwardConfig:
    """The config in the form that a problem's heads and keys allow.

    With dropout a block of tall tiles, and every one of Triton 3.9, counts heads also where each
    key head has one: ptxas then spills less.
    """
    counts = problem.structure.dropout and (config.BLOCK_M == 128 or waits_meet())
    heads = _shared_heads(problem)
    parts = gcd(config.head_parts, heads) if problem.structure.ragged_kv else 1
    return replace(
        config,
        head_parts=parts,
        mha=heads == parts and not counts,
        even_n=problem.kv_len % config.BLOCK_N == 0 and not problem.structure.ragged_kv,
    )


def backward_grid(problem: Problem, config: HopperBackwardConfig, device: Device) -> Geometry:
    """A program for each tile of keys of each key head, or for each SM.

    Raises ConfigError for another form than a problem's.
    """
    allowed = at_sizes(config, problem)
    unlike = (config.mha and not allowed.mha) or (config.even_n and not allowed.even_n)
    if unlike or config.head_parts != allowed.head_parts:
        raise ConfigError(
            f"{config} for {problem.describe()}",
            "mha is of problems with as many key heads as query heads, even_n of lengths "
            "that BLOCK_N divides, head_parts of packed sequences whose groups it divides",
            f"use {allowed}",
        )
    sizes = sizes_of_launch(problem, config)
    tiles = sizes["num_tiles"] * sizes["kv_units"]
    programs = min(tiles, device.num_sms) if config.persistent else tiles
    return Geometry(programs, sizes["num_tiles"], tiles)


def sizes_of_launch(problem: Problem, config: HopperBackwardConfig) -> dict[str, int]:
    """Numbers that the kernels take beside lengths and heads.

    num_queries: tiles of queries of a head, for which there is scratch memory: a mask's lists name
    all tiles of a block. kv_units: key heads of all batches, each as often as it has parts, which
    num_heads counts, too. section_heads: those whose tiles
    start side by side, about as many as the device has SMs for, or a few times as many.
    shared_heads: query heads, of all batches, that read the same keys. num_requests: packed
    sequences. With these, num_tiles and num_queries are upper bounds. short_last: whether their
    short tiles go last, so that sections overlap: not where rows of two sections leave L2 (1.02 to
    1.05 of the time of D 96, H200).
    """
    rows, sparsity = config.BLOCK_M, problem.structure.sparsity
    if sparsity is not None and not walks_runs(problem.structure, config):
        rows = sparsity.q_block
    num_tiles = -(-problem.kv_len // config.BLOCK_N)
    num_queries = -(-problem.q_len // rows) * (rows // config.BLOCK_M)
    parts = config.head_parts
    heads, shared = problem.Hkv * parts, _shared_heads(problem) // parts
    units, packed = heads * _batches(problem), {}
    if problem.structure.ragged_kv:  # each sequence may end within a tile
        num_tiles = problem.kv_len // config.BLOCK_N + problem.B
        num_queries = problem.q_len // config.BLOCK_M + problem.B
        units, packed = heads, {"num_requests": problem.B, "group": shared}
    at_once = min(num_tiles, DETERMINISTIC_AT_ONCE) if config.deterministic else num_tiles
    section = max(1, BLOCKS_AT_ONCE * config.waves // at_once)
    if packed:
        row = 8 * multiplied_columns(problem.structure.head_dim_qk)
        fits = section == 1 or section * problem.q_len * row <= SECTION_BYTES
        packed["short_last"] = int(fits)
    return {
        "num_heads": heads,
        "num_tiles": num_tiles,
        "num_queries": num_queries,
        "kv_units": units,
        "section_heads": section,
        "shared_heads": shared,
        **packed,
    }


def trims_runs(structure: Structure, config: HopperBackwardConfig) -> bool:
    """True if the ends of a mask's runs are trimmed before: in order, all listed blocks count."""
    return config.trimmed and not config.deterministic and walks_runs(structure, config)


def _batches(problem: Problem) -> int:
    return 1 if problem.broadcast_kv else problem.B


def _shared_heads(problem: Problem) -> int:
    return problem.Hq // problem.Hkv * (problem.B // max(1, _batches(problem)))
