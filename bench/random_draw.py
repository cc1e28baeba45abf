"""Shapes drawn at random from ranges of public models, ten a seed: the same ones in every run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeAlias

from bench.rows import Mask, Row, Shape
from bench.serving_rows import ServingRow

SEEDS = (101, 202, 303)
Draw: TypeAlias = Literal["prefill", "cross", "chunk", "decode", "paged"]
# Of ten shapes. A chunk is a part of a prompt over a long cache, which the mask keeps whole.
KINDS: tuple[Draw, ...] = (
    *("prefill",) * 3, "cross", "chunk", *("decode",) * 2, *("paged",) * 3,
)  # fmt: skip
# Query heads, key heads and head dimension, as public configs have them.
MODELS: tuple[tuple[str, int, int, int], ...] = (
    ("llama3-8b", 32, 8, 128), ("llama3-70b", 64, 8, 128), ("llama3-70b-tp4", 16, 2, 128),
    ("qwen2.5-7b", 28, 4, 128), ("qwen3-14b", 40, 8, 128), ("qwen3-0.6b", 16, 8, 128),
    ("gemma2-9b", 16, 8, 256), ("gemma3-27b", 32, 16, 128), ("gemma3-4b", 8, 4, 256),
    ("phi-2", 32, 32, 80), ("phi-3-mini", 32, 32, 96), ("gpt-oss", 64, 8, 64),
    ("starcoder", 48, 1, 128), ("falcon-7b", 71, 1, 64), ("olmo-7b", 32, 32, 128),
    ("llama2-13b", 40, 40, 128), ("gpt2-xl", 25, 25, 64), ("tinyllama", 32, 4, 64),
)  # fmt: skip
# Of images, sounds and text that is read whole.
ENCODERS: tuple[tuple[str, int, int, int], ...] = (
    ("bert-base", 12, 12, 64), ("whisper-large", 20, 20, 64), ("siglip", 16, 16, 72),
    ("vit-huge", 16, 16, 80), ("sd15", 8, 8, 40), ("sdxl", 10, 10, 64), ("flux", 24, 24, 128),
)  # fmt: skip
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PAGES = (1, 8, 16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "bfloat16", "float16")
# Bytes of all inputs, and operations of a call: about 6 ms of an H200.
MOST_BYTES, MOST_FLOPS = 4 * 2**30, 4e12
# Query rows of a chunk.
CHUNK = (16, 512)


@dataclass(frozen=True)
class Case:
    """A shape of one seed, as a row of the bench that runs it: a call's, or a plan's."""

    kind: Draw
    row: Row | ServingRow

    @property
    def name(self) -> str:
        """Of its row: seed, number, kind, model, dtype and sizes."""
        return self.row.name


def drawn(seed: int) -> list[Case]:
    """The ten shapes of a seed, in an order of its own; none is larger than the limits."""
    random = Random(seed)
    kinds = random.sample(KINDS, len(KINDS))
    return [_case(random, seed, number, kind) for number, kind in enumerate(kinds)]


def _case(random: Random, seed: int, number: int, kind: Draw) -> Case:
    while True:
        found = _tried(random, kind)
        shape, dtype = found.shape, found.dtype
        bytes_ = 2 * shape.batch * shape.d * (
            2 * shape.hq * shape.q_len + 2 * shape.hkv * shape.kv_len
        )  # fmt: skip
        flops = 4.0 * shape.batch * shape.hq * shape.q_len * shape.kv_len * shape.d
        if bytes_ <= MOST_BYTES and flops <= MOST_FLOPS:
            break
    lengths = f"{shape.q_len}x{shape.kv_len}"
    name = f"{seed}-{number}-{kind}-{found.model}-{dtype}-b{shape.batch}-{lengths}-{found.mask}"
    if kind != "paged":
        return Case(kind, Row(name, "random", shape, found.mask, dtype=dtype))
    row = ServingRow(
        f"{name}-page{found.page}", "random", (shape.kv_len,) * shape.batch, q_len=shape.q_len,
        page=found.page, hq=shape.hq, hkv=shape.hkv, d=shape.d, dv=shape.d, dtype=dtype,
    )  # fmt: skip
    return Case(kind, row)


@dataclass(frozen=True)
class _Tried:
    model: str
    shape: Shape
    dtype: str
    mask: Mask = "full"
    page: int = 0


def _tried(random: Random, kind: Draw) -> _Tried:
    encodes = kind == "cross" or (kind == "prefill" and random.random() < 0.4)
    model, hq, hkv, d = random.choice(ENCODERS if encodes else MODELS)
    shape = Shape(random.choice(BATCHES), hq, hkv, 1, 1, d)
    found = _Tried(model, shape, random.choice(DTYPES))
    if kind == "prefill":
        length = _length(random, 64, 16384)
        shape = replace(shape, q_len=length, kv_len=length)
        return replace(found, shape=shape, mask="full" if encodes else "causal")
    if kind == "cross":
        rows, keys = _length(random, 256, 16384), random.choice((77, 128, 226, 256, 512, 1500))
        return replace(found, shape=replace(shape, q_len=rows, kv_len=keys))
    keys = _length(random, 512, 65536)
    if kind == "chunk":
        rows = _length(random, *CHUNK)
        return replace(found, shape=replace(shape, q_len=rows, kv_len=max(rows, keys)))
    page = random.choice(PAGES) if kind == "paged" else 0
    return replace(found, shape=replace(shape, kv_len=keys), page=page)


def _length(random: Random, least: int, most: int) -> int:
    """A length whose logarithm is uniform; every second one is a multiple of 64, as many are."""
    found = round(math.exp(random.uniform(math.log(least), math.log(most))))
    if random.random() < 0.5:
        return min(most, max(least, -(-found // 64) * 64))
    return min(most, max(least, found))


def random_rows(*kinds: Draw) -> list[Row | ServingRow]:
    """The rows of all seeds that are of these kinds."""
    return [case.row for seed in SEEDS for case in drawn(seed) if case.kind in kinds]
