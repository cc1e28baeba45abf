"""Feasibility of Hopper's backward, in sympy: what tiles take of memory and registers."""

from __future__ import annotations

from typing import Any

from sympy import And, Eq, Max, Mod, Not, Or, Piecewise, floor, symbols

from flexattn.kernels.stated.statement import Inequality, Statement, Steps

# A config's numbers. Then truth values: whether a product goes on when the next tile begins, and
# dQ's does, the warpgroups take turns, the copy engine adds dQ, its halves by themselves, and in
# order, each warpgroup has products of its own, a block has one tile of keys after another, and
# words and numbers are among those that there are.
_CONFIG = (
    BLOCK_M, BLOCK_N, num_stages, ds_stages, pipelined, dq_later, ping_pong, dq_tma, dq_halves,
    deterministic, by_product, persistent, known_words,
) = symbols(
    "BLOCK_M BLOCK_N num_stages ds_stages pipelined dq_later ping_pong dq_tma dq_halves "
    "deterministic by_product persistent known_words"
)  # fmt: skip
# A structure's sizes, with the columns of a tile, and those of a mask's blocks 0 where there is
# none; then truth values: k and v are as q, q, k and v lie as TMA reads them, something captured
# gets a gradient, and something that is not read along diagonals, weights are dropped, and a mod
# reads memory for a query and a key otherwise.
_PROBLEM = (
    itemsize, qk_dim, v_dim, head_dim, mask_rows, mask_keys, same_dtype, dense_layout, has_grads,
    other_grads, drops, loads_pairs,
) = symbols(
    "itemsize qk_dim v_dim head_dim mask_rows mask_keys same_dtype dense_layout has_grads "
    "other_grads drops loads_pairs"
)  # fmt: skip
_DEVICE = (has_wgmma, shared_limit, consumer_registers) = symbols(
    "has_wgmma shared_limit consumer_registers"
)
_ESTIMATED = (shared_memory, registers) = symbols("shared_memory registers")
# Threads that share a tile; barriers beside the tiles, in bytes; addresses and what is known of
# rows and keys, in registers; the most registers that hold a tile of dQ.
_THREADS = 256
BARRIERS = 512
_BESIDE = 32
DQ_REGISTERS = 64
# The most rows of a box of the copy engine, which have 32 numbers of a tile of dQ.
BOX_ROWS = 256

let = Steps()
walked_tiles = let(
    "walked_tiles", num_stages * BLOCK_M * (2 * head_dim * itemsize + 8), "Q, dO, lse and delta."
)
held_tiles = let("held_tiles", 2 * BLOCK_N * head_dim * itemsize, "K and V.")
scored = let(
    "scored",
    ds_stages
    + Piecewise((num_stages, And(Eq(BLOCK_N, 64), Not(by_product))), (0, True))
    + Piecewise((3, by_product), (0, True)),
    "dS, and a P a stage where the warpgroups share a tile's columns; two of each by products.",
)
score_tiles = let("score_tiles", scored * BLOCK_M * BLOCK_N * itemsize)
kept = let(
    "kept", Piecewise((floor(BLOCK_M * BLOCK_N / 8), drops), (0, True)), "A bit of each weight."
)
dq_sums = let(
    "dq_sums", Piecewise((BLOCK_M * head_dim * 4, dq_tma), (0, True)), "A tile of dQ in float32."
)
_SHARED = let.formula(
    "shared_memory",
    "Bytes of shared memory.",
    walked_tiles + held_tiles + score_tiles + kept + dq_sums + BARRIERS,
)
let = Steps()
dk_dv = let("dk_dv", floor(2 * BLOCK_N * head_dim / _THREADS))
scores = let(
    "scores",
    floor(BLOCK_M * BLOCK_N / _THREADS) * Piecewise((2, by_product), (1, True)),
    "Of one tile; dP has as many.",
)
dq_tile = let("dq_tile", floor(BLOCK_M * head_dim / _THREADS))
_REGISTERS = let.formula(
    "registers",
    "Registers of a consumer's thread.",
    dk_dv + Max(2 * scores, floor(scores / 2) + dq_tile) + _BESIDE,
)


def _one_of(size: Any, among: tuple[int, ...]) -> Any:
    return Or(*(Eq(size, each) for each in among))


