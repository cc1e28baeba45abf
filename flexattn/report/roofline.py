"""Useful work of a problem, and how near a time comes to what the device can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flexattn.kernels.paged_decode.config import SERVING_ITEMSIZE as SERVED
from flexattn.problem import ITEMSIZE
from flexattn.records.key import PRODUCT_WORDS, Key
from flexattn.records.record import Record
from flexattn.report.limits import limits_of
from flexattn.serving.tuned import batch_lengths

Density = Literal["exact", "class", "unknown"]


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must do: floating-point operations, and bytes of q, k, v and out, each once.

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
    """What a call that takes `us` microseconds reaches of its device's limits."""
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
    """How float32 is multiplied in this record's problem."""
    words = set(record.key.precision.split())
    return next((products for products, word in PRODUCT_WORDS.items() if word in words), "ieee")


def _kept(mask_class: str) -> tuple[float, Density]:
    """The share of pairs that a mask's class names ("d1/8 i2 runs"), and how well it is known."""
    if not mask_class:
        return 1.0, "exact"
    found = re.match(r"d1(?:/(\d+))?\b", mask_class)
    return (1 / int(found.group(1) or 1), "class") if found else (1.0, "unknown")
