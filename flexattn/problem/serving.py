"""A plan's work as a Problem: rows dense or cut by cu_seqlens, keys in pages or contiguous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch

from flexattn.mods.analysis.intervals import reaches_end
from flexattn.problem.problem import (
    DTYPES,
    ITEMSIZE,
    Kind,
    Problem,
    Structure,
    rounded,
)

KV_DTYPES: dict[torch.dtype, str] = {
    **DTYPES,
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_BY_NAME = {name: dtype for dtype, name in KV_DTYPES.items()}
SERVING_ITEMSIZE = {**ITEMSIZE, "float8_e5m2": 1}
# Where the keys and the heads stand in a cache of four dimensions.
LAYOUTS = {"NHD": (1, 2), "HND": (2, 1)}
# What has a scale of its own, where more than a tensor or a head has.
Scales: TypeAlias = Literal["", "page", "page_head", "token", "token_head"]
# The requests of a mixed batch that a kernel serves: all, those with few queries, the others.
Phase: TypeAlias = Literal["", "decode", "prefill"]
# A request with as many query positions decodes; of more, their times in both kernels say so.
DECODE_QUERIES = 16
# How lengths are spread in a batch.
Lengths = Literal["uniform", "ragged", "mixed"]
LENGTHS: tuple[Lengths, ...] = get_args(Lengths)
# The most columns of a product that one warp has for itself.
WARP_COLUMNS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingForm(Structure):
    """Everything that decides a serving kernel's source: no length, and of the batch its bound.

    kv_dtype: of the cache. page: keys of a page, 0 for a contiguous cache. requests: a power of
    two that is at least the largest batch. rows: packed rows (group x query positions) of the
    longest uniform request, 0 where cu_seqlens_q gives the lengths. shared_kv: V is the first
    columns of K (MLA). scaled: the cache's scales are given, one or one for each head. scales:
    finer ones are. prefix: one cache is shared by the rows of all requests (the first pass of a
    cascade). offset: a request's keys begin behind a prefix (its second pass). split_keys: of a
    batch-invariant kernel, keys of a split; 0 where splits are cut for balance. phase: of a batch
    whose prefills and decodes have a kernel each, the requests that this one serves. unit, chosen:
    a KV head of a request chooses at most so many units of its keys; 0 where all are read.
    ragged_kv: of its K and V [total_k, Hkv, D]; a sequence's queries stand at its first positions.
    """

    kind: Kind = "serving"
    kv_heads: int
    page: int
    requests: int
    rows: int
    shared_kv: bool = False
    scaled: bool = False
    scales: Scales = ""
    prefix: bool = False
    offset: bool = False
    split_keys: int = 0
    phase: Phase = ""
    unit: int = 0
    chosen: int = 0

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of the cache."""
        return SERVING_ITEMSIZE[self.kv_dtype]

    @property
    def aligned(self) -> bool:
        """True if addresses and strides are multiples of 16 bytes."""
        return self.layout.aligned

    @property
    def ragged(self) -> bool:
        """True if cu_seqlens_q gives each request's number of queries."""
        return self.rows == 0

    @property
    def far(self) -> bool:
        """True if scores or sinks may need the care of `in_base_2` (printers/spelling.py)."""
        return self.sinks != "" or (self.score is not None and reaches_end(self.score.mod.expr))

    @property
    def chunks(self) -> int:
        """Parts of a head's columns that are rows and keys of their own of warp-private products.

        A tile of rows of 256 columns has half as many rows then as its instruction has places, and
        half as many keys are the least that a warp may take.
        """
        return 2 if max(self.head_dim_qk, self.head_dim_v) > WARP_COLUMNS else 1

    @property
    def fp8(self) -> bool:
        """Calls alone have factors of heads."""
        return False

    @property
    def out_dtype(self) -> str:
        """The dtype of what comes out."""
        return self.dtype if ITEMSIZE[self.dtype] > 1 else "bfloat16"

    @property
    def product_dtype(self) -> str:
        """The dtype that tiles are multiplied in: a cache of 8 bits is exact in float16."""
        return "float16" if SERVING_ITEMSIZE[self.kv_dtype] == 1 else self.dtype

    def at(self, B: int, q_len: int) -> ServingForm:
        """The same kernel for the largest batch of other sizes, whose rows are cut alike."""
        rows = rounded(q_len * self.group * (B if self.prefix else 1)) if self.rows else 0
        return replace(self, requests=1 if self.prefix else rounded(B), rows=rows)


