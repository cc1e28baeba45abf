"""The Gluon template's feasibility on Hopper: what it takes, and inequalities, in sympy."""

from __future__ import annotations

from typing import Any

import sympy as sp

from flexattn.kernels.stated.statement import Inequality, Statement, Steps

# A config's numbers, registers of a thread of its producer, whether its words have a meaning.
_CONFIG = (
    consumers, BLOCK_N, num_stages, consumer_regs, producer_regs,
    ping_pong, persistent, known_words, l2_swizzle, q_in_regs, lazy_rescale, v_itemsize, heads,
    v_box, v_parts, k_parts,
) = sp.symbols(
    "consumers BLOCK_N num_stages consumer_regs producer_regs "
    "ping_pong persistent known_words l2_swizzle q_in_regs lazy_rescale v_itemsize heads v_box "
    "v_parts k_parts"
)  # fmt: skip
# A problem's sizes and truth values, a device's limits: as stated/symbols.py has them, but
# for *_padded, which here are the columns of a tile in shared memory; v_columns of V's are
# multiplied. itemsize: of q and k; that
# of the output is 2, and of v too where a config does not keep its eight bits.
# runs: the mask keeps one run of blocks in each row of them. scored: there is a score_mod.
# lists_differ: heads have lists of blocks of their own. mixed: k and v are narrower than q.
_PROBLEM = (
    itemsize, qk_dim, v_dim, qk_padded, v_padded, out_padded, v_columns,
    mask_rows, mask_keys, runs,
    decodes, scored, loads_keys, loads_tile, dense_layout, lists_differ, mixed,
) = sp.symbols(
    "itemsize qk_dim v_dim qk_padded v_padded out_padded v_columns mask_rows mask_keys runs "
    "decodes scored loads_keys loads_tile dense_layout lists_differ mixed"
)  # fmt: skip
_DEVICE = (shared_limit, has_wgmma) = sp.symbols("shared_limit has_wgmma")

_SYMBOLS: tuple[sp.Symbol, ...] = (*_CONFIG, *_PROBLEM, *_DEVICE)
FP8_PV = sp.Eq(v_itemsize, 1)
# What a config takes, as the formulas below have it.
_ESTIMATED = (shared_memory, own_output, q_slots, registers) = sp.symbols(
    "shared_memory own_output q_slots registers"
)

_ROWS, _THREADS, _ITEMSIZE = 64, 128, 2
# The barriers, and what the compiler keeps for starting the warps.
_SHARED_SLACK = 1024
# Addresses, loop state, row statistics, and what the mods hold.
_REGISTER_SLACK, SCORE_REGISTERS, _GATHER_REGISTERS, LISTS_REGISTERS = 28, 8, 40, 16
PARTS_REGISTERS = WIDE_GATHER_REGISTERS = 16
# Of lazy_rescale, beside parts of Q, in shared memory or in registers; of the main loop beside the
# products of weights of 8 bits, or beside lazy_rescale and a Q that is held.
LAZY_REGISTERS = MAINLOOP_REGISTERS = 8
# Of a column of Q in registers: half of one holds it, a quarter of that gives way to the slack.
HELD_REGISTERS = sp.Rational(3, 16)
# Registers of an SM for one thread of every warpgroup, and those that three warpgroups start with.
SM_THREAD_REGISTERS, STARTED_WITH_TWO = 512, 3 * 168
# Of the 16 of a block, less the one at which all warps meet and one that the compiler may take.
# The inequality counts the one at which each consumer meets its own.
NAMED_BARRIERS = 14
# Columns of V that leave at least through parts of Q, of the widest accumulator, and of the widest
# heads in parts.
LEAST_V, ACCUMULATED, PARTS_END = 128, 256, 576
STATED_QK_DIMS, STATED_V_DIMS = (64, 96, 128, 192, 256), (64, 96, 128, 256)


let = Steps()

