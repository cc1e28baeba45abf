"""What space/stated says, printed by sympy as Python; `make golden` prints it again."""

# fmt: off
# ruff: noqa

from collections.abc import Sequence
from math import floor

NAMES = tuple("consumers BLOCK_N num_stages consumer_registers producer_registers ping_pong persistent known_words section q_held watched v_itemsize heads itemsize qk_dim v_dim qk_padded v_padded mask_rows mask_keys runs decodes scored loads_keys loads_tile dense_layout lists_differ mixed shared_limit has_wgmma".split())
SHAPE = (
    ("consumers", "consumers={consumers} is not between 1 and 3"),
    ("power of two", "BLOCK_N={BLOCK_N} is not a power of two from 16 to 256"),
    ("stages", "num_stages={num_stages} is not between 1 and 8"),
    ("register split", "registers={consumer_registers} is no multiple of 8 from 24 to 240 that leaves {producer_registers} of 512 for the loading warps of {consumers} consumers"),
    ("ping pong", "ping_pong: one consumer has nobody to take turns with"),
    ("barriers", "barriers: a block has 16, {num_stages} stages of {consumers} consumers need more"),
    ("order", "the order or the schedule of {config} is none of those there are"),
)
FIT = (
    ("arch", "{arch} has no wgmma: the Gluon template is Hopper's"),
    ("prefill", "the Gluon template is for prefill"),
    ("dtype", "the Gluon template multiplies float16, bfloat16 and float8_e4m3fn"),
    ("dtype", "the Gluon template takes k and v in the dtype of q"),
    ("fp8", "in fp8 head dimensions are one of 64, 96, 128, 256, the same for q, k and v, and q_registers is 0"),
    ("narrow", "narrow: V and weights of 8 bits are of fp8, in tiles of at least 32 keys"),
    ("head dimension", "head dimension {qk_dim} is not one of 64, 96, 128, 192, 256"),
    ("head dimension", "head dimension {v_dim} is not one of 64, 96, 128, 256"),
    ("tma", "q, k, v must have inner stride 1, the rest multiples of 16 bytes"),
    ("q registers", "q_registers={q_held} is neither 0 nor the {qk_padded} columns of Q nor half of them"),
    ("mask block", "a tile of {consumers} times 64 rows, of {heads} heads, does not divide the mask's block of {mask_rows}"),
    ("mask block", "BLOCK_N={BLOCK_N} does not divide the mask's block of {mask_keys}"),
    ("packed", "packed: the {heads} heads of a tile have lists of blocks of their own"),
    ("shared memory", "shared memory: about {shared_memory} bytes, {device} has {shared_limit}"),
    ("registers", "registers: about {registers} a thread, a consumer has {consumer_registers}"),
)
WORTH = (
    ("no overlap", "no overlap: {num_stages} stage of K and V"),
)


