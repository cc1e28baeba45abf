"""MLA decode on Hopper's wgmma: what can run, where to start, and what its template knows.

A warp loads latent keys by TMA; two warpgroups share the columns of the output, each 64 rows x 256
columns in fp32 registers. Method: FlashMLA's, but for the order of the products
(deepseek-ai/FlashMLA, 2025).
"""

from __future__ import annotations

from collections.abc import Iterator

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.dialect import Dialect, TensorForm
from flexattn.kernels.paged_decode.config import ServingConfig, ServingForm
from flexattn.kernels.printers.triton_ops import signature_type

# Tiles of one warpgroup's keys. Its language is Gluon, by the name of Triton's.
MLA = Dialect(
    gluon=True,
    tile=TensorForm("[BLOCK_M, KEYS]", "MMA_S"),
    key=TensorForm("[1, KEYS]", "MMA_S"),
)
LATENT, ROPE = 512, 64
_ROWS, _KEYS = 64, 64
# Fewer keys of a page are more copies a tile than one warp can ask for.
LEAST_PAGE = 16
# Of a thread of the second warpgroup, and of the loading warp: the first has what they leave.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


def mla_space() -> Iterator[ServingConfig]:
    """Every config of this kind, the default first. Shares of few tiles cost more to merge."""
    for least in (1, 2, 4, 8):
        yield ServingConfig(_ROWS, 2 * _KEYS, 4, 1, 1, least, "launch", "whole")


def described(form: ServingForm) -> Argument:
    """The cache as a tensor descriptor [pages or requests, heads, keys, columns]."""
    block = [1, 1, box(form), ROPE]
    return Argument("K", f"tensordesc<{signature_type(form.kv_dtype)}{block}>")


def box(form: ServingForm) -> int:
    """Keys of one copy."""
    return min(form.page, _KEYS) if form.page else _KEYS


def context(form: ServingForm) -> dict[str, object]:
    """What the template knows beside what all serving templates do."""
    return {
        "jit": "gluon.jit",
        "by_request": ", ONE_WARP",
        "per_lane": max(1, form.requests // 32),
        "boxes": _KEYS // box(form),
        "box_keys": box(form),
        "consumer_registers": _CONSUMER_REGISTERS,
        "producer_registers": _PRODUCER_REGISTERS,
        "by_lane": ", BY_LANE",
        "prefetched_before": True,
    }


def mla_sizes(form: ServingForm) -> dict[str, int]:
    """Constants of that kernel alone."""
    return {
        "KEYS": _KEYS,
        "HALF": LATENT // 2,
        "BOX": box(form),
        # Quarters of a tile, each of which arrives by itself.
        "FULL": 4,
        # Of a work tile, in shared memory; what its part is, if not its first or a later one.
        "SLOT_WORDS": 16,
        "SLOTS": 4,
        "WHOLE": 2,
        "NO_PORTION": 3,
    }


def mla_reasons(config: ServingConfig, form: ServingForm, device: Device) -> list[str]:
    """Why a config of this kind cannot run for a form on a device; empty where it can."""
    page, widths = form.page, (form.head_dim_qk, form.head_dim_v)
    whole_boxes = page == 0 or (page >= LEAST_PAGE and page & (page - 1) == 0)
    numbers = config.BLOCK_M, config.BLOCK_N, config.num_warps, config.num_stages, config.per_sm
    rules = (
        (device.capability == 90, "the MLA template is for sm_90"),
        (
            form.shared_kv and widths == (LATENT + ROPE, LATENT),
            f"the MLA template is for shared_kv with head dimensions {LATENT + ROPE} and {LATENT}",
        ),
        (form.dtype == form.kv_dtype != "float32", "the MLA template multiplies 16 bits"),
        (not form.scales, "the MLA template takes one scale of a cache, or one for each head"),
        (whole_boxes, f"a page of the MLA template has {LEAST_PAGE}, 32, 64, 128 or 256 keys"),
        (not form.prefix, "the MLA template takes no prefix that requests share"),
        (form.aligned, "the copy engine reads what lies at multiples of 16 bytes"),
        (
            numbers == (_ROWS, 2 * _KEYS, 4, 1, 1) and config.least >= 1,
            f"the MLA template has BLOCK_M={_ROWS}, BLOCK_N={2 * _KEYS}, num_warps=4, "
            "num_stages=1 and per_sm=1",
        ),
        (config.combine == "launch", "the MLA template leaves merges to a second kernel"),
    )
    return [said for holds, said in rules if not holds]
