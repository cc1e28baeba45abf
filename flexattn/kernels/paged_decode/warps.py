"""Serving kernels whose warps walk alone: what can run, what is worth trying, where to start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flexattn.device import Device
from flexattn.kernels.paged_decode.config import ITEMSIZE, Deal, ServingConfig, ServingForm

__all__ = ["preferences", "reasons", "space"]

# Of a thread's registers, what addresses and the loop take beside its tile.
_BESIDE = 40
# Operands of 16 bits, on their way from 8 into products: with none left for them, tiles spill.
_WIDENED = 32


def preferences(form: ServingForm) -> Iterator[ServingConfig]:
    """The static defaults for at most 8 rows, best first: measured on an H200."""
    if form.requests == 1 and form.mask is None:
        # Of 128k keys 128.4.2 is 0.7 % ahead, but a form has no length: the tuner's records do.
        yield ServingConfig(8, 128, 8, 1, 1, 1, "await", "round")
    if form.offset:
        # Few keys of a request's own: a cascade's passes end 6 % earlier than with the next one.
        yield ServingConfig(8, 64, 4, 1, 2, 1, "await", "heads")
    if ITEMSIZE[form.kv_dtype] == 1:
        # Within 0.7 % of the next one where requests are long, 3 to 7 % ahead where few or short.
        yield ServingConfig(8, 64, 2, 1, 4, 1, "await", "heads")
    wide, narrow = (ServingConfig(8, keys, 4, 1, 2, 1, "await", "heads") for keys in (128, 64))
    # Contiguous keys and few requests need less under way: 2 % of 8 x 8k keys, 1.6 % of 64 x 4k.
    # Keys of D 64 are half as long: of few requests the wide tile takes 11 % less.
    least = form.head_dim_v == 128 and (not form.page or form.requests <= 8)
    yield from (narrow, wide) if least else (wide, narrow)


def space(form: ServingForm) -> Iterator[ServingConfig]:
    """Every config of this kind; not all of them can run."""
    deals: tuple[Deal, ...] = ("heads", "round")
    axes = product((1, 2, 4, 8), (16, 32, 64), (1, 2, 3, 4, 6, 8, 12), (1, 2), deals)
    for warps, own, per_sm, least, deal in axes:
        if deal == "round" and least > 1:
            continue  # it shares tiles out without looking at how many there are
        yield ServingConfig(_height(form), warps * own, warps, 1, per_sm, least, "await", deal)


def reasons(config: ServingConfig, form: ServingForm, device: Device) -> list[str]:
    """Why a config of this kind cannot run for a form on a device; empty where it can."""
    dims = form.head_dim_qk, form.head_dim_v
    eight = ITEMSIZE[form.kv_dtype] == 1
    rules = (
        (
            device.backend == "interpreter" or 80 <= device.capability <= 90,
            "warps walk alone on NVIDIA's sm_80 to sm_90",
        ),
        (config.BLOCK_M in (8, 16), f"BLOCK_M={config.BLOCK_M} is 8 or 16"),
        (config.num_warps in (1, 2, 4, 8), "num_warps is 1, 2, 4 or 8"),
        (config.own in (16, 32, 64), f"each warp has {config.own} of 16, 32 or 64 keys"),
        (config.BLOCK_N == config.own * config.num_warps, "warps have equal shares of BLOCK_N"),
        (config.num_stages == 1, "num_stages is 1: a warp holds one tile of K and V"),
        (config.per_sm >= 1 and config.least >= 1, "per_sm and least are at least 1"),
        (
            device.backend == "interpreter" or config.BLOCK_M == 8 or config.num_warps >= 4,
            "fewer than 4 warps have no registers to merge 16 rows",
        ),
        (config.deal in ("heads", "round"), f"deal={config.deal!r} is heads or round"),
        (config.combine == "await", "parts are awaited where tiles are dealt by heads or round"),
        (
            ITEMSIZE[form.dtype] == 2 and (eight or form.kv_dtype == form.dtype),
            "q has 16 bits, K and V are as q or have 8",
        ),
        (
            not eight or device.backend == "interpreter" or device.capability >= 89,
            "K and V of 8 bits are widened by instructions of sm_89 and newer",
        ),
        (set(dims) <= {64, 128}, f"head dimensions {dims} are 64 or 128"),
        (form.aligned and not form.shared_kv, "K and V are apart, and aligned to 16 bytes"),
        (not form.prefix and form.requests <= 1024, "of at most 1024 requests, no shared prefix"),
        (
            device.backend == "interpreter"
            or _held(config, form) + _BESIDE <= config.registers(form, device),
            f"{_held(config, form)} registers hold a thread's K, V, Q, scores and output",
        ),
        (
            form.kv_heads <= config.programs(device),
            f"{form.kv_heads} KV heads have programs of their own",
        ),
        (
            config.deal != "round" or _goes_round(config, form),
            "tiles of one request and one tile of rows go round",
        ),
    )
    return [rule for kept, rule in rules if not kept]


def _held(config: ServingConfig, form: ServingForm) -> int:
    """Registers of a thread that hold a tile, K, V and Q in words, and the ends of requests."""
    dims = form.head_dim_qk + form.head_dim_v
    size = ITEMSIZE[form.kv_dtype]
    tiles = config.own * dims * size // 128 + (_WIDENED if size == 1 else 0)
    tiles += 2 * config.own * config.BLOCK_M // 32
    tiles += config.BLOCK_M * (form.head_dim_qk // 2 + form.head_dim_v) // 32
    return tiles + form.requests // 32 * (1 if form.mask is None else 2)


def _goes_round(config: ServingConfig, form: ServingForm) -> bool:
    """Whether where a program's first tile lies says nothing of a length."""
    return form.requests == 1 and 0 < form.rows <= config.BLOCK_M and not form.offset


def _height(form: ServingForm) -> int:
    return 8 if 0 < form.rows <= 8 else 16
