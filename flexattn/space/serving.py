"""What a serving kernel's code depends on, the numbers that may vary, and where to start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeAlias

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.problem import Captures
from flexattn.space.config import padded

__all__ = [
    "COMBINE_WARPS",
    "ITEMSIZE",
    "LINE",
    "MERGED",
    "ServingConfig",
    "ServingForm",
    "reasons",
    "serving_candidates",
    "space",
    "workspace",
]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
# Values that a warp holds of a merge at a time: 64 registers of each thread.
MERGED = 2048
# Of the kernel that merges.
COMBINE_WARPS = 4


Combine: TypeAlias = Literal["last", "launch"]
Walk: TypeAlias = Literal["program", "warp"]
Deal: TypeAlias = Literal["even", "round"]
# Bytes of a line of the L2 cache.
LINE = 128


@dataclass(frozen=True, slots=True)
class ServingForm:
    """Everything that decides a serving kernel's source: no length, and of the batch its bound.

    page: keys of a page, 0 for a contiguous cache. requests: a power of two that is at least the
    largest batch. rows: packed rows (group x query positions) of the longest uniform request, 0
    where cu_seqlens_q gives the lengths. shared_kv: V is the first columns of K (MLA). scaled: the
    cache's scales are given. prefix: one cache is shared by the rows of all requests (the first
    pass of a cascade). offset: a request's keys begin behind a prefix (its second pass).
    aligned: addresses and strides are multiples of 16 bytes.
    """

    dtype: str
    kv_dtype: str
    head_dim_qk: int
    head_dim_v: int
    group: int
    kv_heads: int
    page: int
    requests: int
    rows: int
    score: Captures | None = None
    mask: Captures | None = None
    shared_kv: bool = False
    scaled: bool = False
    sinks: bool = False
    lse: bool = False
    prefix: bool = False
    offset: bool = False
    aligned: bool = True
    positive_scale: bool = True

    @property
    def ragged(self) -> bool:
        """Whether cu_seqlens_q gives each request's number of queries."""
        return self.rows == 0

    @property
    def product_dtype(self) -> str:
        """The dtype that tiles are multiplied in: a cache of 8 bits is exact in float16."""
        return "float16" if ITEMSIZE[self.kv_dtype] == 1 else self.dtype


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """BLOCK_M packed rows walk the keys BLOCK_N at a time.

    per_sm: programs for each SM, between which all tiles of the batch are cut evenly. least: tiles
    that a program takes at least. combine: who merges the pieces of a row that several programs
    worked on: "last", the program that finishes last, or "launch", a second kernel. walk: who has
    a tile of keys: "program", all warps of it together, or "warp", each warp a part of the tile for
    itself, straight from memory into registers (templates/gluon/serving.py.jinja). deal: "even",
    each program takes as many tiles, side by side; "round", the tiles of one request alone go round
    the programs, which then need not know its length to begin.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    per_sm: int = 2
    least: int = 1
    combine: Combine = "last"
    walk: Walk = "program"
    deal: Deal = "even"

    @property
    def own(self) -> int:
        """Keys of a tile that each warp has for itself."""
        return self.BLOCK_N // self.num_warps

    def programs(self, device: Device) -> int:
        """Programs of a launch on a device."""
        return self.per_sm * device.num_sms

    def registers(self, form: ServingForm, device: Device) -> int:
        """The most registers of a thread with which an SM holds its programs; 0: no bound.

        Short tiles are told so also where they may have all there are: ptxas else computes again
        in each turn of the loop what does not change, 438 instructions instead of 367. Tall ones
        have no registers to keep it in.
        """
        if device.backend != "cuda":
            return 0
        held = max(1, min(self.per_sm, device.shared_memory // _shared_memory(self, form)))
        found = device.registers // (held * 32 * self.num_warps) // 8 * 8
        if found > device.max_registers and self.BLOCK_M >= 64:
            return 0
        return max(64, min(found, device.max_registers))


def workspace(form: ServingForm, config: ServingConfig, device: Device) -> int:
    """Floats of the workspace: programs x 2 x BLOCK_M x (head_dim_v + 1).

    A program's range of tiles begins inside at most one unit of work and ends inside at most one
    other: two partial results, each of BLOCK_M rows of outputs and a log-sum-exp.
    """
    return config.programs(device) * 2 * config.BLOCK_M * (form.head_dim_v + 1)


def reasons(config: ServingConfig, form: ServingForm, device: Device) -> list[str]:
    """Why a config cannot run for a form on a device; empty where it can."""
    if config.walk == "warp":
        return _reasons_warp(config, form, device)
    if config.deal == "round":
        return ["tiles go round the programs where warps walk alone"]
    found = []
    for name in ("BLOCK_M", "BLOCK_N"):
        value = getattr(config, name)
        if value < 16 or value & (value - 1):
            found.append(f"{name}={value} is no power of two of at least 16")
    if config.num_warps not in (1, 2, 4, 8) or config.num_stages < 1:
        found.append("num_warps is 1, 2, 4 or 8, and num_stages at least 1")
    if config.per_sm < 1 or config.least < 1:
        found.append("per_sm and least are at least 1")
    needed = _shared_memory(config, form)
    if needed > device.shared_memory:
        found.append(f"tiles need about {needed} of {device.shared_memory} bytes of shared memory")
    registers = config.BLOCK_M * (padded(form.head_dim_v) + config.BLOCK_N)
    if registers > 32 * config.num_warps * (device.max_registers - 55):
        found.append(f"{registers} accumulators do not fit {config.num_warps} warps' registers")
    return found


def _reasons_warp(config: ServingConfig, form: ServingForm, device: Device) -> list[str]:
    """As reasons, where each warp walks alone."""
    dims = form.head_dim_qk, form.head_dim_v
    rules = (
        (
            device.backend == "interpreter" or 80 <= device.capability <= 90,
            "warps walk alone on NVIDIA's sm_80 to sm_90",
        ),
        (config.BLOCK_M in (8, 16), f"BLOCK_M={config.BLOCK_M} is 8 or 16"),
        (config.num_warps in (1, 2, 4, 8), "num_warps is 1, 2, 4 or 8"),
        (config.own in (16, 32, 64), f"each warp has {config.own} of 16, 32 or 64 keys"),
        (config.BLOCK_N == config.own * config.num_warps, "warps have equal shares of BLOCK_N"),
        (config.per_sm >= 1 and config.least >= 1, "per_sm and least are at least 1"),
        (ITEMSIZE[form.dtype] == 2 and form.kv_dtype == form.dtype, "all tensors have 16 bits"),
        (set(dims) <= {64, 128}, f"head dimensions {dims} are 64 or 128"),
        (form.aligned and not form.shared_kv, "K and V are apart, and aligned to 16 bytes"),
        (not form.prefix and form.requests <= 1024, "of at most 1024 requests, no shared prefix"),
        (
            config.deal == "even" or _goes_round(config, form, device),
            "tiles of one request and one tile of rows go round, and the last program merges",
        ),
    )
    return [rule for kept, rule in rules if not kept]


def _goes_round(config: ServingConfig, form: ServingForm, device: Device) -> bool:
    """Whether where a program's first tile lies says nothing of a length."""
    alone = form.requests == 1 and 0 < form.rows <= config.BLOCK_M and not form.offset
    return alone and config.combine == "last" and form.kv_heads <= config.programs(device)


