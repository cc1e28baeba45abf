"""ServingConfig: one variant of a serving template, its memory, and how its parts are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from flexattn.device import Device
from flexattn.errors import InputTypeError
from flexattn.kernels.base.config import Language, padded
from flexattn.kernels.base.sizes import L2_BYTES
from flexattn.problem.serving import SERVING_ITEMSIZE, ServingForm, ServingProblem

# Values that a warp holds of a merge at a time: 64 registers of each thread.
MERGED = 2048
# Of the kernel that merges.
COMBINE_WARPS = 4


Combine: TypeAlias = Literal["last", "launch", "dependent", "await"]
SplitPolicy: TypeAlias = Literal["even", "whole", "heads", "round"]
# Rows of a tile that a matrix instruction multiplies at least, where warps share it.
TILE_ROWS = 16
# The short side of the matrix instruction.
SHORT_ROWS = 8
# Places of a choice that 128 threads hold beside their part of a tile: of 4,096 they spill.
MOST_SIFTED = 2048
# Bytes of a line of the L2 cache.
LINE = 128


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """BLOCK_M packed rows loop over the keys, BLOCK_N at a time.

    BLOCK_M: query rows of a tile: the query heads of a KV head x query positions.
    BLOCK_N: keys of a tile.
    num_warps, num_stages: warps of a program, and tiles of K and V that are loaded ahead.
    per_sm: programs for each SM; default 2. The grid is as many, whatever the batch.
    least: tiles that a program takes at least; default 1. More leave fewer parts to merge.
    split_policy: how tiles are shared out over the programs (split-KV), and with that which of
    the kernels runs; default "even": all of the batch in equal shares, and the warps of a
    program share each tile (paged_decode/program.py.jinja). "whole": the same, but shares that
    hold nearly all tiles of the longest request hold all of them (paged_decode/mla.py.jinja, or
    of K and V apart, of tiles of 64 rows and 64 keys, paged_decode/warp_specialized.py.jinja).
    With the others each warp has keys of a tile for itself (paged_decode/warp.py.jinja): "heads",
    the tiles of each KV head in equal shares over programs of its own, so that programs of all
    heads read the same pages at a time; "round", those of one request go round the programs,
    which then need not know its length.
    combine: who merges the parts of a row that several programs worked on. With "even": "last",
    the default, the program that finishes last; "launch", a second kernel (of a cascade's
    prefix: the one that ends it); or "dependent", a second kernel that begins while the first one
    runs (programmatic dependent launch). With "whole": "launch", which is such a one. With the
    others "await": the program that has the tile's end waits for the words of those before it.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    per_sm: int = 2
    least: int = 1
    combine: Combine = "last"
    split_policy: SplitPolicy = "even"

    @property
    def language(self) -> Language:
        """The language of its template."""
        return "gluon" if self.by_tma or self.warp_private else "triton"

    @property
    def heads(self) -> int:
        """A tile's rows are those of all query heads of a KV head."""
        return 1

    @property
    def warp_private(self) -> bool:
        """True if each warp has keys of a tile for itself; else a program's warps share it."""
        return self.split_policy not in ("even", "whole")

    @property
    def by_tma(self) -> bool:
        """True if a warp loads keys by TMA for warpgroups that multiply them."""
        return self.split_policy == "whole"

    def boxed(self, form: ServingForm) -> bool:
        """True if K and V are copied in boxes, by TMA."""
        return self.by_tma and not self.gathers(form)

    @property
    def warp_specialized(self) -> bool:
        """True if a TMA kernel loads values apart from keys."""
        return self.by_tma and self.BLOCK_M == self.BLOCK_N == 64

    @property
    def for_mla(self) -> bool:
        """True if a TMA kernel uses keys as values too."""
        return self.by_tma and not self.warp_specialized

    def gathers(self, form: ServingForm) -> bool:
        """True if chosen keys are gathered one by one: of requests of equally many rows."""
        return self.for_mla and form.unit > 0 and not form.ragged

    def sifts(self, form: ServingForm) -> bool:
        """True if who gathers chosen keys leaves out those that stand twice: single ones."""
        return self.gathers(form) and form.unit == 1 and form.chosen <= MOST_SIFTED

    def short_parts(self, form: ServingForm) -> bool:
        """True if partial outputs are float16: in tiles of 64 rows, over caches of 8 bits.

        These are means of unscaled values of 8 bits, of which the largest is 57344.
        """
        return self.gathers(form) and form.kv_itemsize == 1 and not self.swap_ab

    @property
    def swap_ab(self) -> bool:
        """True if keys are the rows of both MLA products, and few packed rows their columns."""
        return self.for_mla and self.BLOCK_M < 64

    @property
    def merges_apart(self) -> bool:
        """True if a second kernel merges parts."""
        return self.combine in ("launch", "dependent")

    @property
    def dependent(self) -> bool:
        """True if the second kernel begins while the first one runs."""
        return self.by_tma or self.combine == "dependent"

    @property
    def template(self) -> str:
        """The name of the template that serves the config."""
        if self.warp_specialized:
            return "warp_specialized"
        if self.swap_ab:
            return "mla_swap_ab"
        return "mla" if self.for_mla else "warp" if self.warp_private else "program"

    @property
    def keys_per_warp(self) -> int:
        """Keys of a tile that each warp has for itself."""
        return self.BLOCK_N // self.num_warps

    @property
    def left(self) -> int:
        """Partial results that a program may leave: one where it merges its last itself."""
        return 1 if self.combine == "await" else 2

    def programs(self, device: Device) -> int:
        """Programs of a launch on a device."""
        return self.per_sm * device.num_sms

    def registers(self, form: ServingForm, device: Device) -> int:
        """The most registers of a thread with which an SM holds its programs; 0: no bound.

        Short tiles are told so also where they may have all there are: ptxas else computes again
        in each turn of the loop what does not change, 438 instructions instead of 367. Tall ones
        have no registers to keep it in.
        """
        if device.backend != "cuda":
            return 0
        held = max(1, min(self.per_sm, device.shared_memory // serving_shared_memory(self, form)))
        found = device.registers // (held * 32 * self.num_warps) // 8 * 8
        if found > device.max_registers and self.BLOCK_M >= 64:
            return 0
        return max(64, min(found, device.max_registers))


def fits_l2(problem: ServingProblem) -> bool:
    """True if a batch's keys, as often as tiles of 16 rows read them, fit the L2 cache.

    Of rows that cu_seqlens_q cuts nobody knows.
    """
    form, q_rows = problem.structure, problem.rows if problem.structure.prefix else problem.q_len
    columns = form.head_dim_qk + (0 if form.shared_kv else form.head_dim_v)
    each = columns * form.kv_itemsize * form.kv_heads
    keys = problem.B * problem.kv_len * -(-q_rows * form.group // TILE_ROWS)
    return not form.ragged and keys * each <= L2_BYTES


def check_config(config: object) -> None:
    """Raises InputTypeError if a plan's config is not a ServingConfig."""
    if not isinstance(config, ServingConfig):
        raise InputTypeError(
            f"config is {config!r:.80}",
            "it is a flexattn.serving.ServingConfig",
            "leave it out for the tuned record's, or the default",
        )


def least_tile(form: ServingForm) -> int:
    """Columns of the second of two tiles of a head's columns, at least.

    Tiles of 64 keys and 16 or 32 columns that were widened from 8 bits gave wrong numbers, or read
    out of bounds, on an H200 under Triton 3.6.
    """
    return 64 if form.kv_itemsize == 1 else 16


def tile_columns(form: ServingForm, head_dim: int) -> int:
    """Columns of the tiles of a head's columns."""
    return padded(head_dim, least_tile(form))


def serving_shared_memory(config: ServingConfig, form: ServingForm) -> int:
    """Bytes: the stages of K and V, and a query tile on its way to the matrix instruction."""
    if config.warp_private:
        return config.num_warps * config.BLOCK_M * (form.head_dim_v + 4) * 4
    if config.warp_specialized:
        queries = config.num_warps // 4 * config.BLOCK_M * form.head_dim_qk
        tiles = config.num_stages * config.BLOCK_N * (form.head_dim_qk + form.head_dim_v)
        return (queries + tiles) * form.kv_itemsize
    if config.swap_ab:
        columns = config.BLOCK_M * form.head_dim_qk + config.BLOCK_N * (
            config.num_stages * form.head_dim_v + 2 * (form.head_dim_qk - form.head_dim_v)
        )
        return columns * form.kv_itemsize
    if config.for_mla:
        numbers_of_rows = 4 * config.BLOCK_M * 4
        width = form.head_dim_qk * SERVING_ITEMSIZE[form.product_dtype]
        tiles = (config.BLOCK_M + config.BLOCK_N) * width
        return tiles + numbers_of_rows
    keys, values = (tile_columns(form, dim) for dim in (form.head_dim_qk, form.head_dim_v))
    width = keys + (0 if form.shared_kv else values)
    tiles = max(1, config.num_stages - 1) * config.BLOCK_N * width * form.kv_itemsize
    if form.kv_itemsize == 1:
        tiles += 2 * config.BLOCK_N * width
    return tiles + config.BLOCK_M * keys * form.itemsize


def workspace(
    form: ServingForm, config: ServingConfig, device: Device, part_slots: int = 0
) -> int:
    """Floats of the workspace: programs x 2 x BLOCK_M x (head_dim_v + 1), or half of them.

    A program's range of tiles begins inside at most one work tile and ends inside at most one
    other: two partial results, each of BLOCK_M rows of outputs and a log-sum-exp. If a tile
    ends in its range, it keeps its own result if it awaits those of the others. A batch-invariant
    one has two, and part_slots for its splits, of the rows that a work tile has.
    """
    if form.split_keys:
        rows = min(config.BLOCK_M, form.rows or config.BLOCK_M)
        return config.programs(device) * (2 + part_slots) * rows * (form.head_dim_v + 1)
    return config.programs(device) * config.left * config.BLOCK_M * (form.head_dim_v + 1)


# Of 8k keys and 8 KV heads 128 splits, one for each SM of a Hopper GPU; of short splits the parts
# are as many bytes as the keys, and of long ones few programs have any.
SPLIT_KEYS = 512
_WARPS = 4


def invariant_config(form: ServingForm) -> ServingConfig:
    """The config of a batch-invariant form; all but its rows and programs decides bits.

    Each warp has 16 keys of a tile, so that K, V and outputs of 16 rows fit its registers; of
    64 columns of 16 bits 32, for as many bytes under way, and of 256 columns 8, and 8 rows.
    """
    narrow = form.kv_itemsize * form.head_dim_v == 128 and form.kv_itemsize > 1
    height = SHORT_ROWS // form.chunks
    short = 0 < form.rows <= height
    keys, per_sm = (32, 3 if short else 2) if narrow else (16 // form.chunks, 2)
    height = height if short else 2 * height
    return ServingConfig(height, keys * _WARPS, _WARPS, 1, per_sm, 1, "await", "heads")


def part_slots(
    form: ServingForm, config: ServingConfig, device: Device, row_tiles: int, kv_len: int
) -> int:
    """Splits that a program may leave apart: of a work tile that holds all of its range.

    row_tiles: of all requests of the largest batch. 0 of a form that is not batch-invariant.
    """
    if not form.split_keys:
        return 0
    splits = -(-kv_len // form.split_keys)
    programs = config.programs(device) // form.kv_heads
    return min(splits, max(config.least, -(-row_tiles * splits // max(1, programs))))


# A part's columns that one program merges at least.
LEAST_COLUMNS = 128
# Programs of a launch for each SM at most. Where nobody left parts they end at once, and each wave
# of them is a wait for lengths.
_PROGRAMS_AN_SM = 4


class MergeShape(NamedTuple):
    """rows, columns: of a work tile that a program merges; parts: that it holds at a time.

    row_parts, column_parts: programs of a work tile. work_tiles: of the largest batch, each with
    programs of its own; 0 where each program that attends has them, for the work tile that it ends
    in: there may be more work tiles than programs. turns: how often a program merges rows.
    rehearsed: it goes through a turn that merges nothing before it waits for parts.
    """

    rows: int
    columns: int
    parts: int
    row_parts: int
    column_parts: int
    work_tiles: int = 0
    turns: int = 1
    rehearsed: bool = False

    def grid(self, programs: int) -> int:
        """Programs of the launch, where so many attend."""
        return (self.work_tiles or programs) * self.row_parts * self.column_parts


def merge_shape(form: ServingForm, config: ServingConfig, device: Device) -> MergeShape:
    """At most MERGED values of rows and parts a warp; few work tiles are cut small for all SMs."""
    width = 1 << (padded(form.head_dim_v) - 1).bit_length()
    held = MERGED * (COMBINE_WARPS if config.merges_apart else config.num_warps)
    if config.warp_specialized:
        held //= 2  # it begins with the registers that two warpgroups leave
    filled = min(config.BLOCK_M, form.rows or config.BLOCK_M)
    rows = min(filled, max(1, held // (4 * width)))
    work_tiles = form.requests * -(-form.rows // config.BLOCK_M) * form.kv_heads
    if not config.dependent or form.ragged or work_tiles > config.programs(device):
        parts = max(1, min(32, held // (rows * width)))
        return MergeShape(rows, width, parts, config.BLOCK_M // rows, 1)
    columns, least = width, LEAST_COLUMNS // (2 if config.swap_ab else 1)
    if form.head_dim_v != width:
        least = width  # tiles of two sizes have no equal parts
    while work_tiles * (filled // rows) * (width // columns) < device.num_sms:
        if rows > 1:
            rows //= 2
        elif columns > least:
            columns //= 2
        else:
            break
    if config.swap_ab and columns > least:
        held //= 2  # weights take registers where threads have whole rows
    elif config.short_parts(form):
        held *= 2
    parts = min(128 if config.swap_ab else 64, held // (rows * columns))
    row_parts, column_parts, turns = -(-filled // rows), width // columns, 1
    most = _PROGRAMS_AN_SM * device.num_sms
    while row_parts > 1 and work_tiles * row_parts * column_parts > most:
        row_parts, turns = -(-row_parts // 2), 2 * turns
    rehearsed = config.swap_ab and turns == 1
    return MergeShape(rows, columns, parts, row_parts, column_parts, work_tiles, turns, rehearsed)
