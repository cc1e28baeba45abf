"""Rows of chunks of prompts over paged caches, alone and beside decodes: named ones, and draws."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from bench.random_draw import MODELS, SEEDS
from bench.serving_rows import ServingRow, Variant

# New tokens and keys of each request, then what differs from 32:8 heads of 128, pages of 16.
_K = 1024
NAMED: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, int]], ...] = (
    ("2k-of-2k", (2048,), (2048,), {}),
    ("8k-of-8k", (8192,), (8192,), {}),
    ("2k-of-16k", (2048,), (16 * _K,), {}),
    ("512-of-32k", (512,), (32 * _K,), {}),
    ("4x1000", (1000,) * 4, (1000,) * 4, {}),
    ("1984-of-8k-64x4k", (1984, *(1,) * 64), (8192, *(4096,) * 64), {}),
    ("256-of-4k-128x2k", (256, *(1,) * 128), (4096, *(2048,) * 128), {}),
    ("2k-of-16k-page128", (2048,), (16 * _K,), {"page": 128}),
    ("2k-of-8k-d64", (2048,), (8192,), {"hq": 64, "hkv": 8, "d": 64, "dv": 64}),
    ("2k-of-8k-d256", (2048,), (8192,), {"hq": 8, "hkv": 4, "d": 256, "dv": 256}),
    ("2k-of-2k-page1", (2048,), (2048,), {"page": 1}),
    ("8k-of-8k-page1", (8192,), (8192,), {"page": 1}),
    ("2k-of-16k-page1", (2048,), (16 * _K,), {"page": 1}),
    ("4x1000-page1", (1000,) * 4, (1000,) * 4, {"page": 1}),
    ("2k-of-8k-d64-page1", (2048,), (8192,), {"page": 1, "hq": 64, "hkv": 8, "d": 64, "dv": 64}),
)
# Those of a cache of eight bits, too.
EIGHT = (
    "2k-of-2k", "8k-of-8k", "2k-of-16k", "512-of-32k", "1984-of-8k-64x4k", "2k-of-8k-d64",
    "2k-of-8k-d256",
)  # fmt: skip
DIMS = (64, 96, 128, 256)
PAGES, REQUESTS = (16, 32, 64, 128, 256), (1, 1, 2, 4, 8, 16, 32, 64)
MOST_NEW, MOST_KEYS = 8 * _K, 64 * _K
# Keys of a batch, and operations of a call: about 4 GiB of 8 heads, and 6 ms of an H200.
MOST_CACHED, MOST_FLOPS = 2**20, 4e12


def chunk_rows() -> list[ServingRow]:
    """The named rows, one of them with mods, some over eight bits, then those of all seeds."""
    rows = [
        ServingRow(name, "chunks", lens, "causal", new=new, **about)  # type: ignore[arg-type]
        for name, new, lens, about in NAMED
    ]
    mods: tuple[Variant, ...] = ("softcap", "alibi", "by-position")
    rows += [
        ServingRow(f"2k-of-16k-{mod}", "chunks", (16 * _K,), mod, new=(2048,)) for mod in mods
    ]
    rows += [
        replace(each, name=f"{each.name}-fp8", variant="fp8")
        for each in rows
        if each.name in EIGHT
    ]
    return [*rows, *(row for seed in SEEDS for row in drawn_chunks(seed))]


def drawn_chunks(seed: int) -> list[ServingRow]:
    """Ten batches of public models' heads; a third of them have a window."""
    random = Random(f"chunks {seed}")
    return [_drawn(random, f"{seed}-{number}", number % 3 == 0) for number in range(10)]


def _drawn(random: Random, name: str, window: bool) -> ServingRow:
    while True:
        model, hq, hkv, d = random.choice([each for each in MODELS if each[3] in DIMS])
        count, page = random.choice(REQUESTS), random.choice(PAGES)
        new = tuple(_length(random, MOST_NEW // count) for _ in range(count))
        lens = tuple(n + _length(random, MOST_KEYS - n) for n in new)
        flops = 4.0 * d * hq * sum(n * k for n, k in zip(new, lens, strict=True))
        if sum(lens) * hkv * d <= MOST_CACHED * 8 * 128 and flops <= MOST_FLOPS:
            break
    sizes = f"b{count}-{sum(new)}-of-{max(lens)}-page{page}"
    return ServingRow(
        f"{name}-{model}-{sizes}{'-window' * window}", "random-chunks", lens,
        "window" if window else "causal", page=page, hq=hq, hkv=hkv, d=d, dv=d, new=new,
    )  # fmt: skip


def _length(random: Random, most: int) -> int:
    """A length whose logarithm is uniform."""
    return round(math.exp(random.uniform(0.0, math.log(most))))
