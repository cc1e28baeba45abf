"""The rows of the serving bench: lengths of a batch, what is done to its scores, its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Variant = Literal[
    "plain", "softcap", "alibi", "window", "sinks", "tree", "causal", "by-position", "fp8",
    "fp8-token-head", "cascade", "mla", "mla-fp8", "prefix-tree",
]  # fmt: skip
# Heads of other public models, and pages of one key, with batches and thousands of keys.
HEADS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("gemma3", 32, 4, {"hq": 8, "hkv": 4, "d": 256, "dv": 256}),
    ("gemma2", 8, 8, {"hq": 16, "hkv": 8, "d": 256, "dv": 256}),
    ("starcoder", 16, 8, {"hq": 48, "hkv": 1}),
    ("gpt-oss", 32, 4, {"hq": 64, "hkv": 8, "d": 64, "dv": 64}),
    ("qwen", 32, 4, {"hq": 40, "hkv": 8}),
    ("llama2", 16, 2, {"hq": 32, "hkv": 32}),
    ("pages-of-1", 16, 4, {"page": 1}),
)
WINDOWED = 2  # a windowed request has so many times the keys that its window shows


@dataclass(frozen=True)
class ServingRow:
    """One line: a batch of `lens` keys each, q_len query positions, a page of 16 unless said.

    shared: keys of the prefix that all requests of a cascade share, part of each one's length.
    dtype: of the queries, and of the cache where it has not eight bits.
    levels: of a prefix tree, how many nodes each level has, and keys of each; requests that follow
    one another share them, and `shared` is the sum of the keys. new: query rows of each request of
    a ragged batch, which is causal; none, and all have q_len. chosen: each request and key head
    reads the k units, of so many keys, that random scores put first; (0, 0): all keys.
    Llama-3 8B's heads: 32 of the query, 8 of the keys, of 128 elements.
    """

    name: str
    group: str
    lens: tuple[int, ...]
    variant: Variant = "plain"
    q_len: int = 1
    page: int = 16
    shared: int = 0
    levels: tuple[tuple[int, int], ...] = ()
    hq: int = 32
    hkv: int = 8
    d: int = 128
    dv: int = 128
    dtype: str = "bfloat16"
    new: tuple[int, ...] = ()
    chosen: tuple[int, int] = (0, 0)

    @property
    def uniform(self) -> bool:
        """True where peers that know no lengths can run it."""
        alike = len(set(self.lens)) == 1 and not self.chosen[1]
        return alike and self.variant == "plain" and self.q_len == 1

    @property
    def latent(self) -> bool:
        """True where the values are columns of the keys."""
        return self.variant in ("mla", "mla-fp8")

    @property
    def eight_bits(self) -> bool:
        """True of a cache of eight bits."""
        return self.variant in ("fp8", "fp8-token-head", "mla-fp8")

    @property
    def scaled(self) -> Literal["token_head"] | bool:
        """Of what its cache has scales."""
        return "token_head" if self.variant == "fp8-token-head" else self.eight_bits

    @property
    def shares(self) -> bool:
        """True where a plan reads the keys that requests share once."""
        return self.variant in ("cascade", "prefix-tree")

    @property
    def rows(self) -> tuple[int, ...]:
        """Query rows of each request."""
        return self.new or (self.q_len,) * len(self.lens)

    @property
    def nodes(self) -> tuple[tuple[int, int], ...]:
        """Of each level of what requests share the number of nodes, and keys of each."""
        return self.levels or (((1, self.shared),) if self.shared else ())

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that must be read once, at the cache's width, with their scales."""
        k, unit = self.chosen
        keys = sum(min(n, k * unit or n) for n in self.lens)
        if self.shares:
            keys -= sum(each * (len(self.lens) - nodes) for nodes, each in self.nodes)
        if self.variant == "window":
            keys //= WINDOWED
        width = self.d if self.latent else self.d + self.dv
        scales = 8 if self.variant == "fp8-token-head" else 0
        return keys * self.hkv * (width * (1 if self.eight_bits else 2) + scales)


