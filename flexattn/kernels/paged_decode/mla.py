"""MLA decode on Hopper's wgmma: where to start, and what its template knows.

A warp loads latent keys by TMA; two warpgroups share the columns of the output, each 64 rows x 256
columns in fp32 registers. Method: FlashMLA's, but for the order of the products
(deepseek-ai/FlashMLA, 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.printers.spelling import TRITON, Dialect, TensorForm, signature_type
from flexattn.problem.serving import ServingForm

# Tiles of one warpgroup's keys. Its language is Gluon, by the name of Triton's.
MLA = Dialect(
    gluon=True,
    tile=TensorForm("[BLOCK_M, KEYS]", "MMA_S"),
    key=TensorForm("[1, KEYS]", "MMA_S"),
)
# The same with the operands of both products swapped: a row of a tile is a key.
MLA_SWAP_AB = Dialect(
    gluon=True,
    tile=TensorForm("[KEYS, BLOCK_M]", "MMA"),
    key=TensorForm("[KEYS, 1]", "MMA"),
)
LATENT, ROPE = 512, 64
# Of tiles whose keys a warp loads by TMA.
TMA_ROWS, TMA_KEYS = 64, 64
# Tiles of keys that an SM holds beside so many rows of Q.
MOST_STAGES = {16: 3, 32: 2}
# Fewer keys of a page are more copies a tile than one warp can ask for.
LEAST_PAGE = 16
# Scores (base 2) above a row's reference before that follows: weights of 16 bits hold 2^8.
_SLACK = 8
# Of a thread of the second warpgroup, and of the loading warp: the first has what they leave.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


def mla_space(rows: int = TMA_ROWS) -> Iterator[ServingConfig]:
    """Every config for so many packed rows (0: unknown), the default first.

    Shares of few tiles cost more to merge. Few rows are a side of wgmma that may be short.
    """
    for height in (16, 32):
        if 0 < rows <= height:
            for least, stages in product((1, 2), range(2, MOST_STAGES[height] + 1)):
                yield ServingConfig(height, TMA_KEYS, 4, stages, 1, least, "launch", "whole")
    for least in (1, 2, 4, 8):
        yield ServingConfig(TMA_ROWS, 2 * TMA_KEYS, 4, 1, 1, least, "launch", "whole")


def mla_defaults(form: ServingForm) -> Iterator[ServingConfig]:
    """Where to start: at most 16 rows with operands swapped, then as many rows are.

    Beside two tiles the combine kernel has room to begin. On an H200 they are 1.18 and 1.62 times
    as fast as 64 rows (64 requests of 4k keys, one of 16k), three tiles 1.16 and 1.50 times.
    """
    if 0 < form.rows <= 16:
        yield next(mla_space(form.rows))
    yield next(mla_space())


def dialect(config: ServingConfig) -> Dialect:
    """The dialect of a config whose warps share each tile."""
    if not config.by_tma:
        return TRITON
    return MLA_SWAP_AB if config.swap_ab else MLA


def registers(config: ServingConfig) -> int:
    """The most of a thread as it starts, 0: no bound. A combine kernel begins beside few rows."""
    return {16: 128, 32: 168}[config.BLOCK_M] if config.swap_ab else 0


def described(form: ServingForm, name: str) -> Argument:
    """The cache as a tensor descriptor [pages or requests, heads, keys, columns]."""
    block = [1, 1, box(form), ROPE]
    return Argument(name, f"tensordesc<{signature_type(form.kv_dtype)}{block}>")


def box(form: ServingForm) -> int:
    """Keys of one copy."""
    return min(form.page, TMA_KEYS) if form.page else TMA_KEYS


def context(form: ServingForm, config: ServingConfig) -> dict[str, object]:
    """What the template knows beside what all serving templates do."""
    return {
        "jit": "gluon.jit",
        "by_request": ", ONE_WARP",
        "per_lane": max(1, form.requests // 32),
        "boxes": TMA_KEYS // box(form),
        "box_keys": box(form),
        "consumer_registers": _CONSUMER_REGISTERS,
        "producer_registers": _PRODUCER_REGISTERS,
        "by_lane": ", BY_LANE",
        "prefetched_before": True,
        "rows": config.BLOCK_M,
    }


def mla_sizes(form: ServingForm, config: ServingConfig) -> dict[str, int]:
    """Constants of that kernel alone."""
    own = {"STAGES": config.num_stages} if config.swap_ab else {"FULL": 4, "SLACK": _SLACK}
    found = work_tile_sizes(form)
    keys, box_keys = found.pop("KEYS"), found.pop("BOX")
    return {
        "KEYS": keys,
        "HALF": LATENT // 2,
        "BOX": box_keys,
        # Tiles that are held, or quarters of a tile, each of which arrives by itself.
        **own,
        **found,
    }


def work_tile_sizes(form: ServingForm) -> dict[str, int]:
    """Constants of all kernels whose loading warp tells the others of work tiles."""
    return {
        "KEYS": TMA_KEYS,
        "BOX": box(form),
        # Of a work tile, in shared memory; what its part is, if not its first or a later one.
        "SLOT_WORDS": 16,
        "SLOTS": 4,
        "WHOLE": 2,
        "NO_PORTION": 3,
    }
