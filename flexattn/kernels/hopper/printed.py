"""Feasibility of the Gluon template, Hopper's prefill.

Printed of stated/gluon.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class Case:
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
    itemsize: int
    qk_dim: int
    v_dim: int
    qk_padded: int
    v_padded: int
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


def shared_memory(case: Case) -> tuple[int, bool, int]:
    """Bytes of shared memory; whether the output has tiles of its own; tiles of Q.

    In bytes: Q, the stages of K and V, the output where it does not leave through Q's place, the
    barriers.
    """
    q_tile = 64 * case.consumers * case.itemsize * case.qk_padded
    keys = case.BLOCK_N * case.itemsize * case.num_stages * case.qk_padded
    values = case.BLOCK_N * case.num_stages * case.v_itemsize * case.v_padded
    # What a mod reads for keys or diagonals, at most two words for each, is exchanged there.
    exchanged = 8 * case.consumers * max(case.BLOCK_N, 64) if case.loads_keys else 0
    loaded = exchanged + keys + q_tile + values + 1024
    # An output of 256 columns leaves a persistent block in two halves.
    halved = case.persistent and case.qk_padded == 256 and case.v_padded == 256
    out_rows = 32 * case.consumers if halved else 64 * case.consumers
    output = 2 * out_rows * case.v_padded
    # Tiles of 192 columns are three parts of 64, each at an address of its own.
    three = case.qk_padded == 192
    # An output takes one or two of them.
    in_parts = three and case.v_padded <= 128
    in_whole = not halved and not three and case.qk_padded == case.v_padded
    through_q = case.itemsize == 2 and (in_parts or in_whole)
    two_parts = three and case.v_padded == 128
    # A persistent block loads its next Q while an output leaves, if there is room.
    early = case.persistent and not two_parts and loaded + output <= case.shared_limit
    own = early or not through_q
    needed = loaded + output if own else loaded
    # It loads it while this one is multiplied, if there is room for both.
    slots = 2 if own and case.persistent and case.shared_limit >= needed + q_tile else 1
    return needed + q_tile * (slots - 1), own, slots


def registers(case: Case) -> int:
    """Registers of a consumer's thread.

    Accumulator and scores in fp32, P, and what mods hold; loops of what passes do not spill.
    """
    # Tiles of 192 columns are three parts of 64, each at an address of its own.
    three = case.qk_padded == 192
    scores = case.BLOCK_N / 2
    accumulator = case.v_padded / 2
    # P in 16 bits. Weights of 8 take half the place, and the product that is added to the sum its
    # own.
    weights = accumulator + scores / 4 if case.v_itemsize == 1 else scores / 2
    # Lists of blocks cost more than runs, of mods that read.
    lists = 16 if not case.runs and case.mask_rows > 0 else 0
    # Mods that read are fitted to compiled kernels.
    if case.loads_tile:
        gathered = floor(scores) + 8
    elif case.loads_keys:
        gathered = lists + floor(max(case.qk_padded - case.v_padded, 0) / 4) + 40
    else:
        gathered = 0
    scored_registers = 8 if case.scored else 0
    parts = 16 if three else 0
    lazy = 8 if case.lazy_rescale and (three or case.q_in_regs > 0) else 0
    fp8_pv_loop = case.v_itemsize == 1 and case.mask_rows > 0
    lazy_loop = case.lazy_rescale and case.persistent and case.q_in_regs > 0
    mainloop = 8 if fp8_pv_loop or lazy_loop else 0
    beside = lazy + mainloop + parts + scored_registers + floor(3 * case.q_in_regs / 16)
    return beside + gathered + floor(accumulator + scores + weights) + 28


def estimate(case: Case) -> None:
    """Write into a case what its config takes."""
    case.shared_memory, case.own_output, case.q_slots = shared_memory(case)
    case.registers = registers(case)


RULES: Rules[Case] = Rules(
    shape=(
        Rule(
            "consumers",
            "consumers={consumers} is not between 1 and 3",
            lambda case: case.consumers >= 1 and case.consumers <= 3,
        ),
        Rule(
            "power of two",
            "BLOCK_N={BLOCK_N} is not a power of two from 16 to 256",
            lambda case: case.BLOCK_N >= 16 and case.BLOCK_N <= 256 and 256 % case.BLOCK_N == 0,
        ),
        Rule(
            "stages",
            "num_stages={num_stages} is not between 1 and 8",
            lambda case: case.num_stages >= 1 and case.num_stages <= 8,
        ),
        Rule(
            "register split",
            "consumer_regs={consumer_regs} is no multiple of 8 from 24 to 240 that leaves "
            "{producer_regs} of 512 for the producer warps of {consumers} consumers",
            lambda case: (
                case.consumer_regs >= 24
                and case.consumer_regs <= 240
                and case.consumer_regs * case.consumers + case.producer_regs <= 512
                and case.consumer_regs % 8 == 0
            ),
        ),
        Rule(
            "ping pong",
            "ping_pong: it needs two consumers or more",
            lambda case: not case.ping_pong or case.consumers >= 2,
        ),
        Rule(
            "barriers",
            "barriers: a block has 16, {num_stages} stages of {consumers} consumers need more",
            lambda case: (
                case.consumers * (2 if case.ping_pong else 1) + 2 * case.num_stages + 2 <= 14
            ),
        ),
        Rule(
            "order",
            "the order, the tile_scheduler or the l2_swizzle of {config} is none of those there "
            "are",
            lambda case: case.known_words and case.l2_swizzle >= 1,
        ),
    ),
    fit=(
        Rule(
            "arch",
            "{arch} has no wgmma: the Gluon template is Hopper's",
            lambda case: case.has_wgmma,
        ),
        Rule(
            "prefill",
            "the Gluon template is for prefill",
            lambda case: not case.decodes,
        ),
        Rule(
            "dtype",
            "the Gluon template multiplies float16, bfloat16 and float8_e4m3fn",
            lambda case: case.itemsize <= 2,
        ),
        Rule(
            "dtype",
            "the Gluon template takes k and v in the dtype of q",
            lambda case: not case.mixed,
        ),
        Rule(
            "fp8",
            "in fp8 head dimensions are one of 64, 96, 128, 256, the same for q, k and v, and "
            "q_in_regs is 0",
            lambda case: (
                case.itemsize > 1
                or (case.q_in_regs == 0 and case.qk_dim == case.v_dim and case.qk_dim != 192)
            ),
        ),
        Rule(
            "fp8_pv",
            "fp8_pv: V and weights of 8 bits are of fp8, in tiles of at least 32 keys",
            lambda case: case.v_itemsize != 1 or (case.itemsize == 1 and case.BLOCK_N >= 32),
        ),
        Rule(
            "head dimension",
            "head dimension {qk_dim} is not one of 64, 96, 128, 192, 256",
            lambda case: case.qk_dim in (64, 96, 128, 192, 256),
        ),
        Rule(
            "head dimension",
            "head dimension {v_dim} is not one of 64, 96, 128, 256",
            lambda case: case.v_dim in (64, 96, 128, 256),
        ),
        Rule(
            "tma",
            "q, k, v must have inner stride 1, the rest multiples of 16 bytes",
            lambda case: case.dense_layout,
        ),
        Rule(
            "q_in_regs",
            "q_in_regs={q_in_regs} is not 0, all {qk_padded} columns of Q, or half of them",
            lambda case: (
                case.q_in_regs == 0
                or (
                    case.qk_padded != 192
                    and (
                        case.q_in_regs == case.qk_padded
                        or (case.q_in_regs >= 64 and 2 * case.q_in_regs == case.qk_padded)
                    )
                )
            ),
        ),
        Rule(
            "mask block",
            "a tile of {consumers} times 64 rows, of {heads} heads, does not divide the mask's "
            "block of {mask_rows}",
            lambda case: (
                case.mask_rows == 0
                or (case.runs and case.mask_rows % 64 == 0)
                or case.mask_rows % (64 * case.consumers / case.heads) == 0
            ),
        ),
        Rule(
            "mask block",
            "BLOCK_N={BLOCK_N} does not divide the mask's block of {mask_keys}",
            lambda case: case.mask_keys == 0 or case.mask_keys % case.BLOCK_N == 0,
        ),
        Rule(
            "pack_gqa",
            "pack_gqa: the {heads} heads of a tile have lists of blocks of their own",
            lambda case: not case.lists_differ or case.heads == 1,
        ),
        Rule(
            "shared memory",
            "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
            lambda case: case.shared_memory <= case.shared_limit,
        ),
        Rule(
            "registers",
            "registers: about {registers} a thread, a consumer has {consumer_regs}",
            lambda case: case.registers <= case.consumer_regs,
        ),
    ),
    worth=(
        Rule(
            "no overlap",
            "no overlap: {num_stages} stage of K and V",
            lambda case: case.num_stages >= 2,
        ),
    ),
)
