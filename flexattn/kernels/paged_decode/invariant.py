"""Batch-invariant serving: the one tile of a form, and where its splits leave their parts.

A row's bits depend on its own keys where the splits of the keys begin at fixed positions, each is
reduced in one order, and their results are merged in the order of the keys. So a tile of keys, its
share of each warp and a split's length are fixed by the dtypes and head dimensions; the rows of a
tile, the programs, and which of them has a split are free.
"""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.paged_decode.config import SHORT_ROWS, ServingConfig
from flexattn.problem.serving import SERVING_ITEMSIZE, ServingForm

# Of 8k keys and 8 KV heads 128 splits, one for each SM of a Hopper GPU; of short splits the parts
# are as many bytes as the keys, and of long ones few programs have any.
SPLIT_KEYS = 512
_WARPS = 4


def invariant_config(form: ServingForm) -> ServingConfig:
    """The config of a batch-invariant form; all but its rows and programs decides bits.

    Each warp has 16 keys of a tile, so that K, V and outputs of 16 rows fit its registers; of
    64 columns of 16 bits 32, for as many bytes under way, and of 256 columns 8, and 8 rows.
    """
    narrow = (
        SERVING_ITEMSIZE[form.kv_dtype] * form.head_dim_v == 128
        and SERVING_ITEMSIZE[form.kv_dtype] > 1
    )
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