def estimates(values: Sequence[int]) -> tuple[float, ...]:
    """Shared memory, registers."""
    consumers, BLOCK_N, num_stages, _, _, _, persistent, _, _, q_held, watched, v_itemsize, _, itemsize, _, _, qk_padded, v_padded, mask_rows, _, runs, _, scored, loads_keys, loads_tile, _, _, _, shared_limit, *_ = values
    return (
        ((BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*itemsize*qk_padded + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 2*((32*consumers*v_padded) if persistent and (qk_padded == 256) and (v_padded == 256) else (64*consumers*v_padded)) + ((8*consumers*max(64, BLOCK_N)) if loads_keys else (0)) + 1024) if ((persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*itemsize*qk_padded + 64*consumers*v_padded + 8*consumers*((64) if (BLOCK_N <= 64) else (BLOCK_N)) + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and (persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*v_padded + 8*consumers*((64) if (BLOCK_N <= 64) else (BLOCK_N)) + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and not ((qk_padded == 192) and (v_padded == 128)) or not ((itemsize == 2) and ((qk_padded == 192) and (v_padded <= 128) or (qk_padded == v_padded) and not (persistent and (qk_padded == 256) and (v_padded == 256)) and (qk_padded != 192))))) if loads_keys and persistent and (qk_padded == 256) and (v_padded == 256) else (((persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*itemsize*qk_padded + 64*consumers*v_padded + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and (persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*v_padded + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and not ((qk_padded == 192) and (v_padded == 128)) or not ((itemsize == 2) and ((qk_padded == 192) and (v_padded <= 128) or (qk_padded == v_padded) and not (persistent and (qk_padded == 256) and (v_padded == 256)) and (qk_padded != 192))))) if persistent and (qk_padded == 256) and (v_padded == 256) else (persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*itemsize*qk_padded + 128*consumers*v_padded + 8*consumers*((64) if (BLOCK_N <= 64) else (BLOCK_N)) + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and (persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 128*consumers*v_padded + 8*consumers*((64) if (BLOCK_N <= 64) else (BLOCK_N)) + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and not ((qk_padded == 192) and (v_padded == 128)) or not ((itemsize == 2) and ((qk_padded == 192) and (v_padded <= 128) or (qk_padded == v_padded) and not (persistent and (qk_padded == 256) and (v_padded == 256)) and (qk_padded != 192)))))))) else (BLOCK_N*num_stages*v_itemsize*v_padded + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 2*((32*consumers*v_padded) if persistent and (qk_padded == 256) and (v_padded == 256) else (64*consumers*v_padded)) + ((8*consumers*max(64, BLOCK_N)) if loads_keys else (0)) + 1024) if ((persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*v_padded + 8*consumers*((64) if (BLOCK_N <= 64) else (BLOCK_N)) + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and not ((qk_padded == 192) and (v_padded == 128)) or not ((itemsize == 2) and ((qk_padded == 192) and (v_padded <= 128) or (qk_padded == v_padded) and not (persistent and (qk_padded == 256) and (v_padded == 256)) and (qk_padded != 192)))) if loads_keys and persistent and (qk_padded == 256) and (v_padded == 256) else (((persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 64*consumers*v_padded + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and not ((qk_padded == 192) and (v_padded == 128)) or not ((itemsize == 2) and ((qk_padded == 192) and (v_padded <= 128) or (qk_padded == v_padded) and not (persistent and (qk_padded == 256) and (v_padded == 256)) and (qk_padded != 192)))) if persistent and (qk_padded == 256) and (v_padded == 256) else (persistent and (shared_limit >= BLOCK_N*num_stages*v_itemsize*v_padded + 128*consumers*v_padded + 8*consumers*((64) if (BLOCK_N <= 64) else (BLOCK_N)) + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + 1024) and not ((qk_padded == 192) and (v_padded == 128)) or not ((itemsize == 2) and ((qk_padded == 192) and (v_padded <= 128) or (qk_padded == v_padded) and not (persistent and (qk_padded == 256) and (v_padded == 256)) and (qk_padded != 192))))))) else (BLOCK_N*num_stages*v_itemsize*v_padded + itemsize*(BLOCK_N*num_stages*qk_padded + 64*consumers*qk_padded) + ((8*consumers*max(64, BLOCK_N)) if loads_keys else (0)) + 1024)),
        ((8) if scored else (0)) + ((8) if watched and ((qk_padded == 192) or (q_held > 0)) else (0)) + ((8) if (v_itemsize == 1) and (mask_rows > 0) or persistent and watched and (q_held > 0) else (0)) + ((16) if (qk_padded == 192) else (0)) + ((floor((1/2)*BLOCK_N) + 8) if loads_tile else (((16) if not runs and (mask_rows > 0) else (0)) + floor((1/4)*max(0, qk_padded - v_padded)) + 40) if loads_keys else (0)) + floor((3/16)*q_held) + floor((1/2)*BLOCK_N + (1/2)*v_padded + (((1/8)*BLOCK_N + (1/2)*v_padded) if (v_itemsize == 1) else ((1/4)*BLOCK_N))) + 28,
    )


def shape(values: Sequence[int]) -> tuple[int, ...]:
    """Which of SHAPE hold."""
    consumers, BLOCK_N, num_stages, consumer_registers, producer_registers, ping_pong, _, known_words, section, *_ = values
    return (
        (consumers >= 1) and (consumers <= 3),
        (256 % max(1, BLOCK_N) == 0) and (BLOCK_N >= 16) and (BLOCK_N <= 256),
        (num_stages >= 1) and (num_stages <= 8),
        (consumer_registers % 8 == 0) and (consumer_registers >= 24) and (consumer_registers <= 240) and (consumer_registers*consumers + producer_registers <= 512),
        (consumers >= 2) or not ping_pong,
        (consumers*((2) if ping_pong else (1)) + 2*num_stages + 2 <= 14),
        known_words and (section >= 1),
    )


def fit(values: Sequence[int]) -> tuple[int, ...]:
    """Which of FIT hold."""
    consumers, BLOCK_N, _, consumer_registers, _, _, _, _, _, q_held, _, v_itemsize, heads, itemsize, qk_dim, v_dim, qk_padded, _, mask_rows, mask_keys, runs, decodes, _, _, _, dense_layout, lists_differ, mixed, shared_limit, has_wgmma, shared_memory, registers = values
    return (
        has_wgmma,
        not decodes,
        (itemsize <= 2),
        not mixed,
        (q_held == 0) and (qk_dim == v_dim) and (qk_dim != 192) or (itemsize > 1),
        (itemsize == 1) and (BLOCK_N >= 32) or (v_itemsize != 1),
        (qk_dim == 64) or (qk_dim == 96) or (qk_dim == 128) or (qk_dim == 192) or (qk_dim == 256),
        (v_dim == 64) or (v_dim == 96) or (v_dim == 128) or (v_dim == 256),
        dense_layout,
        ((2*q_held == qk_padded) and (q_held >= 64) or (q_held == qk_padded)) and (qk_padded != 192) or (q_held == 0),
        runs and ((mask_rows == 0) or (mask_rows % 64 == 0)) or (mask_rows == 0) or (mask_rows % max(1, 64*consumers/heads) == 0),
        (mask_keys == 0) or (mask_keys % max(1, BLOCK_N) == 0),
        (heads == 1) or not lists_differ,
        (shared_memory <= shared_limit),
        (registers <= consumer_registers),
    )


def worth(values: Sequence[int]) -> tuple[int, ...]:
    """Which of WORTH hold."""
    _, _, num_stages, *_ = values
    return (
        (num_stages >= 2),
    )
