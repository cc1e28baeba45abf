"""The rows of calls: a shape, a mask, a score, and the useful work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Literal

Mask = Literal["full", "causal", "window", "documents", "blocks", "natten"]
Score = Literal["none", "alibi", "softcap", "relative"]

TOKENS = 32 * 1024
HEADS = {64: 32, 128: 16, 256: 8}
BLOCK = 128
# Keys of a neighbourhood, along each side of a canvas.
NATTEN = 13
# Eight documents of 8192 tokens; real lengths do not end where blocks do.
DOCUMENTS = (311, 1777, 640, 2048, 129, 1500, 1024, 763)
# Multiples of 8 up to 256 that are on no grid: of diffusion, vision, small and latent models.
DIMS = (40, 48, 72, 80, 96, 112, 160, 192, 224)
# Pairs of the backward's, 0 where values are as wide as keys.
BACKWARD_DIMS = ((48, 0), (80, 0), (96, 0), (112, 0), (160, 0), (192, 0), (224, 0), (192, 128))
# As many elements of a token's heads as the grid has.
WIDTH = 2048


@dataclass(frozen=True)
class Shape:
    """One call: q [batch, hq, q_len, d], k and v [batch, hkv, kv_len, d]."""

    batch: int
    hq: int
    hkv: int
    q_len: int
    kv_len: int
    d: int


@dataclass(frozen=True)
class Model:
    """The attention of one model: heads, head dim, and what it does to the scores.

    `window` is the number of keys before the query's own that a layer sees, 0 for all of them;
    `softcap` is 0 where there is none.
    """

    hq: int
    hkv: int
    d: int
    causal: bool = True
    window: int = 0
    softcap: float = 0.0

    def prefill(self, batch: int, length: int) -> Shape:
        """A whole prompt, or a whole image, at once."""
        return Shape(batch, self.hq, self.hkv, length, length, self.d)

    def decode(self, batch: int, length: int) -> Shape:
        """One new token for each sequence of the batch."""
        return Shape(batch, self.hq, self.hkv, 1, length, self.d)


MODELS: dict[str, Model] = {
    "llama3-8b": Model(hq=32, hkv=8, d=128),
    "llama3-70b": Model(hq=64, hkv=8, d=128),
    "mistral-7b": Model(hq=32, hkv=8, d=128, window=4096),
    "qwen3-14b": Model(hq=40, hkv=8, d=128),
    "qwen3-32b": Model(hq=64, hkv=8, d=128),
    "gemma2-9b-local": Model(hq=16, hkv=8, d=256, window=4096, softcap=50.0),
    "gemma2-9b-global": Model(hq=16, hkv=8, d=256, softcap=50.0),
    "gemma2-27b-local": Model(hq=32, hkv=16, d=128, window=4096, softcap=50.0),
    "sd21-768": Model(hq=5, hkv=5, d=64, causal=False),
}


@dataclass(frozen=True)
class Row:
    """One line of a bench.

    `window` is the number of keys before the query's own, read where mask is "window"; documents
    are causal inside; `cap` is read where score is "softcap". Where mask is "blocks", every row of
    blocks of BLOCK x BLOCK keeps a part of them at random: `density`. fp8: inputs of e4m3, with a
    factor for each head. learned: of a backward, the table of score "relative" gets a gradient.
    dv: elements of a value, 0 where it has as many as a key. dtype: where it is not the method's.
    """

    name: str
    group: str
    shape: Shape
    mask: Mask = "full"
    score: Score = "none"
    window: int = 0
    cap: float = 0.0
    density: float = 1.0
    fp8: bool = False
    learned: bool = False
    dv: int = 0
    dtype: str = ""

    @property
    def plain(self) -> bool:
        """True where kernels without mods can run it: full or causal, and scores as they are."""
        return self.mask in ("full", "causal") and self.score == "none"

    @property
    def pairs(self) -> float:
        """Pairs of query and key that the mask keeps, in one head; causal counts as one half."""
        rows, keys = self.shape.q_len, self.shape.kv_len
        if self.mask in ("full", "blocks"):
            return rows * keys * self.density
        if self.mask == "causal":
            return rows * keys / 2
        if self.mask == "documents":
            return sum(n * n for n in self.documents) / 2
        if self.mask == "natten":
            return rows * NATTEN**2
        seen = min(self.window + 1, keys)
        return seen * (seen + 1) / 2 + (rows - seen) * seen

    @property
    def documents(self) -> tuple[int, ...]:
        """Lengths of the eight documents: DOCUMENTS, as much longer or shorter as the keys are."""
        ends = accumulate(DOCUMENTS, initial=0)
        scaled = [end * self.shape.kv_len // sum(DOCUMENTS) for end in ends]
        return tuple(end - begin for begin, end in pairwise(scaled))

    @property
    def flops(self) -> float:
        """Useful floating-point operations: 2 x D and 2 x Dv for each kept pair."""
        s = self.shape
        return 2 * s.batch * s.hq * self.pairs * (s.d + (self.dv or s.d))

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once, at two bytes an element."""
        s = self.shape
        return s.batch * s.hkv * s.kv_len * (s.d + (self.dv or s.d)) * 2


