"""Feasibility of Hopper's backward.

Printed of stated/hopper_backward.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class RuleCase:
    """The numbers of one case."""

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    ds_stages: int
    pipelined: bool
    dq_later: bool
    ping_pong: bool
    dq_tma: bool
    dq_halves: bool
    deterministic: bool
    by_product: bool
    persistent: bool
    known_words: bool
    itemsize: int
    qk_dim: int
    v_dim: int
    head_dim: int
    mask_rows: int
    mask_keys: int
    same_dtype: bool
    dense_layout: bool
    has_grads: bool
    other_grads: bool
    drops: bool
    loads_pairs: bool
    has_wgmma: bool
    shared_limit: int
    consumer_registers: int
    # Known where the rules of the shape hold.
    shared_memory: int = 0
    registers: int = 0


def shared_memory(c: RuleCase) -> int:
    """Bytes of shared memory."""
    # Q, dO, lse and delta.
    walked_tiles = c.BLOCK_M * c.num_stages * (2 * c.head_dim * c.itemsize + 8)
    # K and V.
    held_tiles = 2 * c.BLOCK_N * c.head_dim * c.itemsize
    # dS, and a P a stage where the warpgroups share a tile's columns; two of each by products.
    scored = (
        c.ds_stages
        + (3 if c.by_product else 0)
        + (c.num_stages if not c.by_product and c.BLOCK_N == 64 else 0)
    )
    score_tiles = c.BLOCK_M * c.BLOCK_N * c.itemsize * scored
    # A bit of each weight.
    kept = floor(c.BLOCK_M * c.BLOCK_N / 8) if c.drops else 0
    # A tile of dQ in float32.
    dq_sums = 4 * c.BLOCK_M * c.head_dim if c.dq_tma else 0
    return dq_sums + held_tiles + kept + score_tiles + walked_tiles + 512


def registers(c: RuleCase) -> int:
    """Registers of a consumer's thread."""
    dk_dv = floor(c.BLOCK_N * c.head_dim / 128)
    # Of one tile; dP has as many.
    scores = (2 if c.by_product else 1) * floor(c.BLOCK_M * c.BLOCK_N / 256)
    dq_tile = floor(c.BLOCK_M * c.head_dim / 256)
    return dk_dv + max(2 * scores, dq_tile + floor(scores / 2)) + 32


def estimate(c: RuleCase) -> None:
    """Write into a case what its config takes."""
    c.shared_memory = shared_memory(c)
    c.registers = registers(c)