def serving_candidates(form: ServingForm, device: Device) -> Iterator[ServingConfig]:
    """The static default, then what to fall back to if the compiler proves the estimates wrong.

    One token of a group of at most 16 heads takes the 16-row matrix instruction, which needs no
    padding of the rows to 64. Raises ConfigError when nothing can run.
    """
    rejected = []
    for config in dict.fromkeys(_preferences(form)):
        found = reasons(config, form, device)
        if not found:
            yield config
        rejected.append(f"{config}: {'; '.join(found)}")
    if all(not each.endswith(": ") for each in rejected):
        raise ConfigError(
            f"no config of the serving template fits {form}",
            "\n        ".join(rejected[-3:]),
            "use smaller head dimensions",
        )


def space(form: ServingForm, device: Device) -> tuple[ServingConfig, ...]:
    """Every config worth trying for a form on a device, the static default first."""
    first = next(serving_candidates(form, device))
    heights = {first.BLOCK_M, 16, 64} if form.rows > 16 or form.ragged else {first.BLOCK_M}
    axes = (sorted(heights), (32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4), (1, 2, 4))
    combines: tuple[Combine, ...] = ("last", "launch")
    grid = (
        ServingConfig(*numbers, combine=combine)
        for numbers in product(*axes)
        for combine in combines
    )
    able = (config for config in grid if not reasons(config, form, device))
    return tuple(dict.fromkeys((first, *able)))


def _preferences(form: ServingForm) -> Iterator[ServingConfig]:
    widest = max(form.head_dim_qk, form.head_dim_v)
    height = 64 if form.ragged or form.rows > 32 else 32 if form.rows > 16 else 16
    warps = 8 if height * widest > 64 * 128 else 4
    combine = _combine(height, widest)
    if form.dtype == "float32":
        # Without matrix instructions a tile lives in registers.
        yield ServingConfig(height, 32, 8, 2, 1, 1, combine)
    elif widest <= 128:
        start = ServingConfig(height, 64, warps, 3, 2, 1, combine)
        yield start
        yield replace(start, num_stages=2)
    else:
        yield ServingConfig(height, 64 if widest <= 256 else 32, warps, 2, 1, 1, combine)
        yield ServingConfig(height, 32, warps, 2, 1, 1, combine)
    yield ServingConfig(16, 32, 4, 2, 1)
    yield ServingConfig(16, 16, 4, 1, 1)


def _combine(height: int, widest: int) -> Combine:
    """Tall or wide tiles take one program long to merge, and its registers from the main loop."""
    return "launch" if height >= 64 or widest > 256 else "last"


def _shared_memory(config: ServingConfig, form: ServingForm) -> int:
    """Bytes: the stages of K and V, and a query tile on its way to the matrix instruction."""
    width = padded(form.head_dim_qk) + (0 if form.shared_kv else padded(form.head_dim_v))
    tiles = max(1, config.num_stages - 1) * config.BLOCK_N * width * ITEMSIZE[form.kv_dtype]
    if ITEMSIZE[form.kv_dtype] == 1:
        tiles += 2 * config.BLOCK_N * width
    return tiles + config.BLOCK_M * padded(form.head_dim_qk) * ITEMSIZE[form.dtype]
