"""Limits of a device, how near a time comes to them, and how much of the device is busy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flexattn.device import KNOWN, PEAKS, Device, Peaks
from flexattn.device.neuroncore import KIB
from flexattn.problem import ITEMSIZE
from flexattn.problem.problem import PRODUCT_WORDS
from flexattn.problem.serving import SERVING_ITEMSIZE as SERVED
from flexattn.records.record import Key, Record, Trial
from flexattn.serving.verified import batch_lengths

Density = Literal["exact", "class", "unknown"]
# Cards that share a name with one of the table and do less: part of the name, as data sheets say.
_CARDS: tuple[tuple[str, Peaks], ...] = (
    # NVIDIA H200 data sheet: the NVL card has the SXM's memory and a lower power limit.
    ("h200-nvl", Peaks(835.5, 417.5, 60.0, 4.8)),
    # NVIDIA H100 data sheet: NVL, PCIe.
    ("h100-nvl", Peaks(835.5, 417.5, 60.0, 3.9)),
    ("h100-pcie", Peaks(756.5, 378.0, 51.0, 2.0)),
    # NVIDIA A100 data sheet: 40 GB.
    ("a100-sxm4-40gb", Peaks(312.0, 156.0, 19.5, 1.555)),
    ("a100-pcie-40gb", Peaks(312.0, 156.0, 19.5, 1.555)),
)
# CUDA programming guide, technical specifications per compute capability: most threads of an SM,
# its shared memory in KiB, and the most blocks.
_SM: dict[str, tuple[int, int, int]] = {
    "sm_80": (2048, 164, 32),
    "sm_86": (1536, 100, 16),
    "sm_89": (1536, 100, 24),
    "sm_90": (2048, 228, 32),
    "sm_100": (2048, 228, 32),
    "sm_120": (1536, 100, 24),
}
# What the driver keeps of each block's shared memory, and in which units a warp takes registers.
_RESERVED, _UNIT = KIB, 256


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a call: floating-point operations, and bytes of q, k, v and out, once.

    kept: the share of query and key pairs that the mask's listed blocks hold. density: "exact"
    without a mask; "class" where the mask's class says it, to a factor of about 1.4; "unknown"
    where nothing does and every pair is counted, so that rates are upper bounds.
    """

    flops: float
    bytes: float
    kept: float
    density: Density

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Reach:
    """A time as rates, in TFLOP/s and TB/s, and as a share of the limit that binds.

    bound: "compute" or "memory", the lower of the two roofs at this intensity. share and bound
    are None where the device's limits are not known.
    """

    tflops: float
    bandwidth: float
    share: float | None
    bound: Literal["compute", "memory"] | None


def work(record: Record) -> Work:
    """The work of one call of a record's problem, at the sizes that were measured.

    Two products of 2 x head dimension for each pair that is kept, as bench counts them, and five
    of a backward, which reads and writes a gradient beside each tensor. Keys that no block lists
    are not read; decode reads each key once for all heads of a group.
    """
    key = record.key
    B, q_len, kv_len = record.sizes
    if key.kind == "serving":
        return _of_plan(record)
    kept, density = _kept(key.mask_class)
    dims = key.head_dim_qk + key.head_dim_v
    backward = key.kind == "backward"
    products = 3 * key.head_dim_qk + 2 * key.head_dim_v if backward else dims
    flops = 2.0 * B * key.Hq * q_len * kv_len * products * kept
    # One query row reads the kept keys alone; many rows together read all of them.
    read = kept if key.kind == "decode" else 1.0
    queries, keys = ITEMSIZE[key.dtype], ITEMSIZE[_kv_dtype(key)]
    moved = B * dims * (key.Hq * q_len * queries + key.Hkv * kv_len * read * keys)
    return Work(flops, float(moved) * (2 if backward else 1), kept, density)


def _kv_dtype(key: Key) -> str:
    """The dtype of K and V, which a key tells where it is not q's."""
    told = re.search(r"kv=(\w+)", key.precision)
    return told.group(1) if told else key.dtype