RULES: Rules[RuleCase] = Rules(
    shape=(
        Rule(
            "tile",
            "tiles of {BLOCK_M} rows and {BLOCK_N} keys: both are 64 or 128",
            lambda c: (c.BLOCK_M in (64, 128)) and (c.BLOCK_N in (64, 128)),
        ),
        Rule(
            "stages",
            "num_stages={num_stages} is not between 1 and 4",
            lambda c: c.num_stages >= 1 and c.num_stages <= 4,
        ),
        Rule(
            "ds_stages",
            "ds_stages={ds_stages} is not 1, or 2 where pipelined is not dq: that multiplies the"
            " last tile's dS in the next turn",
            lambda c: (not c.dq_later or c.ds_stages == 1) and (c.ds_stages in (1, 2)),
        ),
        Rule(
            "pipelined",
            "pipelined takes two stages or more: the next Q is awaited before this one is "
            "released",
            lambda c: not c.pipelined or c.num_stages >= 2,
        ),
        Rule(
            "deterministic",
            "deterministic takes dq_tma: a warp adds what the consumers have left, in its turn",
            lambda c: c.dq_tma or not c.deterministic,
        ),
        Rule(
            "dq_tma",
            "dq_tma hands on a tile's dQ before the next tile begins, pipelined=dq after",
            lambda c: not (c.dq_later and c.dq_tma),
        ),
        Rule(
            "dq_tma stages",
            "num_stages={num_stages}: dq_tma takes a hardware barrier of the fourth stage",
            lambda c: not c.dq_tma or c.num_stages <= 3,
        ),
        Rule(
            "by_product",
            "by_product takes tiles of 64x64, three stages at most, and nothing that orders the "
            "products of warpgroups that share them",
            lambda c: (
                not c.by_product
                or (
                    c.BLOCK_M == 64
                    and c.BLOCK_N == 64
                    and c.ds_stages == 1
                    and c.num_stages <= 3
                    and not (c.dq_tma or c.ping_pong or c.pipelined)
                )
            ),
        ),
        Rule(
            "words",
            "pipelined is dk, dq or empty, early_lse half, all or empty, and ex2_emulated of 8 "
            "at most 8",
            lambda c: c.known_words,
        ),
    ),
    fit=(
        Rule("arch", "{arch} has no wgmma", lambda c: c.has_wgmma),
        Rule(
            "dtype",
            "Hopper's backward multiplies 16 bits, of one dtype",
            lambda c: c.same_dtype and c.itemsize == 2,
        ),
        Rule(
            "head dimension",
            "head dimensions ({qk_dim}, {v_dim}) are multiples of 8, and the wider one is from "
            "40 to 256, in Hopper's backward",
            lambda c: (
                c.head_dim <= 256
                and max(c.qk_dim, c.v_dim) > 32
                and c.qk_dim % 8 == 0
                and c.v_dim % 8 == 0
            ),
        ),
        Rule(
            "dq_tma tile",
            "dq_tma copies a tile of dQ at once: one of {BLOCK_M}x{head_dim} has more than 32 KB",
            lambda c: not c.dq_tma or c.BLOCK_M * c.head_dim <= 8192,
        ),
        Rule(
            "dq_halves",
            "dq_halves takes dq_tma and a second warp, which in order adds every other tile, and"
            " for which dropout leaves registers beside tiles of 64x128 alone",
            lambda c: (
                not c.dq_halves
                or (
                    c.dq_tma
                    and not c.deterministic
                    and (not c.drops or (c.BLOCK_M == 64 and c.BLOCK_N == 128))
                )
            ),
        ),
        Rule(
            "persistent",
            "persistent takes dq_tma as a whole, and none of deterministic, pipelined, "
            "ping_pong, by_product and dropout",
            lambda c: (
                not c.persistent
                or (
                    c.dq_tma
                    and not c.by_product
                    and not c.deterministic
                    and not c.dq_halves
                    and not c.drops
                    and not c.ping_pong
                    and not c.pipelined
                )
            ),
        ),
        Rule(
            "persistent tiles",
            "persistent stores dK by way of {ds_stages} tiles of dS of {BLOCK_N}x{BLOCK_M}, "
            "which have to hold one of {BLOCK_N}x{head_dim}, and dV by one of dQ of {BLOCK_M} "
            "rows",
            lambda c: (
                not c.persistent
                or (2 * c.BLOCK_M >= c.BLOCK_N and c.BLOCK_M * c.ds_stages >= c.head_dim)
            ),
        ),
        Rule(
            "dropout stages",
            "num_stages={num_stages}: dropout takes a hardware barrier of the fourth stage, and "
            "beside dq_tma of the third",
            lambda c: not c.drops or c.num_stages <= 2 or (not c.dq_tma and c.num_stages <= 3),
        ),
        Rule(
            "layout",
            "q, k, v must have inner stride 1, the rest multiples of 16 bytes",
            lambda c: c.dense_layout,
        ),
        Rule(
            "mask block",
            "the mask's blocks of {mask_rows}x{mask_keys} are no whole tiles of "
            "{BLOCK_M}x{BLOCK_N}",
            lambda c: c.mask_keys % c.BLOCK_N == 0 and c.mask_rows % c.BLOCK_M == 0,
        ),
        Rule(
            "captured gradients",
            "gradients of what score_mod does not read along q_idx - kv_idx are added up by "
            "Triton's backward",
            lambda c: not c.other_grads,
        ),
        Rule(
            "order of captured gradients",
            "gradients of what score_mod captures are added up in any order",
            lambda c: not (c.deterministic and c.has_grads),
        ),
        Rule(
            "by_product gradients",
            "by_product neither drops weights nor adds to gradients of what score_mod captures",
            lambda c: not (c.by_product and (c.drops or c.has_grads)),
        ),
        Rule(
            "mods",
            "a mod reads memory for each query and key, which Hopper's backward has no tile for,"
            " or not along q_idx - kv_idx",
            lambda c: not c.loads_pairs,
        ),
        Rule(
            "shared memory",
            "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
            lambda c: c.shared_memory <= c.shared_limit,
        ),
        Rule(
            "dq",
            "a tile of dQ of {BLOCK_M}x{head_dim} has more than 64 registers a thread",
            lambda c: c.BLOCK_M * c.head_dim <= 16384,
        ),
        Rule(
            "registers",
            "about {registers} registers a thread, consumers have {consumer_registers}",
            lambda c: c.registers <= c.consumer_registers,
        ),
    ),
    worth=(),
)