def prefill_rows() -> list[Row]:
    """The grid of head dims and lengths, the mods at D = 128 and 8k, and the models' prompts."""
    rows = []
    for d, heads in HEADS.items():
        for length in (4096, 16384):
            shape = Shape(TOKENS // length, heads, heads, length, length, d)
            name = f"d{d}-{length // 1024}k"
            rows.append(Row(f"{name}-full", "grid", shape))
            rows.append(Row(f"{name}-causal", "grid", shape, "causal"))
    shape = Shape(TOKENS // 8192, HEADS[128], HEADS[128], 8192, 8192, 128)
    rows += [
        Row("d128-8k-alibi", "mods", shape, "causal", "alibi"),
        Row("d128-8k-softcap", "mods", shape, "causal", "softcap", cap=30.0),
        Row("d128-8k-relative", "mods", shape, "causal", "relative"),
        Row("d128-8k-window", "mods", shape, "window", window=1024),
        Row("d128-8k-documents", "mods", shape, "documents"),
    ]
    shape = Shape(TOKENS // 16384, HEADS[128], HEADS[128], 16384, 16384, 128)
    for part in (2, 8):
        rows.append(Row(f"d128-16k-blocks-{part}", "mods", shape, "blocks", density=1 / part))
    for d, heads in HEADS.items():
        for length in (8192, 16384):
            eight = Shape(TOKENS // length, heads, heads, length, length, d)
            name = f"d{d}-{length // 1024}k-fp8"
            rows.append(Row(f"{name}-full", "fp8", eight, fp8=True))
            rows.append(Row(f"{name}-causal", "fp8", eight, "causal", fp8=True))
        shape = Shape(TOKENS // 8192, heads, heads, 8192, 8192, d)
        rows += [
            Row(f"d{d}-8k-fp8-alibi", "mods-fp8", shape, "causal", "alibi", fp8=True),
            Row(f"d{d}-8k-fp8-softcap", "mods-fp8", shape, "causal", "softcap", 0, 30.0, fp8=True),
            Row(f"d{d}-8k-fp8-window", "mods-fp8", shape, "window", window=1024, fp8=True),
            Row(f"d{d}-8k-fp8-documents", "mods-fp8", shape, "documents", fp8=True),
        ]
    for name, shared in (("gqa8", 8), ("mqa", HEADS[128])):
        heads = HEADS[128]
        shape = Shape(TOKENS // 4096, heads, heads // shared, 4096, 4096, 128)
        rows.append(Row(f"d128-4k-{name}-full", "grid", shape))
        rows.append(Row(f"d128-4k-{name}-causal", "grid", shape, "causal"))
    # Fewer rows than a tile has: a group's heads can share one.
    for length in (32, 64):
        rows.append(Row(f"d128-q{length}-gqa4", "short", Shape(32, 32, 8, length, 4096, 128)))
    for name, model in MODELS.items():
        batch, length = (2, 9216) if name.startswith("sd21") else (1, 8192)
        mask: Mask = "window" if model.window else "causal" if model.causal else "full"
        rows.append(
            Row(
                f"{name}-prefill",
                "models",
                model.prefill(batch, length),
                mask,
                "softcap" if model.softcap else "none",
                model.window,
                model.softcap,
            )
        )
    return rows


def mods_rows() -> list[Row]:
    """Each mod at D = 128, at the length its bar is set for; plain causal first at each length."""
    heads, rows = HEADS[128], []
    for length in (8192, 16384):
        shape = Shape(TOKENS // length, heads, heads, length, length, 128)
        rows.append(Row(f"mods-{length // 1024}k-causal", "cost", shape, "causal"))
        if length == 8192:
            rows += [
                Row("mods-8k-alibi", "cost", shape, "causal", "alibi"),
                Row("mods-8k-softcap", "cost", shape, "causal", "softcap", cap=30.0),
                Row("mods-8k-relative", "cost", shape, "causal", "relative"),
            ]
        else:
            rows += [
                Row("mods-16k-window", "cost", shape, "window", window=1024),
                Row("mods-16k-documents", "cost", shape, "documents"),
            ]
    return rows


def backward_rows() -> list[Row]:
    """The grid at 4k and 16k, the same at 8k, other head dimensions, mods at 8k, and a forward."""
    rows = []
    for length in (4096, 16384, 8192):
        for d in (128, 64, 256):
            shape = Shape(TOKENS // length, HEADS[d], HEADS[d], length, length, d)
            name = f"d{d}-{length // 1024}k"
            rows.append(Row(f"{name}-full", "8k" if length == 8192 else "grid", shape))
            rows.append(replace(rows[-1], name=f"{name}-causal", mask="causal"))
    for length, (d, dv) in product((4096, 16384), BACKWARD_DIMS):
        heads = HEADS[max(64, 1 << (d - 1).bit_length())]
        shape = Shape(TOKENS // length, heads, heads, length, length, d)
        name = f"d{d}{f'-{dv}' if dv else ''}-{length // 1024}k"
        rows.append(Row(f"{name}-full", "dims", shape, dv=dv))
        rows.append(replace(rows[-1], name=f"{name}-causal", mask="causal"))
    shape = Shape(TOKENS // 8192, HEADS[128], HEADS[128], 8192, 8192, 128)
    return [
        *rows,
        Row("d128-8k-window", "mods", shape, "window", window=1024),
        Row("d128-8k-documents", "mods", shape, "documents"),
        Row("d128-8k-softcap", "mods", shape, "causal", "softcap", cap=30.0),
        Row("d128-8k-alibi", "mods", shape, "causal", "alibi"),
        Row("d128-8k-learned", "mods", shape, "causal", "relative", learned=True),
        Row("d128-8k-forward", "forward", shape, "causal"),
    ]


def decode_rows() -> list[Row]:
    """One query token: Llama-3 8B over batches and lengths, then other models at B8 and 8k."""
    grid = [(1, 1), (1, 8), (1, 128), (8, 8), (64, 4), (64, 16), (256, 1)]
    llama = MODELS["llama3-8b"]
    rows = [Row(f"b{b}-{k}k", "grid", llama.decode(b, k * 1024)) for b, k in grid]
    for name, model in MODELS.items():
        if model.causal and not model.window and name != "llama3-8b":
            score: Score = "softcap" if model.softcap else "none"
            rows.append(
                Row(
                    f"{name}-decode",
                    "models",
                    model.decode(8, 8192),
                    score=score,
                    cap=model.softcap,
                )
            )
    return rows


def shape_rows() -> list[Row]:
    """Each dimension of DIMS at 4k, full and causal; then a shape each of public models."""
    rows = []
    for d in DIMS:
        shape = Shape(8, WIDTH // d, WIDTH // d, 4096, 4096, d)
        rows.append(Row(f"dim{d}-4k-full", "dims", shape))
        rows.append(Row(f"dim{d}-4k-causal", "dims", shape, "causal"))
    return [
        *rows,
        Row("phi2-2k", "public", Shape(8, 32, 32, 2048, 2048, 80), "causal", dtype="float16"),
        Row("siglip-729", "public", Shape(32, 16, 16, 729, 729, 72)),
        Row("sd15-4k", "public", Shape(4, 8, 8, 4096, 4096, 40)),
        Row("deepseek-4k", "public", Shape(2, 32, 32, 4096, 4096, 192), "causal", dv=128),
        Row("bert-512", "public", Shape(64, 16, 16, 512, 512, 64)),
        Row("cross-4k-77", "public", Shape(16, 20, 20, 4096, 77, 64)),
        Row("gemma4-4k", "public", Shape(1, 8, 8, 4096, 4096, 512), "causal"),
        Row("gemma4-4k-full", "public", Shape(1, 8, 8, 4096, 4096, 512)),
        Row("gemma4-16k", "public", Shape(1, 8, 8, 16384, 16384, 512), "causal"),
        Row("gemma4-16k-full", "public", Shape(1, 8, 8, 16384, 16384, 512)),
        Row("fp32-2k", "public", Shape(4, 16, 16, 2048, 2048, 64), "causal", dtype="float32"),
    ]


def host_rows() -> list[Row]:
    """Calls that the GPU ends sooner than the host: repeated ones, and of a cache that grows."""
    llama, short = MODELS["llama3-8b"], Shape(1, 16, 16, 512, 512, 128)
    return [
        Row("host-decode", "host", llama.decode(1, 512)),
        Row("host-plain", "host", short),
        Row("host-causal", "host", short, "causal"),
        Row("host-causal-captured", "host", short, "causal", "alibi"),
        Row("host-growing", "host", llama.decode(1, 8192)),
    ]