# Shared memory.
q_tile = let("q_tile", _ROWS * consumers * qk_padded * itemsize)
keys = let("keys", num_stages * BLOCK_N * qk_padded * itemsize)
values = let("values", num_stages * BLOCK_N * v_padded * v_itemsize)
exchanged = let(
    "exchanged",
    sp.Piecewise((8 * consumers * sp.Max(BLOCK_N, _ROWS), loads_keys), (0, True)),
    "What a mod reads for keys or diagonals, at most two words for each, is exchanged there.",
)
loaded = let("loaded", q_tile + keys + values + exchanged + _SHARED_SLACK)
boxed = let(
    "boxed", v_box > 0, "Of any head dimensions, copies of Q, K and the output have 64 columns."
)
halved = let(
    "halved",
    sp.And(persistent, sp.Eq(qk_padded, 256), sp.Eq(v_padded, 256), sp.Not(boxed)),
    "An output of 256 columns leaves a persistent block in two halves.",
)
out_rows = let(
    "out_rows", sp.Piecewise((_ROWS // 2 * consumers, halved), (_ROWS * consumers, True))
)
output = let("output", _ITEMSIZE * out_rows * out_padded)
three = let(
    "three",
    sp.And(sp.Eq(qk_padded, 192), sp.Not(boxed)),
    "Tiles of 192 columns are three parts of 64, each at an address of its own.",
)
wide = let("wide", qk_padded > ACCUMULATED, "Above 256 columns Q and K are in parts.")
in_parts = let(
    "in_parts",
    sp.Or(wide, sp.And(three, v_padded <= 128)),
    "An output takes one or two of them.",
)
in_whole = let(
    "in_whole", sp.And(sp.Not(sp.Or(three, boxed)), sp.Eq(qk_padded, v_padded), sp.Not(halved))
)
in_boxes = let("in_boxes", sp.And(boxed, out_padded <= qk_padded))
through_q = let(
    "through_q", sp.And(sp.Or(in_parts, in_whole, in_boxes), sp.Eq(itemsize, _ITEMSIZE))
)
two_parts = let("two_parts", sp.Or(wide, sp.And(three, sp.Eq(v_padded, 128))))
early = let(
    "early",
    sp.And(persistent, loaded + output <= shared_limit, sp.Not(two_parts)),
    "A persistent block loads its next Q while an output leaves, if there is room.",
)
own = let("own", sp.Or(sp.Not(through_q), early))
needed = let("needed", sp.Piecewise((loaded + output, own), (loaded, True)))
slots = let(
    "slots",
    sp.Piecewise((2, sp.And(own, persistent, needed + q_tile <= shared_limit)), (1, True)),
    "It loads it while this one is multiplied, if there is room for both.",
)

_SHARED_MEMORY = let.formula(
    "shared_memory own_output q_slots",
    "Bytes of shared memory; whether the output has tiles of its own; tiles of Q. In bytes: Q, "
    "the stages of K and V, the output where it does not leave through Q's place, the barriers.",
    sp.Tuple(needed + (slots - 1) * q_tile, own, slots),
)

# Registers of a consumer's thread.
scores = let("scores", _ROWS * BLOCK_N / _THREADS)
accumulator = let("accumulator", _ROWS * v_columns / _THREADS)
weights = let(
    "weights",
    sp.Piecewise((scores / 4 + accumulator, FP8_PV), (scores / 2, True)),
    "P in 16 bits. Weights of 8 take half the place, and the product that is added to the sum "
    "its own.",
)
lists = let(
    "lists",
    sp.Piecewise((LISTS_REGISTERS, sp.And(mask_rows > 0, sp.Not(runs))), (0, True)),
    "Lists of blocks cost more than runs, of mods that read.",
)
gathered = let(
    "gathered",
    sp.Piecewise(
        (sp.floor(scores) + 8, loads_tile),
        (WIDE_GATHER_REGISTERS, sp.And(loads_keys, wide)),
        (_GATHER_REGISTERS + sp.floor(sp.Max(0, qk_padded - v_padded) / 4) + lists, loads_keys),
        (0, True),
    ),
    "Mods that read are fitted to compiled kernels.",
)
scored_registers = let("scored_registers", sp.Piecewise((SCORE_REGISTERS, scored), (0, True)))
parts = let("parts", sp.Piecewise((PARTS_REGISTERS, three), (0, True)))
lazy = let(
    "lazy",
    sp.Piecewise((LAZY_REGISTERS, sp.And(lazy_rescale, sp.Or(three, q_in_regs > 0))), (0, True)),
)
fp8_pv_loop = let("fp8_pv_loop", sp.And(FP8_PV, mask_rows > 0))
lazy_loop = let("lazy_loop", sp.And(lazy_rescale, q_in_regs > 0, persistent))
mainloop = let(
    "mainloop",
    sp.Piecewise((MAINLOOP_REGISTERS, sp.Or(fp8_pv_loop, lazy_loop)), (0, True)),
)
beside = let(
    "beside", sp.floor(HELD_REGISTERS * q_in_regs) + parts + lazy + mainloop + scored_registers
)

_REGISTERS = let.formula(
    "registers",
    "Registers of a consumer's thread. Accumulator and scores in fp32, P, and what mods hold; "
    "loops of what passes do not spill.",
    sp.floor(scores + accumulator + weights) + _REGISTER_SLACK + beside + gathered,
)


def _one_of(size: sp.Symbol, among: tuple[int, ...], in_parts: Any) -> Inequality:
    words = (
        f"head dimension {{{size.name}}} is not one of {', '.join(map(str, among))}; multiples of "
        "8 from 16 to 256 are in 16 bits, and of 64 from 320 to 576 with V of 128 and more"
    )
    listed = sp.Or(*(sp.Eq(size, each) for each in among))
    return Inequality("head dimension", sp.Or(v_box > 0, listed, in_parts), words)


def _in_boxes(size: sp.Symbol) -> Inequality:
    words = f"head dimension {{{size.name}}} is no multiple of 8 from 16 to 256"
    fits = sp.And(sp.Eq(sp.Mod(size, 8), 0), size >= 16, size <= 256)
    return Inequality("head dimension", sp.Or(sp.Eq(v_box, 0), fits), words)


def _divides(tile: Any, block: Any) -> Any:
    return sp.Eq(sp.Mod(block, tile), 0)


def _in_whole_parts(size: sp.Symbol) -> Any:
    in_16_bits = sp.Eq(itemsize, 2)
    return sp.And(
        qk_dim > ACCUMULATED, in_16_bits, _divides(64, size), size >= LEAST_V, size <= PARTS_END
    )


# The pass that narrows products of V tells them by an operand in registers, and by their width.
held_parts = sp.And(
    v_box > 0,
    sp.Eq(sp.Mod(q_in_regs, 32), 0),
    q_in_regs <= qk_dim,
    sp.Ne(v_padded, BLOCK_N),
)
# Those of the numbers alone: the others are asked where these hold.
_SHAPE: tuple[Inequality, ...] = (
    Inequality(
        "consumers",
        sp.And(consumers >= 1, consumers <= 3),
        "consumers={consumers} is not between 1 and 3",
    ),
    Inequality(
        "power of two",
        sp.And(BLOCK_N >= 16, BLOCK_N <= 256, sp.Eq(sp.Mod(256, BLOCK_N), 0)),
        "BLOCK_N={BLOCK_N} is not a power of two from 16 to 256",
    ),
    Inequality(
        "stages",
        sp.And(num_stages >= 1, num_stages <= 8),
        "num_stages={num_stages} is not between 1 and 8",
    ),
    Inequality(
        "register split",
        sp.And(
            consumer_regs >= 24,
            consumer_regs <= 240,
            sp.Eq(sp.Mod(consumer_regs, 8), 0),
            consumers * consumer_regs + producer_regs <= SM_THREAD_REGISTERS,
        ),
        "consumer_regs={consumer_regs} is no multiple of 8 from 24 to 240 that leaves "
        "{producer_regs} of 512 for the producer warps of {consumers} consumers",
    ),
    # Each thread starts with as many, a multiple of 8: for what the producer warps do not give
    # consumers wait for ever.
    Inequality(
        "register split",
        sp.Or(sp.Ne(consumers, 2), 2 * consumer_regs + producer_regs <= STARTED_WITH_TWO),
        "consumer_regs={consumer_regs}: two consumers and {producer_regs} of the producer warps "
        "are more than the 504 that a block starts with",
    ),
    Inequality(
        "ping pong",
        sp.Or(sp.Not(ping_pong), consumers >= 2),
        "ping_pong: it needs two consumers or more",
    ),
    Inequality(
        "barriers",
        num_stages * (1 + k_parts) + 2 + consumers * sp.Piecewise((2, ping_pong), (1, True))
        <= NAMED_BARRIERS,
        "barriers: a block has 16, {num_stages} stages of {consumers} consumers need more",
    ),
    Inequality(
        "v_box",
        sp.Or(*(sp.Eq(v_box, each) for each in (0, 16, 32, 64))),
        "v_box={v_box} is not one of 0, 16, 32, 64",
    ),
    Inequality(
        "order",
        sp.And(known_words, l2_swizzle >= 1),
        "the order, the tile_scheduler or the l2_swizzle of {config} is none of those there are",
    ),
)
_FIT: tuple[Inequality, ...] = (
    Inequality("arch", has_wgmma, "{arch} has no wgmma: the Gluon template is Hopper's"),
    Inequality("prefill", sp.Not(decodes), "the Gluon template is for prefill"),
    Inequality(
        "dtype",
        itemsize <= 2,
        "the Gluon template multiplies float16, bfloat16 and float8_e4m3fn",
    ),
    # What the copy engine brings is multiplied where it lies.
    Inequality("dtype", sp.Not(mixed), "the Gluon template takes k and v in the dtype of q"),
    # What nobody has run in eight bits: Q in parts, or in registers.
    Inequality(
        "fp8",
        sp.Or(itemsize > 1, sp.And(sp.Eq(qk_dim, v_dim), sp.Ne(qk_dim, 192), sp.Eq(q_in_regs, 0))),
        "in fp8 head dimensions are one of 64, 96, 128, 256, the same for q, k and v, "
        "and q_in_regs is 0",
    ),
    Inequality(
        "fp8_pv",
        sp.Or(sp.Not(FP8_PV), sp.And(sp.Eq(itemsize, 1), BLOCK_N >= 32)),
        "fp8_pv: V and weights of 8 bits are of fp8, in tiles of at least 32 keys",
    ),
    _one_of(qk_dim, STATED_QK_DIMS, _in_whole_parts(qk_dim)),
    _one_of(v_dim, STATED_V_DIMS, _in_whole_parts(v_dim)),
    # The output leaves through Q's parts, of which a narrower one is none.
    Inequality(
        "head dimension",
        sp.Or(qk_dim <= ACCUMULATED, v_padded >= LEAST_V),
        "head dimension {v_dim} of V is below 128 beside {qk_dim} of Q and K",
    ),
    Inequality(
        "v_parts",
        sp.Or(
            sp.And(sp.Eq(v_parts, 1), v_dim <= ACCUMULATED),
            sp.And(sp.Eq(v_parts, 2), v_dim > ACCUMULATED, qk_dim > ACCUMULATED),
        ),
        "v_parts={v_parts}: it is 2 above 256 columns of V, and 1 up to them",
    ),
    Inequality(
        "k_parts",
        sp.Or(
            sp.Eq(k_parts, 1),
            sp.And(k_parts > 1, qk_dim > ACCUMULATED, _divides(64 * k_parts, qk_dim)),
        ),
        "k_parts={k_parts} is not 1, nor do as many whole 64 columns make {qk_dim} of K",
    ),
    _in_boxes(qk_dim),
    _in_boxes(v_dim),
    Inequality(
        "v_box",
        sp.Or(sp.Eq(v_box, 0), sp.Eq(itemsize, 2)),
        "v_box={v_box}: any head dimensions are served in 16 bits alone",
    ),
    Inequality(
        "tma",
        dense_layout,
        "q, k, v must have inner stride 1, the rest multiples of 16 bytes",
    ),
    # Parts of Q are cut where a tile's width is a power of two, at whole rows of its swizzle.
    Inequality(
        "q_in_regs",
        sp.Or(
            sp.Eq(q_in_regs, 0),
            held_parts,
            sp.And(
                sp.Not(sp.Or(sp.Eq(qk_padded, 192), qk_padded > ACCUMULATED, v_box > 0)),
                sp.Or(
                    sp.Eq(q_in_regs, qk_padded),
                    sp.And(sp.Eq(2 * q_in_regs, qk_padded), q_in_regs >= 64),
                ),
            ),
        ),
        "q_in_regs={q_in_regs} is not 0, all {qk_padded} columns of Q, or half of them; with a "
        "v_box no multiple of 32 of them, or products of scores are as wide as those of values",
    ),
    # Along a run each consumer may have a row of blocks of its own.
    Inequality(
        "mask block",
        sp.Or(
            sp.Eq(mask_rows, 0),
            _divides(_ROWS * consumers / heads, mask_rows),
            sp.And(runs, _divides(_ROWS, mask_rows)),
        ),
        "a tile of {consumers} times 64 rows, of {heads} heads, does not divide the mask's block "
        "of {mask_rows}",
    ),
    Inequality(
        "mask block",
        sp.Or(sp.Eq(mask_keys, 0), _divides(BLOCK_N, mask_keys)),
        "BLOCK_N={BLOCK_N} does not divide the mask's block of {mask_keys}",
    ),
    # That they share a KV head too is a matter of a problem's heads: geometry asks.
    Inequality(
        "pack_gqa",
        sp.Or(sp.Eq(heads, 1), sp.Not(lists_differ)),
        "pack_gqa: the {heads} heads of a tile have lists of blocks of their own",
    ),
    Inequality(
        "shared memory",
        shared_memory <= shared_limit,
        "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
    ),
    Inequality(
        "registers",
        registers <= consumer_regs,
        "registers: about {registers} a thread, a consumer has {consumer_regs}",
    ),
)
# What can run, and is offered to an exhaustive search alone.
_WORTH: tuple[Inequality, ...] = (
    # Nothing is loaded while the one tile of keys is in use.
    Inequality(
        "no overlap",
        sp.Or(num_stages >= 2, k_parts > 1),
        "no overlap: {num_stages} stage of K and V",
    ),
)

HOPPER_STATEMENT = Statement(
    "the Gluon template, Hopper's prefill",
    _SYMBOLS,
    _FIT,
    _SHAPE,
    _WORTH,
    _ESTIMATED,
    (_SHARED_MEMORY, _REGISTERS),
)