class _OfTorch:
    """The dtypes of a structure, as torch has them."""

    __slots__ = ()
    structure: Any

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, or of new keys and values."""
        return _BY_NAME[self.structure.dtype]

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        return _BY_NAME[self.structure.kv_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProblem(Problem, _OfTorch):
    """The work of a plan: its kernels' structure and the largest batch.

    B: requests. q_len: query positions of one, or of all together where cu_seqlens_q cuts them.
    kv_len: keys of the longest. mask_class: how lengths are spread: "uniform", all requests are as
    long; "ragged", few are long; "mixed", cu_seqlens_q cuts chunks of prefill and single queries;
    "" where nobody says. cache_layout: "NHD" [pages, page, Hkv, D] or "HND".
    """

    structure: ServingForm
    cache_layout: str = "NHD"

    @property
    def total_q(self) -> int:
        """Rows of all requests together where cu_seqlens_q cuts them, else 0."""
        return self.q_len if self.structure.ragged else 0

    @property
    def rows(self) -> int:
        """The most rows of q [rows, Hq, D]."""
        return self.total_q or self.B * self.q_len

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of outputs."""
        return _BY_NAME[self.structure.out_dtype]

    @property
    def page(self) -> int:
        """Keys of a page, 0 for a contiguous cache."""
        return self.structure.page

    @property
    def head_dim_qk(self) -> int:
        """Columns of queries and keys."""
        return self.structure.head_dim_qk

    @property
    def head_dim_v(self) -> int:
        """Columns of values and outputs."""
        return self.structure.head_dim_v

    def at(self, B: int, q_len: int, kv_len: int) -> ServingProblem:
        """The problem of other sizes."""
        structure = self.structure.at(B, q_len)
        return replace(self, structure=structure, B=B, q_len=q_len, kv_len=kv_len)

    def classes(self) -> Iterator[ServingProblem]:
        """The problem with each way in which its lengths may be spread, the likeliest first."""
        able = ("mixed",) if self.structure.ragged else ("uniform", "ragged")
        for name in (self.mask_class,) if self.mask_class else able:
            yield replace(self, mask_class=name)

    def blocks(self) -> str:
        """The cache's pages, as a record's key has them."""
        s = self.structure
        return f"page {self.page}" + (f" chosen {s.chosen}x{s.unit}" if s.unit else "")

    def layout(self) -> str:
        """The layout of the cache in a record's key."""
        names = ("shared_kv", "prefix", "offset", "aligned")
        return " ".join([self.cache_layout, *(x for x in names if getattr(self.structure, x))])

    def precision(self) -> str:
        """The other numbers of a record's key that decide a config; lse does not."""
        s = self.structure
        found = [f"kv={s.kv_dtype}"] * (s.kv_dtype != s.dtype)
        found += [f"invariant {s.split_keys}"] * (s.split_keys > 0)
        found += [f"{s.phase} alone"] * (s.phase != "")
        found += [f"scaled {s.scales}"] * (s.scales != "")
        return " ".join(found + ["scaled"] * s.scaled + ["signed-scale"] * (not s.positive_scale))

    def unserved(self) -> tuple[str, str]:
        """The kind of template that has no config that can run, and advice for the user."""
        if self.structure.split_keys:
            return "batch-invariant serving", "use head dimensions of 64, 128 or 256"
        return "serving", "use smaller head dimensions"

    def describe(self) -> str:
        """In one line."""
        s = self.structure
        parts = (
            f"serving {s.dtype} keys {s.kv_dtype} B={self.B} Hq={self.Hq} Hkv={self.Hkv}",
            f"kv_len={self.kv_len} D={s.head_dim_qk}/{s.head_dim_v} page={s.page}",
            self.mask_class,
        )
        return " ".join(filter(None, parts))


# Of what there is one scale; "tensor" also stands for one of each head: a stride tells them apart.
CacheScales: TypeAlias = Literal["", "tensor", "page", "page_head", "token", "token_head"]
# Who says where a token goes: a slot of its own, or its request's page table.
Slots: TypeAlias = Literal["int64", "int32", "table", "ragged table"]
# What has scales of its own: pages, the tokens (n) of one, heads.
AXES: dict[CacheScales, str] = {
    "": "",
    "tensor": "h",
    "page": "p",
    "page_head": "ph",
    "token": "pn",
    "token_head": "pnh",
}


@dataclass(frozen=True, slots=True)
class RopeForm:
    """The rotation of keys before they are stored.

    dim: columns that are rotated, the first ones. table: dtype of cos and sin, "" of none.
    """

    dim: int
    interleaved: bool
    table: str


@dataclass(frozen=True, slots=True)
class AppendForm:
    """Everything that decides the source of a kernel that stores: no length, and no stride.

    head_dim_v: 0 where values are columns of the keys, or are not stored. aligned: addresses and
    strides of what is read are multiples of 16 bytes.
    """

    dtype: str
    kv_dtype: str
    head_dim_qk: int
    head_dim_v: int
    heads: int
    page: int
    slots: Slots
    scales: CacheScales = ""
    rope: RopeForm | None = None
    aligned: bool = True

    @property
    def by_table(self) -> bool:
        """True if tokens are found through their request's page table."""
        return self.slots in ("table", "ragged table")

    @property
    def computed(self) -> bool:
        """True if the kernel computes and stores the scales."""
        return self.scales in ("token", "token_head")


@dataclass(frozen=True, slots=True)
class AppendProblem(_OfTorch):
    """The work of an AppendPlan: its kernel's structure, and the layout of the cache."""

    structure: AppendForm
    cache_layout: str

    @property
    def slots(self) -> torch.dtype | None:
        """The dtype of slots and positions; None where a page table says where tokens go."""
        return {"int64": torch.int64, "int32": torch.int32}.get(self.structure.slots)

    def describe(self) -> str:
        """In one line."""
        s = self.structure
        return (
            f"append {s.dtype} as {s.kv_dtype} heads={s.heads} D={s.head_dim_qk}/{s.head_dim_v} "
            f"page={s.page} {self.cache_layout} {s.slots}"
        )