def serving_rows() -> list[ServingRow]:
    """Issue 6's table, then each mod beside plain decode, eight bits, prefixes, MLA, long ones."""
    rows = []
    for batch, k in ((1, 1), (1, 8), (1, 128), (8, 8), (64, 4), (64, 16), (256, 1)):
        name, lens = f"b{batch}-{k}k", (k * 1024,) * batch
        rows.append(ServingRow(name, "paged", lens))
        rows.append(ServingRow(f"{name}-contiguous", "contiguous", lens, page=0))
    ragged = tuple(max(128, int(32768 / (i + 1) ** 0.8)) for i in range(64))
    rows.append(ServingRow("ragged-b64", "paged", ragged))
    for batch, k in ((8, 8), (64, 4)):
        name, lens = f"b{batch}-{k}k", (k * 1024,) * batch
        rows += [ServingRow(f"{name}-{v}", "mods", lens, v) for v in ("softcap", "alibi", "sinks")]
        rows.append(ServingRow(f"{name}-window", "mods", (WINDOWED * lens[0],) * batch, "window"))
        rows.append(ServingRow(f"{name}-q8", "mods", lens, q_len=8))
        rows.append(ServingRow(f"{name}-q8-tree", "mods", lens, "tree", q_len=8))
    # A chunk of prefill.
    rows.append(ServingRow("b1-4k-q1k", "chunks", (4096,), "causal", q_len=1024))
    for batch, k in ((64, 16), (1, 8)):
        name, lens = f"b{batch}-{k}k", (k * 1024,) * batch
        rows.append(ServingRow(f"{name}-fp8", "fp8", lens, "fp8"))
        rows.append(ServingRow(f"{name}-fp8-token-head", "fp8", lens, "fp8-token-head"))
    prefix, own = 8192, 256
    lens = (prefix + own,) * 32
    rows.append(ServingRow("b32-8k-256-plain", "cascade", lens, shared=prefix))
    rows.append(ServingRow("b32-8k-256-cascade", "cascade", lens, "cascade", shared=prefix))
    # A system prompt, tools, conversations, and branches of each.
    levels = ((1, 8192), (4, 4096), (16, 2048))
    prefix = sum(keys for _, keys in levels)
    about = {"shared": prefix, "levels": levels}
    for name, variant in (("plain", "plain"), ("tree", "prefix-tree")):
        lens = (prefix + own,) * 64
        rows.append(ServingRow(f"b64-3-levels-{name}", "trees", lens, variant, **about))  # type: ignore[arg-type]
    rows += [ServingRow(f"b{batch}-1m", "long", (2**20,) * batch) for batch in (1, 8)]
    for name, batch, k, about in HEADS:
        rows.append(ServingRow(f"{name}-b{batch}-{k}k", "heads", (k * 1024,) * batch, **about))  # type: ignore[arg-type]
    mla = {"page": 64, "hq": 128, "hkv": 1, "d": 576, "dv": 512}
    rows.append(ServingRow("mla-b64-4k", "mla", (4096,) * 64, "mla", **mla))  # type: ignore[arg-type]
    for batch, k in ((64, 4), (1, 16)):
        few, lens = {**mla, "hq": 16}, (k * 1024,) * batch
        rows.append(ServingRow(f"mla-h16-b{batch}-{k}k", "mla", lens, "mla", **few))  # type: ignore[arg-type]
    for batch in (1, 32):
        lens = (32768,) * batch
        rows.append(ServingRow(f"quest-b{batch}-32k", "chosen", lens, chosen=(128, 16)))
        rows.append(ServingRow(f"tokens-b{batch}-32k", "chosen", lens, chosen=(2048, 1)))
    for heads, batch in ((16, 8), (128, 1), (128, 8), (128, 64)):
        for variant, name in (("mla", ""), ("mla-fp8", "-fp8")):
            about = {**mla, "hq": heads, "chosen": (2048, 1)}
            named = f"dsa-h{heads}-b{batch}-32k{name}"
            rows.append(ServingRow(named, "chosen", (32768,) * batch, variant, **about))  # type: ignore[arg-type]
    # A prompt of 2,048 rows that choose each for themselves: requests of the same pages.
    about = {**mla, "chosen": (2048, 1), "shared": 32768}
    rows.append(ServingRow("dsa-h128-prompt-2k", "chosen", (32768,) * 2048, "mla", **about))  # type: ignore[arg-type]
    return rows
