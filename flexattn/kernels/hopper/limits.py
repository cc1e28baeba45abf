"""Limits of Hopper's prefill: what its tiles take of shared memory and registers, and rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import floor

from flexattn.device import Device
from flexattn.kernels.base import features
from flexattn.kernels.base.limits import (
    KEYS_OF_BLOCK,
    NUM_STAGES,
    SHARED_MEMORY,
    TMA_LAYOUT,
    Limits,
    Rule,
)
from flexattn.kernels.base.ragged import form_of
from flexattn.kernels.hopper import ragged
from flexattn.kernels.hopper.config import (
    BOX,
    CONSUMER_ROWS,
    HOPPER_ORDERS,
    STARTED_WITH_TWO,
    TILE_SCHEDULERS,
    WIDEST,
    HopperPrefillConfig,
    copied_columns,
    multiplied,
    padded_columns,
    whole_boxes,
)
from flexattn.problem import ITEMSIZE, Structure

# Head dimensions that tiles of a power of two were made for, and measured.
QK_DIMS, V_DIMS = (64, 96, 128, 192, 256), (64, 96, 128, 256)
# The narrowest V that leaves through parts of Q, and the widest heads in parts.
LEAST_V, PARTS_END = 128, 576
# Bytes of an element of the output, and of V as the kernel reads it.
ITEMSIZE_OUT = 2

# Bytes: the barriers, and what the compiler keeps for starting the warps.
SHARED_SLACK = 1024
# Registers of an SM for one thread of every warpgroup.
SM_THREAD_REGISTERS = 512
LEAST_REGISTERS, MOST_REGISTERS = 24, 240
# Of the 16 of a block, less the one at which all warps meet and one that the compiler may take.
# The rule counts the one at which each consumer meets its own.
NAMED_BARRIERS = 14

# Registers of a consumer's thread beside scores, accumulator and weights. Addresses, loop state
# and row statistics:
REGISTER_SLACK = 28
# what a score_mod holds, or a soft cap, or numbers of documents, of keys of few tiles; what is
# read by key or diagonal, beside parts of Q or not, and beside lists, which cost more than runs;
# and beside a value for each score:
SCORE_REGISTERS, CAP_REGISTERS, NUMBER_REGISTERS = 8, 4, 4
WIDE_GATHER_REGISTERS, GATHER_REGISTERS, LISTS_REGISTERS, GATHER_SLACK = 16, 40, 16, 8
# parts of 64 columns; lazy_rescale beside those or a held Q; the main loop beside both, to stay:
PARTS_REGISTERS, LAZY_REGISTERS, MAINLOOP_REGISTERS = 16, 8, 8
# Of 16 columns of Q in registers: four hold them, one of which gives way to the slack.
HELD_OF_16_COLUMNS = 3


@dataclass(eq=False)
class ConfigCase:
    """A config for a structure on a device.

    loads_keys, loads_tile: whether a mod reads a value for each key or diagonal, and for each
    score.
    """

    config: HopperPrefillConfig
    structure: Structure
    device: Device
    loads_keys: bool
    loads_tile: bool

    # Columns of a tile in shared memory, and of V those that are multiplied.

    @property
    def boxed(self) -> bool:
        """True if copies of Q, K and the output have 64 columns, of any head dimensions."""
        return self.config.v_box > 0

    @property
    def lacking(self) -> str:
        """The part of a plan that the template, or the config, does not have; "" of a call's."""
        form = form_of(self.structure)
        return "" if form is None else ragged.unserved(form, self.config)

    @cached_property
    def qk_padded(self) -> int:
        """Columns of Q and K, copied in parts of 64 where their width is no power of two."""
        dim = self.structure.head_dim_qk
        return whole_boxes(dim, BOX) if self.boxed else copied_columns(dim, self.structure.fp8)

    @cached_property
    def v_padded(self) -> int:
        """Columns of V: of one of the blocks that share them."""
        parts = 1 if self.boxed else self.config.v_parts
        return padded_columns(-(-self.structure.head_dim_v // parts))

    @property
    def out_padded(self) -> int:
        """Columns of the output."""
        return whole_boxes(self.structure.head_dim_v, BOX) if self.boxed else self.v_padded

    @property
    def v_columns(self) -> int:
        """Columns of V that are multiplied."""
        if self.boxed:
            return multiplied(self.structure.head_dim_v, self.config.v_box)
        return self.v_padded

    @cached_property
    def three(self) -> bool:
        """True if tiles of 192 columns are three parts of 64, each at an address of its own."""
        return not self.boxed and self.qk_padded == 192

    @property
    def wide(self) -> bool:
        """True if Q and K are in parts, above 256 columns."""
        return self.qk_padded > WIDEST

    # Shared memory, in bytes: Q, the stages of K and V, the output where it does not leave through
    # Q's place, and the barriers.

    @property
    def q_tile(self) -> int:
        """A tile of Q."""
        return self.config.all_rows * self.qk_padded * self.structure.itemsize

    @cached_property
    def loaded(self) -> int:
        """All but the output: Q, K, V, and what a mod exchanges for keys or diagonals, at most two
        words for each.
        """
        c = self.config
        keys = c.num_stages * c.BLOCK_N * self.qk_padded * self.structure.itemsize
        itemsize = ITEMSIZE[self.structure.value_dtype]
        values = c.num_stages * c.BLOCK_N * self.v_padded * itemsize
        exchanged = 8 * c.consumers * max(c.BLOCK_N, CONSUMER_ROWS) if self.loads_keys else 0
        narrow = ragged.narrow_bytes(self.structure, c)
        return self.q_tile + keys + values + narrow + exchanged + SHARED_SLACK

    @property
    def halved(self) -> bool:
        """True if an output of 256 columns leaves a block that stays in two halves."""
        return self.config.persistent and not self.boxed and self.qk_padded == self.v_padded == 256

    @cached_property
    def output(self) -> int:
        """The output's tile."""
        rows = self.config.all_rows // (2 if self.halved else 1)
        return ITEMSIZE_OUT * rows * self.out_padded

    @property
    def through_q(self) -> bool:
        """True if the output can leave through Q's place: through one or two parts of it, through
        all of it, or through boxes.
        """
        if self.structure.itemsize != ITEMSIZE_OUT:
            return False
        if self.wide:
            return True
        if self.boxed:
            return self.out_padded <= self.qk_padded
        if self.three:
            return self.v_padded <= 128
        return self.qk_padded == self.v_padded and not self.halved

    @cached_property
    def own_output(self) -> bool:
        """True if the output has tiles of its own.

        A block that stays loads its next Q while an output leaves, if there is room.
        """
        in_two_parts = self.wide or (self.three and self.v_padded == 128)
        room = self.loaded + self.output <= self.device.shared_memory
        return not self.through_q or (self.config.persistent and not in_two_parts and room)

    @cached_property
    def q_slots(self) -> int:
        """Tiles of Q: a block that stays loads the next while this one is multiplied, if there is
        room for both.
        """
        room = self.loaded + self.output + self.q_tile <= self.device.shared_memory
        return 2 if self.own_output and self.config.persistent and room else 1

    @cached_property
    def shared_memory(self) -> int:
        """Bytes of shared memory."""
        output = self.output if self.own_output else 0
        return self.loaded + output + (self.q_slots - 1) * self.q_tile

    # Registers of a consumer's thread: accumulator and scores in fp32, P, and what mods hold.
    # Loops of what passes do not spill.

    @property
    def gathered(self) -> int:
        """Registers for values that mods read, fitted to compiled kernels."""
        if self.loads_tile:
            return self.config.BLOCK_N // 2 + GATHER_SLACK
        if not self.loads_keys:
            return 0
        if self.wide:
            return WIDE_GATHER_REGISTERS
        if not self.config.q_in_regs and features.compares_numbers(self.structure):
            return NUMBER_REGISTERS
        lists = LISTS_REGISTERS if (s := self.structure.sparsity) and not s.runs else 0
        return GATHER_REGISTERS + max(0, self.qk_padded - self.v_padded) // 4 + lists

    @cached_property
    def registers(self) -> int:
        """Registers of a consumer's thread."""
        c = self.config
        accumulator, scores = self.v_columns / 2, c.BLOCK_N / 2
        held = c.q_in_regs > 0
        beside = HELD_OF_16_COLUMNS * c.q_in_regs // 16
        beside += PARTS_REGISTERS if self.three else 0
        beside += LAZY_REGISTERS if c.lazy_rescale and (self.three or held) else 0
        lazy_loop = c.lazy_rescale and held and self.config.persistent
        beside += MAINLOOP_REGISTERS if lazy_loop else 0
        if (terms := self.structure.terms) is not None:
            beside += CAP_REGISTERS if terms.capped else SCORE_REGISTERS
        # P in 16 bits, or in 8.
        weights = scores / (4 if self.structure.e4m3_weights else 2)
        tiles = floor(scores + accumulator + weights)
        return tiles + beside + self.gathered + REGISTER_SLACK


def case_of(config: HopperPrefillConfig, structure: Structure, device: Device) -> ConfigCase:
    """A config for a structure on a device."""
    unit = CONSUMER_ROWS, config.BLOCK_N
    structure = features.without_blocks(structure, unit)
    by_key = features.loads_by_key(structure, unit) or features.loads_diagonals(structure)
    return ConfigCase(config, structure, device, by_key, features.loads_tiles(structure, unit))


def _known_dim(c: ConfigCase, dim: int, among: tuple[int, ...]) -> bool:
    """True if tiles are made for a head dimension, or boxes or parts of any."""
    if c.structure.fp8:
        return 16 <= dim <= WIDEST and dim % 16 == 0
    in_parts = (
        c.structure.head_dim_qk > WIDEST
        and c.structure.itemsize == 2
        and LEAST_V <= dim <= PARTS_END
        and dim % BOX == 0
    )
    return c.boxed or dim in among or in_parts


def _in_boxes(name: str) -> Rule[ConfigCase]:
    def holds(c: ConfigCase) -> bool:
        dim = getattr(c.structure, name)
        return not c.boxed or (16 <= dim <= WIDEST and dim % 8 == 0)

    says = f"head dimension {{c.structure.{name}}} is no multiple of 8 from 16 to 256"
    return Rule("head dimension", says, holds)


def _holds_q(c: ConfigCase) -> bool:
    """True if so many columns of Q can be in registers.

    Parts of Q are cut where a tile's width is a power of two, at whole rows of its swizzle. The
    pass that narrows products of V tells them by an operand in registers, and by their width.
    """
    held = c.config.q_in_regs
    if held == 0:
        return True
    if c.boxed:
        within = held % 32 == 0 and held <= c.structure.head_dim_qk
        return within and c.v_padded != c.config.BLOCK_N
    if c.qk_padded == 192 or c.wide:
        return False
    return held == c.qk_padded or (held >= 64 and 2 * held == c.qk_padded)


def _divides_block(c: ConfigCase) -> bool:
    """True if no tile has rows of two blocks; along runs each consumer may have its own block."""
    sparsity = c.structure.sparsity
    if sparsity is None or (sparsity.runs and sparsity.q_block % CONSUMER_ROWS == 0):
        return True
    return sparsity.q_block % c.config.BLOCK_M == 0


_OTHERS = (
    "multiples of 8 from 16 to 256 are in 16 bits, of 16 in fp8, and of 64 from 320 to 576 with V "
    "of 128 and more in 16"
)

LIMITS: Limits[ConfigCase] = Limits(
    case_of,
    shape=(
        Rule(
            "consumers",
            "consumers={c.config.consumers} is not between 1 and 3",
            lambda c: 1 <= c.config.consumers <= 3,
        ),
        Rule(
            "power of two",
            "BLOCK_N={c.config.BLOCK_N} is not a power of two from 16 to 256",
            lambda c: 16 <= c.config.BLOCK_N <= 256 and 256 % c.config.BLOCK_N == 0,
        ),
        NUM_STAGES,
        Rule(
            "register split",
            "consumer_regs={c.config.consumer_regs} is no multiple of 8 from 24 to 240 that leaves"
            " {c.config.producer_regs} of 512 for the producer warps of {c.config.consumers} "
            "consumers",
            lambda c: (
                LEAST_REGISTERS <= c.config.consumer_regs <= MOST_REGISTERS
                and c.config.consumer_regs % 8 == 0
                and c.config.consumers * c.config.consumer_regs + c.config.producer_regs
                <= SM_THREAD_REGISTERS
            ),
        ),
        # Each thread starts with as many, a multiple of 8: for what the producer warps do not give
        # consumers wait for ever.
        Rule(
            "register split",
            "consumer_regs={c.config.consumer_regs}: two consumers and {c.config.producer_regs} of"
            " the producer warps are more than the 504 that a block starts with",
            lambda c: (
                c.config.consumers != 2
                or 2 * c.config.consumer_regs + c.config.producer_regs <= STARTED_WITH_TWO
            ),
        ),
        Rule(
            "ping pong",
            "ping_pong: it needs two consumers or more",
            lambda c: not c.config.ping_pong or c.config.consumers >= 2,
        ),
        Rule(
            "barriers",
            "barriers: a block has 16, {c.config.num_stages} stages of {c.config.consumers} "
            "consumers need more",
            lambda c: (
                c.config.num_stages * (1 + c.config.k_parts)
                + 2
                + ragged.NARROW_HALVES * ragged.widens(c.structure)
                + c.config.consumers * (2 if c.config.ping_pong else 1)
                <= NAMED_BARRIERS
            ),
        ),
        Rule(
            "v_box",
            "v_box={c.config.v_box} is not one of 0, 16, 32, 64",
            lambda c: c.config.v_box in (0, 16, 32, 64),
        ),
        Rule(
            "order",
            "the order, the tile_scheduler or the l2_swizzle of {config} is none of those "
            "there are",
            lambda c: (
                c.config.order in HOPPER_ORDERS
                and c.config.tile_scheduler in TILE_SCHEDULERS
                and c.config.l2_swizzle >= 1
            ),
        ),
    ),
    fit=(
        Rule(
            "arch",
            "{c.device.arch} has no wgmma: the Gluon template is Hopper's",
            lambda c: c.device.has_wgmma,
        ),
        Rule(
            "prefill", "the Gluon template is for prefill", lambda c: c.structure.kind != "decode"
        ),
        Rule(
            "dtype",
            "the Gluon template multiplies float16, bfloat16 and float8_e4m3fn",
            lambda c: c.structure.itemsize <= 2,
        ),
        # What the copy engine brings is multiplied where it lies.
        Rule(
            "dtype",
            "the Gluon template takes k and v in the dtype of q",
            lambda c: c.structure.dtype_of("k") == c.structure.dtype or ragged.widens(c.structure),
        ),
        Rule(
            "serving",
            "the Gluon template of a plan does not have {c.lacking}",
            lambda c: c.lacking == "",
        ),
        # What nobody has run in eight bits: Q in parts, or in registers.
        Rule(
            "fp8",
            "in fp8 head dimensions are the same for q, k and v, and q_in_regs is 0",
            lambda c: (
                not c.structure.fp8
                or (c.structure.head_dim_qk == c.structure.head_dim_v and not c.config.q_in_regs)
            ),
        ),
        Rule(
            "fp8",
            "weights of e4m3 are of inputs of e4m3, without dropout, in tiles of at least 32 keys",
            lambda c: (
                not c.structure.e4m3_weights
                or (
                    c.structure.itemsize == 1
                    and not c.structure.dropout
                    and c.config.BLOCK_N >= 32
                )
            ),
        ),
        Rule(
            "head dimension",
            "head dimension {c.structure.head_dim_qk} is not one of 64, 96, 128, 192, 256; "
            + _OTHERS,
            lambda c: _known_dim(c, c.structure.head_dim_qk, QK_DIMS),
        ),
        Rule(
            "head dimension",
            "head dimension {c.structure.head_dim_v} is not one of 64, 96, 128, 256; " + _OTHERS,
            lambda c: _known_dim(c, c.structure.head_dim_v, V_DIMS),
        ),
        # The output leaves through Q's parts, of which a narrower one is none.
        Rule(
            "head dimension",
            "head dimension {c.structure.head_dim_v} of V is below 128 beside "
            "{c.structure.head_dim_qk} of Q and K",
            lambda c: c.structure.head_dim_qk <= WIDEST or c.v_padded >= LEAST_V,
        ),
        Rule(
            "v_parts",
            "v_parts={c.config.v_parts}: it is 2 above 256 columns of V, and 1 up to them",
            lambda c: (
                c.config.v_parts == 1
                if c.structure.head_dim_v <= WIDEST
                else c.config.v_parts == 2 and c.structure.head_dim_qk > WIDEST
            ),
        ),
        Rule(
            "k_parts",
            "k_parts={c.config.k_parts} is not 1, nor do as many whole 64 columns make "
            "{c.structure.head_dim_qk} of K",
            lambda c: (
                c.config.k_parts == 1
                or (
                    c.config.k_parts > 1
                    and c.structure.head_dim_qk > WIDEST
                    and c.structure.head_dim_qk % (BOX * c.config.k_parts) == 0
                )
            ),
        ),
        *map(_in_boxes, ("head_dim_qk", "head_dim_v")),
        Rule(
            "v_box",
            "v_box={c.config.v_box}: any head dimensions are served in 16 bits alone",
            lambda c: not c.boxed or c.structure.itemsize == 2 or ragged.widens(c.structure),
        ),
        TMA_LAYOUT,
        Rule(
            "q_in_regs",
            "q_in_regs={c.config.q_in_regs} is not 0, all {c.qk_padded} columns of Q, or half of "
            "them; with a v_box no multiple of 32 of them, or products of scores are as wide as "
            "those of values",
            _holds_q,
        ),
        Rule(
            "mask block",
            "a tile of {c.config.consumers} times 64 rows, of {c.config.heads} heads, does not "
            "divide the mask's block of {c.structure.sparsity.q_block}",
            _divides_block,
        ),
        KEYS_OF_BLOCK,
        # That they share a KV head too is a matter of a problem's heads: the grid asks.
        Rule(
            "pack_gqa",
            "pack_gqa: the {c.config.heads} heads of a tile have lists of blocks of their own",
            lambda c: (
                c.config.heads == 1
                or c.structure.sparsity is None
                or not c.structure.sparsity.per_head
            ),
        ),
        SHARED_MEMORY,
        Rule(
            "registers",
            "registers: about {c.registers} a thread, a consumer has {c.config.consumer_regs}",
            lambda c: c.registers <= c.config.consumer_regs,
        ),
    ),
    worth=(
        # Nothing is loaded while the one tile of keys is in use.
        Rule(
            "no overlap",
            "no overlap: {c.config.num_stages} stage of K and V",
            lambda c: c.config.num_stages >= 2 or c.config.k_parts > 1,
        ),
    ),
)
