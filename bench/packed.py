"""`python -m bench.packed`: causal documents packed in one row, forward, beside FlashAttention.

Useful work is that of the pairs that are kept. Rows of the table, two of them with mods too, then
packs drawn by two seeds; lengths follow from a row's name. `--config FIELD=VALUE` names fields of
RaggedPrefillConfig.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import flexattn
from bench.command import main, parse_config
from bench.inputs import attention, off
from bench.peers import OURS, Refusal
from bench.results import Gate
from bench.runner import Kind, Method, poison
from bench.serving_peers import prefills_with
from flexattn.catalogue import alibi, causal, relative_bias, sliding_window, softcap
from flexattn.device import detect
from flexattn.frontend.documents import Packing
from flexattn.frontend.varlen import document_call
from flexattn.mods import bind
from flexattn.runtime.ragged import packed_problem, prepare_packed

METHOD = Method(rounds=15, min_ms=5.0, flush_l2=True, graph=True)
SEEDS = (101, 202)
_K = 1024
# Query heads, key heads and head dimension; tokens and their mean in a document.
HEADS = ((16, 16, 128), (32, 8, 128), (32, 32, 64), (8, 4, 256))
PACKS = ((32 * _K, 4000), (32 * _K, 1000), (64 * _K, 2000), (16 * _K, 300))
DRAWN_HEADS = (
    (32, 32, 64), (32, 4, 64), (32, 32, 80), (32, 32, 96), (32, 8, 128), (16, 16, 128),
    (16, 2, 128), (8, 8, 192), (16, 8, 256), (8, 4, 256),
)  # fmt: skip
# Rows of a document that are checked at most.
_CHECKED = 256


@dataclass(frozen=True)
class PackRow:
    """Documents of these lengths in one row; window: keys before the query's own, 0 for all."""

    name: str
    group: str
    lengths: tuple[int, ...]
    hq: int
    hkv: int
    d: int
    window: int = 0
    score: str = ""

    @property
    def flops(self) -> float:
        """Useful operations: 4 D for each kept pair."""
        pairs = 0.0
        for n in self.lengths:
            seen = min(self.window + 1, n) if self.window else n
            pairs += seen * seen / 2 + (n - seen) * seen
        return 4.0 * self.d * self.hq * pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once, at two bytes an element."""
        return 4 * sum(self.lengths) * self.hkv * self.d


def packed_rows() -> list[PackRow]:
    """The rows of the table, two of them with mods, then those drawn by all seeds."""
    rows = []
    for hq, hkv, d in HEADS:
        for tokens, mean in PACKS:
            name = f"h{hq}-{hkv}-d{d}-{tokens // _K}k-mean{mean}"
            rows.append(PackRow(name, "table", _uniform(Random(name), tokens, mean), hq, hkv, d))
    for plain, heads in ((rows[1], HEADS[0]), (rows[9], HEADS[2])):
        for score in ("softcap", "alibi", "bias"):
            name = f"{plain.name}-{score}"
            rows.append(PackRow(name, "mods", plain.lengths, *heads, score=score))
    return [*rows, *(row for seed in SEEDS for row in _drawn(seed))]


def _drawn(seed: int) -> list[PackRow]:
    """Ten packs of a seed; a third of them have a window."""
    random, rows = Random(f"packs {seed}"), []
    for number in range(10):
        kind = ("zipf", "uniform", "bimodal")[number % 3]
        tokens = random.choice((8, 16, 32, 64, 128)) * _K
        hq, hkv, d = random.choice(DRAWN_HEADS)
        window = random.choice((128, 512, 1024)) if random.random() < 1 / 3 else 0
        mean = random.choice((300, 1000, 4000))
        if kind == "uniform":
            lengths = _uniform(random, tokens, mean)
        elif kind == "zipf":
            lengths = _until(tokens, lambda: int(64 / (1 - random.random()) ** 0.8))
        else:
            lengths = _until(tokens, lambda mean=mean: random.choice((mean // 8, 2 * mean)))
        name = f"{seed}-{number}-{kind}-{tokens // _K}k-h{hq}-{hkv}-d{d}" + f"-w{window}" * (
            window > 0
        )
        rows.append(PackRow(name, "random", lengths, hq, hkv, d, window))
    return rows


def _uniform(random: Random, tokens: int, mean: int) -> tuple[int, ...]:
    return _until(tokens, lambda: random.randint(mean // 4, 2 * mean - mean // 4))


def _until(tokens: int, draw: Callable[[], int]) -> tuple[int, ...]:
    """Lengths until they are so many tokens; the last one is cut."""
    lengths: list[int] = []
    left = tokens
    while left > 0:
        lengths.append(max(1, min(draw(), left)))
        left -= lengths[-1]
    return tuple(lengths)


@dataclass(frozen=True)
class Pack:
    """q [tokens, Hq, D], k and v [tokens, Hkv, D], cu_seqlens, and the mods of a row.

    table: the numbers of a bias by distance [Hq, distances], which a backward learns.
    """

    row: PackRow
    q: Tensor
    k: Tensor
    v: Tensor
    cu: Tensor
    score_mod: Any
    table: Tensor | None = None

    @property
    def mask_mod(self) -> Any:
        """The mask by positions in a document."""
        return sliding_window(self.row.window) if self.row.window else causal

    def arguments(self) -> dict[str, Any]:
        """varlen_attn's arguments behind q, k and v."""
        w = self.row.window
        given: dict[str, Any] = {"cu_seqlens_q": self.cu, "cu_seqlens_k": self.cu}
        return given | {
            "score_mod": self.score_mod, "causal": True, "window": (w or -1, 0),
        }  # fmt: skip