def _of_plan(record: Record) -> Work:
    """As `work`: the keys of each request are those of its class; a window's are all counted."""
    key = record.key
    B, rows, kv_len = record.sizes
    q_len = 1 if key.mask_class == "mixed" else rows
    kv_lens = batch_lengths(key.mask_class, B, q_len, kv_len)[1]
    queries = rows if key.mask_class == "mixed" else B * rows
    dims = key.head_dim_qk + key.head_dim_v
    # A tied V is read with its K.
    width = key.head_dim_qk if "shared_kv" in key.layout else dims
    itemsize = SERVED[_kv_dtype(key)]
    pairs = queries * sum(kv_lens) / B
    moved = key.Hq * queries * dims * SERVED[key.dtype] + key.Hkv * sum(kv_lens) * width * itemsize
    kept = sum(kv_lens) / (B * kv_len)
    return Work(
        2.0 * key.Hq * pairs * dims, float(moved), kept, "unknown" if key.mask else "exact"
    )


def reach(record: Record, us: float) -> Reach:
    """The share of its device's limits that a call of `us` microseconds reaches."""
    done = work(record)
    tflops, bandwidth = done.flops / us / 1e6, done.bytes / us / 1e6
    found = limits_of(record.environment.device)
    if found is None:
        return Reach(tflops, bandwidth, None, None)
    roof = min(found.peak(record.key.dtype, products_of(record)), found.bandwidth * done.intensity)
    bound: Literal["compute", "memory"] = (
        "memory"
        if done.intensity < found.ridge(record.key.dtype, products_of(record))
        else "compute"
    )
    return Reach(tflops, bandwidth, tflops / roof, bound)


def products_of(record: Record) -> str:
    """The way in which float32 is multiplied in this record's problem."""
    words = set(record.key.precision.split())
    return next((products for products, word in PRODUCT_WORDS.items() if word in words), "ieee")


def _kept(mask_class: str) -> tuple[float, Density]:
    """The share of pairs that a mask's class names ("d1/8 i2 runs"), and how well it is known."""
    if not mask_class:
        return 1.0, "exact"
    found = re.match(r"d1(?:/(\d+))?\b", mask_class)
    return (1 / int(found.group(1) or 1), "class") if found else (1.0, "unknown")


def limits_of(device: str) -> Peaks | None:
    """The limits of a device by its name ("nvidia-h200", "nvidia-h100-80gb-hbm3"), if known."""
    name = device.lower().replace(" ", "-")
    # Drivers leave the maker out; the longer name comes before one that is a part of it.
    models = ((each.partition("-")[2].removesuffix("-graphics"), each) for each in PEAKS)
    known = ((model, PEAKS[each]) for model, each in sorted(models, key=lambda m: -len(m[0])))
    return next((limits for part, limits in (*_CARDS, *known) if part in name), None)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that one SM holds at once, and what would be lacking for another."""

    blocks: int
    limit: str


def recorded_device(name: str, arch: str) -> Device | None:
    """The device behind a record's environment: by name, else the first of its arch."""
    if name in KNOWN:
        return KNOWN[name]
    return next((device for device in KNOWN.values() if device.arch == arch), None)


def occupancy(trial: Trial, device: Device) -> Occupancy | None:
    """Blocks per SM of a built config; None for AMD, or where its registers are not recorded."""
    if device.arch not in _SM or not trial.registers:
        return None
    threads, shared, blocks = _SM[device.arch]
    size = trial.config.num_warps * device.warp_size
    warp = -(-trial.registers * device.warp_size // _UNIT) * _UNIT
    counts = {
        "registers": device.registers // warp // trial.config.num_warps,
        "shared memory": shared * KIB // (trial.shared_memory + _RESERVED),
        "threads": threads // size,
        "blocks": blocks,
    }
    least = min(counts, key=lambda name: counts[name])
    return Occupancy(counts[least], least)
