"""Feasibility of the Gluon template, Hopper's prefill.

Printed of stated/gluon.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class RuleCase:
    """The numbers of one case."""

    consumers: int
    BLOCK_N: int
    num_stages: int
    consumer_regs: int
    producer_regs: int
    ping_pong: bool
    persistent: bool
    known_words: bool
    l2_swizzle: int
    q_in_regs: int
    lazy_rescale: bool
    v_itemsize: int
    heads: int
    v_box: int
    v_parts: int
    k_parts: int
    itemsize: int
    qk_dim: int
    v_dim: int
    qk_padded: int
    v_padded: int
    out_padded: int
    v_columns: int
    mask_rows: int
    mask_keys: int
    runs: bool
    decodes: bool
    scored: bool
    loads_keys: bool
    loads_tile: bool
    dense_layout: bool
    lists_differ: bool
    mixed: bool
    shared_limit: int
    has_wgmma: bool
    # Known where the rules of the shape hold.
    shared_memory: int = 0
    own_output: bool = False
    q_slots: int = 0
    registers: int = 0


def shared_memory(c: RuleCase) -> tuple[int, bool, int]:
    """Bytes of shared memory; whether the output has tiles of its own; tiles of Q.

    In bytes: Q, the stages of K and V, the output where it does not leave through Q's place, the
    barriers.
    """
    q_tile = 64 * c.consumers * c.itemsize * c.qk_padded
    keys = c.BLOCK_N * c.itemsize * c.num_stages * c.qk_padded
    values = c.BLOCK_N * c.num_stages * c.v_itemsize * c.v_padded
    # What a mod reads for keys or diagonals, at most two words for each, is exchanged there.
    exchanged = 8 * c.consumers * max(c.BLOCK_N, 64) if c.loads_keys else 0
    loaded = exchanged + keys + q_tile + values + 1024
    # Of any head dimensions, copies of Q, K and the output have 64 columns.
    boxed = c.v_box > 0
    # An output of 256 columns leaves a persistent block in two halves.
    halved = c.persistent and not boxed and c.qk_padded == 256 and c.v_padded == 256
    out_rows = 32 * c.consumers if halved else 64 * c.consumers
    output = 2 * c.out_padded * out_rows
    # Tiles of 192 columns are three parts of 64, each at an address of its own.
    three = not boxed and c.qk_padded == 192
    # Above 256 columns Q and K are in parts.
    wide = c.qk_padded > 256
    # An output takes one or two of them.
    in_parts = wide or (three and c.v_padded <= 128)
    in_whole = not halved and c.qk_padded == c.v_padded and not (boxed or three)
    in_boxes = boxed and c.out_padded <= c.qk_padded
    through_q = c.itemsize == 2 and (in_boxes or in_parts or in_whole)
    two_parts = wide or (three and c.v_padded == 128)
    # A persistent block loads its next Q while an output leaves, if there is room.
    early = c.persistent and not two_parts and loaded + output <= c.shared_limit
    own = early or not through_q
    needed = loaded + output if own else loaded
    # It loads it while this one is multiplied, if there is room for both.
    slots = 2 if own and c.persistent and c.shared_limit >= needed + q_tile else 1
    return needed + q_tile * (slots - 1), own, slots


def registers(c: RuleCase) -> int:
    """Registers of a consumer's thread.

    Accumulator and scores in fp32, P, and what mods hold; loops of what passes do not spill.
    """
    # Of any head dimensions, copies of Q, K and the output have 64 columns.
    boxed = c.v_box > 0
    # Tiles of 192 columns are three parts of 64, each at an address of its own.
    three = not boxed and c.qk_padded == 192
    # Above 256 columns Q and K are in parts.
    wide = c.qk_padded > 256
    scores = c.BLOCK_N / 2
    accumulator = c.v_columns / 2
    # P in 16 bits. Weights of 8 take half the place, and the product that is added to the sum its
    # own.
    weights = accumulator + scores / 4 if c.v_itemsize == 1 else scores / 2
    # Lists of blocks cost more than runs, of mods that read.
    lists = 16 if not c.runs and c.mask_rows > 0 else 0
    # Mods that read are fitted to compiled kernels.
    if c.loads_tile:
        gathered = floor(scores) + 8
    elif c.loads_keys and wide:
        gathered = 16
    elif c.loads_keys:
        gathered = lists + floor(max(c.qk_padded - c.v_padded, 0) / 4) + 40
    else:
        gathered = 0
    scored_registers = 8 if c.scored else 0
    parts = 16 if three else 0
    lazy = 8 if c.lazy_rescale and (three or c.q_in_regs > 0) else 0
    fp8_pv_loop = c.v_itemsize == 1 and c.mask_rows > 0
    lazy_loop = c.lazy_rescale and c.persistent and c.q_in_regs > 0
    mainloop = 8 if fp8_pv_loop or lazy_loop else 0
    beside = lazy + mainloop + parts + scored_registers + floor(3 * c.q_in_regs / 16)
    return beside + gathered + floor(accumulator + scores + weights) + 28


def estimate(c: RuleCase) -> None:
    """Write into a case what its config takes."""
    c.shared_memory, c.own_output, c.q_slots = shared_memory(c)
    c.registers = registers(c)


RULES: Rules[RuleCase] = Rules(
    shape=(
        Rule(
            "consumers",
            "consumers={consumers} is not between 1 and 3",
            lambda c: c.consumers >= 1 and c.consumers <= 3,
        ),
        Rule(
            "power of two",
            "BLOCK_N={BLOCK_N} is not a power of two from 16 to 256",
            lambda c: c.BLOCK_N >= 16 and c.BLOCK_N <= 256 and 256 % c.BLOCK_N == 0,
        ),
        Rule(
            "stages",
            "num_stages={num_stages} is not between 1 and 8",
            lambda c: c.num_stages >= 1 and c.num_stages <= 8,
        ),
        Rule(
            "register split",
            "consumer_regs={consumer_regs} is no multiple of 8 from 24 to 240 that leaves "
            "{producer_regs} of 512 for the producer warps of {consumers} consumers",
            lambda c: (
                c.consumer_regs >= 24
                and c.consumer_regs <= 240
                and c.consumer_regs * c.consumers + c.producer_regs <= 512
                and c.consumer_regs % 8 == 0
            ),
        ),
        Rule(
            "register split",
            "consumer_regs={consumer_regs}: two consumers and {producer_regs} of the producer "
            "warps are more than the 504 that a block starts with",
            lambda c: c.consumers != 2 or 2 * c.consumer_regs + c.producer_regs <= 504,
        ),
        Rule(
            "ping pong",
            "ping_pong: it needs two consumers or more",
            lambda c: not c.ping_pong or c.consumers >= 2,
        ),
        Rule(
            "barriers",
            "barriers: a block has 16, {num_stages} stages of {consumers} consumers need more",
            lambda c: (
                c.consumers * (2 if c.ping_pong else 1) + c.num_stages * (c.k_parts + 1) + 2 <= 14
            ),
        ),
        Rule(
            "v_box",
            "v_box={v_box} is not one of 0, 16, 32, 64",
            lambda c: c.v_box in (0, 16, 32, 64),
        ),
        Rule(
            "order",
            "the order, the tile_scheduler or the l2_swizzle of {config} is none of those there "
            "are",
            lambda c: c.known_words and c.l2_swizzle >= 1,
        ),
    ),
    fit=(
        Rule("arch", "{arch} has no wgmma: the Gluon template is Hopper's", lambda c: c.has_wgmma),
        Rule("prefill", "the Gluon template is for prefill", lambda c: not c.decodes),
        Rule(
            "dtype",
            "the Gluon template multiplies float16, bfloat16 and float8_e4m3fn",
            lambda c: c.itemsize <= 2,
        ),
        Rule("dtype", "the Gluon template takes k and v in the dtype of q", lambda c: not c.mixed),
        Rule(
            "fp8",
            "in fp8 head dimensions are one of 64, 96, 128, 256, the same for q, k and v, and "
            "q_in_regs is 0",
            lambda c: (
                c.itemsize > 1 or (c.q_in_regs == 0 and c.qk_dim == c.v_dim and c.qk_dim != 192)
            ),
        ),
        Rule(
            "fp8_pv",
            "fp8_pv: V and weights of 8 bits are of fp8, in tiles of at least 32 keys",
            lambda c: c.v_itemsize != 1 or (c.itemsize == 1 and c.BLOCK_N >= 32),
        ),
        Rule(
            "head dimension",
            "head dimension {qk_dim} is not one of 64, 96, 128, 192, 256; multiples of 8 from 16"
            " to 256 are in 16 bits, and of 64 from 320 to 576 with V of 128 and more",
            lambda c: (
                c.qk_dim == 64
                or c.qk_dim == 96
                or c.qk_dim == 128
                or c.qk_dim == 192
                or c.qk_dim == 256
                or c.v_box > 0
                or (
                    c.itemsize == 2
                    and c.qk_dim >= 128
                    and c.qk_dim <= 576
                    and c.qk_dim > 256
                    and c.qk_dim % 64 == 0
                )
            ),
        ),
        Rule(
            "head dimension",
            "head dimension {v_dim} is not one of 64, 96, 128, 256; multiples of 8 from 16 to "
            "256 are in 16 bits, and of 64 from 320 to 576 with V of 128 and more",
            lambda c: (
                c.v_dim == 64
                or c.v_dim == 96
                or c.v_dim == 128
                or c.v_dim == 256
                or c.v_box > 0
                or (
                    c.itemsize == 2
                    and c.v_dim >= 128
                    and c.v_dim <= 576
                    and c.qk_dim > 256
                    and c.v_dim % 64 == 0
                )
            ),
        ),
        Rule(
            "head dimension",
            "head dimension {v_dim} of V is below 128 beside {qk_dim} of Q and K",
            lambda c: c.v_padded >= 128 or c.qk_dim <= 256,
        ),
        Rule(
            "v_parts",
            "v_parts={v_parts}: it is 2 above 256 columns of V, and 1 up to them",
            lambda c: (
                (c.v_parts == 1 and c.v_dim <= 256)
                or (c.v_parts == 2 and c.qk_dim > 256 and c.v_dim > 256)
            ),
        ),
        Rule(
            "k_parts",
            "k_parts={k_parts} is not 1, nor do as many whole 64 columns make {qk_dim} of K",
            lambda c: (
                c.k_parts == 1
                or (c.k_parts > 1 and c.qk_dim > 256 and c.qk_dim % (64 * c.k_parts) == 0)
            ),
        ),
        Rule(
            "head dimension",
            "head dimension {qk_dim} is no multiple of 8 from 16 to 256",
            lambda c: c.v_box == 0 or (c.qk_dim >= 16 and c.qk_dim <= 256 and c.qk_dim % 8 == 0),
        ),
        Rule(
            "head dimension",
            "head dimension {v_dim} is no multiple of 8 from 16 to 256",
            lambda c: c.v_box == 0 or (c.v_dim >= 16 and c.v_dim <= 256 and c.v_dim % 8 == 0),
        ),
        Rule(
            "v_box",
            "v_box={v_box}: any head dimensions are served in 16 bits alone",
            lambda c: c.itemsize == 2 or c.v_box == 0,
        ),
        Rule(
            "tma",
            "q, k, v must have inner stride 1, the rest multiples of 16 bytes",
            lambda c: c.dense_layout,
        ),
        Rule(
            "q_in_regs",
            "q_in_regs={q_in_regs} is not 0, all {qk_padded} columns of Q, or half of them; with"
            " a v_box no multiple of 32 of them, or products of scores are as wide as those of "
            "values",
            lambda c: (
                c.q_in_regs == 0
                or (
                    not (c.qk_padded == 192 or c.qk_padded > 256 or c.v_box > 0)
                    and (
                        c.q_in_regs == c.qk_padded
                        or (c.q_in_regs >= 64 and 2 * c.q_in_regs == c.qk_padded)
                    )
                )
                or (
                    c.q_in_regs <= c.qk_dim
                    and c.v_box > 0
                    and c.v_padded != c.BLOCK_N
                    and c.q_in_regs % 32 == 0
                )
            ),
        ),
        Rule(
            "mask block",
            "a tile of {consumers} times 64 rows, of {heads} heads, does not divide the mask's "
            "block of {mask_rows}",
            lambda c: (
                c.mask_rows == 0
                or (c.runs and c.mask_rows % 64 == 0)
                or c.mask_rows % (64 * c.consumers / c.heads) == 0
            ),
        ),
        Rule(
            "mask block",
            "BLOCK_N={BLOCK_N} does not divide the mask's block of {mask_keys}",
            lambda c: c.mask_keys == 0 or c.mask_keys % c.BLOCK_N == 0,
        ),
        Rule(
            "pack_gqa",
            "pack_gqa: the {heads} heads of a tile have lists of blocks of their own",
            lambda c: not c.lists_differ or c.heads == 1,
        ),
        Rule(
            "shared memory",
            "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
            lambda c: c.shared_memory <= c.shared_limit,
        ),
        Rule(
            "registers",
            "registers: about {registers} a thread, a consumer has {consumer_regs}",
            lambda c: c.registers <= c.consumer_regs,
        ),
    ),
    worth=(
        Rule(
            "no overlap",
            "no overlap: {num_stages} stage of K and V",
            lambda c: c.num_stages >= 2 or c.k_parts > 1,
        ),
    ),
)