def make_pack(row: PackRow, method: Method) -> Pack:
    """Normal random tensors, the same for a row's name on every run of one device type."""
    where = method.device
    draw = torch.Generator(where).manual_seed(zlib.crc32(row.name.encode()))
    tokens = sum(row.lengths)
    q, k, v = (
        torch.randn(tokens, heads, row.d, generator=draw, device=where, dtype=method.dtype)
        for heads in (row.hq, row.hkv, row.hkv)
    )
    cu = torch.tensor([0, *row.lengths], device=where).cumsum(0, dtype=torch.int32)
    if row.score == "bias":
        longest = max(row.lengths)
        table = torch.randn(row.hq, 2 * longest, generator=draw, device=where) / 8
        return Pack(row, q, k, v, cu, relative_bias(table, longest), table)
    score = {"softcap": lambda: softcap(30.0), "alibi": lambda: alibi(row.hq, where)}
    return Pack(row, q, k, v, cu, score[row.score]() if row.score else None)


def ours(x: Pack) -> Callable[[], Tensor]:
    """varlen_attn as a user calls it."""
    arguments = x.arguments()

    def call() -> Any:
        return flexattn.varlen_attn(x.q, x.k, x.v, **arguments)

    return call


def documents(x: Pack) -> Callable[[], Tensor]:
    """flex_attention with the document mask, by which other calls of varlen_attn are served."""
    tokens = len(x.q)
    packing = Packing(x.cu, x.cu, tokens, tokens, x.row.window or -1, 0, None)
    mask, score = document_call(packing, x.score_mod)
    heads = [each.transpose(0, 1)[None] for each in (x.q, x.k, x.v)]

    def call() -> Tensor:
        out: Any = flexattn.flex_attention(
            *heads, score_mod=score, block_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)  # type: ignore[no-any-return]

    return call


def flash(module: str) -> Callable[[Pack], Callable[[], Tensor] | Refusal]:
    """FlashAttention's flash_attn_varlen_func of a module."""

    def build(x: Pack) -> Callable[[], Tensor] | Refusal:
        if x.score_mod is not None:
            return Refusal("it is beside rows without mods")
        try:
            found: Any = __import__(module, fromlist=["flash_attn_varlen_func"])
        except ImportError as error:
            return Refusal(f"{module} cannot be imported: {error}")
        longest, window = max(x.row.lengths), x.row.window
        options: dict[str, Any] = {
            "cu_seqlens_q": x.cu, "cu_seqlens_k": x.cu, "max_seqlen_q": longest,
            "max_seqlen_k": longest, "causal": True,
        }  # fmt: skip
        if window:
            options["window_size"] = (window, 0)

        def call() -> Tensor:
            out: Any = found.flash_attn_varlen_func(x.q, x.k, x.v, **options)
            return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

        return call

    return build


def variant(text: str) -> Callable[[Pack], Callable[[], Tensor] | Refusal]:
    """Ours with these fields of its kernel's config, or numbers of its rules, as _CUT_FROM."""
    changes = parse_config(text)

    def build(x: Pack) -> Callable[[], Tensor] | Refusal:
        score, mask = bind(x.score_mod, "score"), bind(x.mask_mod, "mask")
        problem = packed_problem(
            x.q, x.k, x.v, len(x.row.lengths), score, mask, lse=False, positive_scale=True,
            sinks=False,
        )  # fmt: skip
        with prefills_with(changes):
            launch = prepare_packed(problem, detect(x.q.device), x.q.device, x.q, x.k, x.v)
        if launch is None:
            return Refusal(f"no kernel has {changes}")
        rest, scale = launch.rest_of(None, score, mask), 1 / math.sqrt(x.row.d)
        return lambda: launch.run(x.q, x.k, x.v, x.cu, x.cu, scale, rest).out

    return build


def _judge(call: Callable[[], Tensor], x: Pack) -> Gate:
    poison(x.q)
    return Gate.of(check(call(), x))


def check(out: Tensor, x: Pack) -> str:
    """The faults of an output, in words: of the first, the last and the longest document."""
    lengths, found = x.row.lengths, ""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    group = x.row.hq // x.row.hkv
    for b in sorted({0, len(lengths) - 1, lengths.index(max(lengths))}):
        begin, n = starts[b], lengths[b]
        draw = torch.Generator().manual_seed(0)
        rows = torch.cat([torch.tensor([0, n - 1]), torch.randperm(n, generator=draw)])
        rows = rows[:_CHECKED].unique().to(out.device)
        for h in sorted({0, x.row.hq - 1}):
            q, k, v = (
                each[begin : begin + n, at].double()
                for each, at in ((x.q, h), (x.k, h // group), (x.v, h // group))
            )
            given = (q[rows], k, v, (b, h), rows, x.score_mod, x.mask_mod)
            exact, rounded = (attention(*given, coarse=each) for each in (None, x.q.dtype))
            found += off(f"out of document {b}, head {h}", out[begin + rows, h], exact, rounded)
    return found


PACKED = Kind(make_pack, _judge, lambda peer, x: peer(x))
run = partial(
    main, "packed", packed_rows(), METHOD,
    known={
        OURS: ours, f"{OURS}-documents": documents, "fa3": flash("flash_attn_interface"),
        "fa4": flash("flash_attn.cute.interface"),
    },
    variant=variant, kind=PACKED,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run())