HOPPER_BACKWARD_STATEMENT = Statement(
    "Hopper's backward",
    (*_CONFIG, *_PROBLEM, *_DEVICE),
    estimated=_ESTIMATED,
    formulas=(_SHARED, _REGISTERS),
    shape=(
        Inequality(
            "tile",
            And(_one_of(BLOCK_M, (64, 128)), _one_of(BLOCK_N, (64, 128))),
            "tiles of {BLOCK_M} rows and {BLOCK_N} keys: both are 64 or 128",
        ),
        Inequality(
            "stages",
            And(num_stages >= 1, num_stages <= 4),
            "num_stages={num_stages} is not between 1 and 4",
        ),
        Inequality(
            "ds_stages",
            And(_one_of(ds_stages, (1, 2)), Or(Eq(ds_stages, 1), Not(dq_later))),
            "ds_stages={ds_stages} is not 1, or 2 where pipelined is not dq: that multiplies the "
            "last tile's dS in the next turn",
        ),
        Inequality(
            "pipelined",
            Or(Not(pipelined), num_stages >= 2),
            "pipelined takes two stages or more: the next Q is awaited before this one is "
            "released",
        ),
        Inequality(
            "deterministic",
            Or(Not(deterministic), dq_tma),
            "deterministic takes dq_tma: a warp adds what the consumers have left, in its turn",
        ),
        Inequality(
            "dq_tma",
            Not(And(dq_tma, dq_later)),
            "dq_tma hands on a tile's dQ before the next tile begins, pipelined=dq after",
        ),
        Inequality(
            "dq_tma stages",
            Or(Not(dq_tma), num_stages <= 3),
            "num_stages={num_stages}: dq_tma takes a hardware barrier of the fourth stage",
        ),
        Inequality(
            "by_product",
            Or(
                Not(by_product),
                And(
                    Eq(BLOCK_M, 64),
                    Eq(BLOCK_N, 64),
                    num_stages <= 3,
                    Eq(ds_stages, 1),
                    Not(Or(pipelined, ping_pong, dq_tma)),
                ),
            ),
            "by_product takes tiles of 64x64, three stages at most, and nothing that orders the "
            "products of warpgroups that share them",
        ),
        Inequality(
            "words",
            known_words,
            "pipelined is dk, dq or empty, early_lse half, all or empty, and ex2_emulated of 8 at "
            "most 8",
        ),
    ),
    fit=(
        Inequality("arch", has_wgmma, "{arch} has no wgmma"),
        Inequality(
            "dtype",
            And(Eq(itemsize, 2), same_dtype),
            "Hopper's backward multiplies 16 bits, of one dtype",
        ),
        Inequality(
            "head dimension",
            And(
                Max(qk_dim, v_dim) > 32,
                head_dim <= 256,
                Eq(Mod(qk_dim, 8), 0),
                Eq(Mod(v_dim, 8), 0),
            ),
            "head dimensions ({qk_dim}, {v_dim}) are multiples of 8, and the wider one is from 40 "
            "to 256, in Hopper's backward",
        ),
        Inequality(
            "dq_tma tile",
            Or(Not(dq_tma), BLOCK_M * head_dim <= 32 * BOX_ROWS),
            "dq_tma copies a tile of dQ at once: one of {BLOCK_M}x{head_dim} has more than 32 KB",
        ),
        Inequality(
            "dq_halves",
            Or(
                Not(dq_halves),
                And(
                    dq_tma,
                    Not(deterministic),
                    Or(Not(drops), And(Eq(BLOCK_M, 64), Eq(BLOCK_N, 128))),
                ),
            ),
            "dq_halves takes dq_tma and a second warp, which in order adds every other tile, and "
            "for which dropout leaves registers beside tiles of 64x128 alone",
        ),
        Inequality(
            "persistent",
            Or(
                Not(persistent),
                And(
                    dq_tma,
                    Not(dq_halves),
                    Not(deterministic),
                    Not(pipelined),
                    Not(ping_pong),
                    Not(by_product),
                    Not(drops),
                ),
            ),
            "persistent takes dq_tma as a whole, and none of deterministic, pipelined, ping_pong, "
            "by_product and dropout",
        ),
        Inequality(
            "persistent tiles",
            Or(
                Not(persistent),
                And(ds_stages * BLOCK_M >= head_dim, 2 * BLOCK_M >= BLOCK_N),
            ),
            "persistent stores dK by way of {ds_stages} tiles of dS of {BLOCK_N}x{BLOCK_M}, which "
            "have to hold one of {BLOCK_N}x{head_dim}, and dV by one of dQ of {BLOCK_M} rows",
        ),
        Inequality(
            "dropout stages",
            Or(Not(drops), num_stages <= 2, And(Not(dq_tma), num_stages <= 3)),
            "num_stages={num_stages}: dropout takes a hardware barrier of the fourth stage, and "
            "beside dq_tma of the third",
        ),
        Inequality(
            "layout",
            dense_layout,
            "q, k, v must have inner stride 1, the rest multiples of 16 bytes",
        ),
        Inequality(
            "mask block",
            And(Eq(Mod(mask_rows, BLOCK_M), 0), Eq(Mod(mask_keys, BLOCK_N), 0)),
            "the mask's blocks of {mask_rows}x{mask_keys} are no whole tiles of "
            "{BLOCK_M}x{BLOCK_N}",
        ),
        Inequality(
            "captured gradients",
            Not(other_grads),
            "gradients of what score_mod does not read along q_idx - kv_idx are added up by "
            "Triton's backward",
        ),
        Inequality(
            "order of captured gradients",
            Not(And(has_grads, deterministic)),
            "gradients of what score_mod captures are added up in any order",
        ),
        Inequality(
            "by_product gradients",
            Not(And(by_product, Or(drops, has_grads))),
            "by_product neither drops weights nor adds to gradients of what score_mod captures",
        ),
        Inequality(
            "mods",
            Not(loads_pairs),
            "a mod reads memory for each query and key, which Hopper's backward has no tile for, "
            "or not along q_idx - kv_idx",
        ),
        Inequality(
            "shared memory",
            shared_memory <= shared_limit,
            "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
        ),
        Inequality(
            "dq",
            BLOCK_M * head_dim <= DQ_REGISTERS * _THREADS,
            "a tile of dQ of {BLOCK_M}x{head_dim} has more than 64 registers a thread",
        ),
        Inequality(
            "registers",
            registers <= consumer_registers,
            "about {registers} registers a thread, consumers have {consumer_registers}",
        ),
    ),
)
