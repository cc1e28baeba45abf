"""Decode of many query heads a KV head on Hopper: where to start, and what its template knows.

A warp loads tiles of K and V by TMA; of all tiles of a program each of one or two warpgroups
multiplies its own. Rows are those of FlashAttention-3's PackGQA (Dao-AILab/flash-attention, 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flexattn.device import Device
from flexattn.kernels.paged_decode import mla
from flexattn.kernels.paged_decode.config import (
    COMBINE_WARPS,
    SHORT_ROWS,
    ServingConfig,
    fits_l2,
)
from flexattn.problem.serving import ServingForm, ServingProblem

# Work tiles whose numbers are held: more than tiles of keys are.
_SLOTS = 8
SPECIALIZED_STAGES = _SLOTS - 2
# Of a thread of the loading warp; the first warpgroup has what this and the second one leave.
_PRODUCER_REGISTERS = 40
# With more lengths, where there is no second one: with 40 it spills 50 words of 256 requests.
_MANY_REQUESTS, _THEIR_REGISTERS = 64, 88
# Parts of a work tile of several, beside which two programs of an SM gain more than merging costs.
_MOST_PARTS = 16


def specialized_defaults(problem: ServingProblem, device: Device) -> Iterator[ServingConfig]:
    """The static default for more than 8 rows of a request, where there is one.

    Measured on an H200, beside the other templates. Of 128 columns one program an SM took 26.6 us
    of 33.6 (48 rows, 16 x 8k keys), 70.8 of 79.9 (32 rows of 8 heads, 16 x 4k), 26.7 of 29.1 (16
    rows, 16 x 8k), 12.9 of 16.0 (48 rows, 4 x 2k) and 23.0 of 76.2 (64 rows, 1 x 64k). Two leave
    twice as many parts to merge: 29.6, 73.2, 28.5, 14.3 and 46.0. But they gain where rows fill
    several work tiles: 34.3 of 37.7 with one (128 rows, 16 x 8k), and of 64 columns 37.6 of 50.2
    with one and 43.4 (71 rows, 64 x 4k). Not timed: a work tile for each of two programs, which
    leaves no more parts and hides ends of work tiles; fewer rows of 64 columns; and beside a
    cascade's prefix, where an SM's registers do not hold both.
    """
    form = problem.structure
    several = form.rows > mla.TMA_ROWS
    if form.ragged or form.offset or form.head_dim_v > 128:
        return
    if form.head_dim_v <= 64 and (fits_l2(problem) or not several):
        return
    work_tiles = form.requests * form.kv_heads * -(-form.rows // mla.TMA_ROWS)
    if 2 * device.num_sms <= (_MOST_PARTS if several else 1) * work_tiles:
        yield ServingConfig(mla.TMA_ROWS, mla.TMA_KEYS, 4, 2, 2, 1, "launch", "whole")
    elif form.head_dim_v > 64:
        yield ServingConfig(mla.TMA_ROWS, mla.TMA_KEYS, 4, 3, 1, 1, "launch", "whole")


def specialized_space(form: ServingForm) -> Iterator[ServingConfig]:
    """Every config for more rows than warp-private tiles have; not all of them can run."""
    if 0 < form.rows <= SHORT_ROWS:
        return
    for groups, per_sm, stages, least in product(
        (2, 1), (1, 2), range(2, SPECIALIZED_STAGES + 1), (1, 2)
    ):
        yield ServingConfig(
            mla.TMA_ROWS, mla.TMA_KEYS, 4 * groups, stages, per_sm, least, "launch", "whole"
        )  # fmt: skip


def specialized_registers(form: ServingForm, config: ServingConfig) -> int:
    """The most of a thread as it starts: beside head dimensions of 128 a combine kernel begins."""
    if form.head_dim_v > 128:
        return 168
    return 136 if config.per_sm == 1 else 128


def merge_registers(form: ServingForm, config: ServingConfig, device: Device) -> int:
    """The most of a thread of the kernel that merges, with which it begins beside; 0: no bound."""
    if form.head_dim_v > 128 or config.per_sm > 1:
        return 0
    taken = 128 * (config.num_warps // 4 + 1) * specialized_registers(form, config)
    return (device.registers - taken) // (32 * COMBINE_WARPS) // 8 * 8


def specialized_context(form: ServingForm, config: ServingConfig) -> dict[str, object]:
    """What the template knows beside what all serving templates do."""
    many = config.num_warps == 4 and form.requests > _MANY_REQUESTS
    return {
        **mla.context(form, config),
        "groups": config.num_warps // 4,
        "head_dim": form.head_dim_v,
        "consumer_registers": 232 if form.head_dim_v > 128 else 184,
        "producer_registers": _THEIR_REGISTERS if many else _PRODUCER_REGISTERS,
    }


def specialized_sizes(form: ServingForm, config: ServingConfig) -> dict[str, int]:
    """Constants of that kernel alone, and those that it has another value for."""
    return {
        **mla.work_tile_sizes(form),
        "STAGES": config.num_stages,
        "CHUNKS": form.head_dim_v // mla.ROPE,
        "SLOTS": _SLOTS,
        # Of the warpgroup that starts the others.
        "LANES": 128,
    }
