"""What a plan is made for: the maxima of later batches, and the form of kernel they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexattn.errors import InputError, InputTypeError
from flexattn.kernels.paged_decode.config import (
    SERVING_ITEMSIZE,
    Scales,
    ServingConfig,
    ServingForm,
)
from flexattn.kernels.paged_decode.invariant import SPLIT_KEYS
from flexattn.mods import Bound
from flexattn.problem import DTYPES, MAX_HEADS, MAX_LENGTH, captures_of
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.records.key import rounded

KV_DTYPES: dict[torch.dtype, str] = {
    **DTYPES,
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
# Where the keys and the heads stand in a cache of four dimensions.
LAYOUTS = {"NHD": (1, 2), "HND": (2, 1)}


@dataclass(frozen=True, slots=True)
class Maxima:
    """The largest batch that a plan serves, and what all its batches have in common.

    batch: requests. q_len: query positions of each request, 1 to 16 in decoding; total_q: rows of
    all requests together where cu_seqlens_q cuts them, else 0. kv_len: keys of one request. page:
    keys of a page, 0 for a contiguous cache. layout: "NHD" [pages, page, Hkv, D] or "HND".
    """

    batch: int
    q_len: int
    total_q: int
    kv_len: int
    Hq: int
    Hkv: int
    head_dim_qk: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page: int
    layout: str

    @property
    def rows(self) -> int:
        """The most rows of q [rows, Hq, D]."""
        return self.total_q or self.batch * self.q_len

    def row_tiles(self, config: ServingConfig) -> int:
        """The most tiles of query rows that one KV head has."""
        packed = self.Hq // self.Hkv
        if self.total_q:
            return -(-self.total_q * packed // config.BLOCK_M) + self.batch
        return self.batch * -(-self.q_len * packed // config.BLOCK_M)

    def tiles(self, config: ServingConfig) -> int:
        """The most tiles that a batch is cut into."""
        return self.row_tiles(config) * self.Hkv * (-(-self.kv_len // config.BLOCK_N) + 1)

    def check(self) -> None:
        """Raise InputError for maxima that no kernel serves."""
        for name, dtype in (("dtype", self.dtype), ("kv_dtype", self.kv_dtype)):
            if not isinstance(dtype, torch.dtype):
                raise InputTypeError(
                    f"{name} is {dtype!r:.80}", f"{name} is a torch.dtype", "pass torch.bfloat16"
                )
        rules = (
            (self.batch >= 1 and self.batch <= 2**12, "batch is between 1 and 4096"),
            (self.total_q > 0 or 1 <= self.q_len, "q_len is at least 1"),
            (self.total_q >= 0, "total_q is at least 1; 0 means q_len for each request"),
            (1 <= self.kv_len <= MAX_LENGTH, f"kv_len is between 1 and {MAX_LENGTH}"),
            (self.rows * max(1, self.Hq) < 2**31, "rows x heads stay below 2**31"),
            (
                0 < self.Hkv <= self.Hq and self.Hq % self.Hkv == 0,
                "Hq is a multiple of Hkv, and both are above 0",
            ),
            (self.Hq <= MAX_HEADS, f"Hq is at most {MAX_HEADS}"),
            (0 <= self.page <= 256, "a page has 1 to 256 keys; 0 means a contiguous cache"),
            (self.layout in LAYOUTS, f"layout is one of {', '.join(LAYOUTS)}"),
            (self.dtype in DTYPES, f"dtype is one of {', '.join(map(str, DTYPES))}"),
            (
                self.kv_dtype == self.dtype
                or (
                    self.kv_dtype in KV_DTYPES and SERVING_ITEMSIZE[KV_DTYPES[self.kv_dtype]] == 1
                ),
                "the cache has q's dtype, float8_e4m3fn or float8_e5m2",
            ),
            (
                SERVING_ITEMSIZE.get(KV_DTYPES.get(self.kv_dtype, ""), 0) > 1
                or self.dtype != torch.float32,
                "a cache of 8 bits serves queries of 16 bits",
            ),
            (
                all(1 <= dim <= MAX_HEAD_DIM for dim in (self.head_dim_qk, self.head_dim_v)),
                f"head dimensions are between 1 and {MAX_HEAD_DIM}",
            ),
        )
        for kept, rule in rules:
            if not kept:
                raise InputError(f"DecodePlan for {self}", rule)


def form_of(
    maxima: Maxima,
    score: Bound | None,
    mask: Bound | None,
    *,
    shared_kv: bool = False,
    scaled: bool = False,
    scales: Scales = "",
    sinks: bool = False,
    lse: bool = False,
    prefix: bool = False,
    offset: bool = False,
    positive_scale: bool = True,
    batch_invariant: bool = False,
) -> ServingForm:
    """The form of kernel that serves these maxima."""
    group = maxima.Hq // maxima.Hkv
    row = maxima.head_dim_qk * maxima.dtype.itemsize
    key = maxima.head_dim_qk * maxima.kv_dtype.itemsize
    value = maxima.head_dim_v * maxima.kv_dtype.itemsize
    q_rows = maxima.rows if prefix else maxima.q_len
    found = ServingForm(
        dtype=DTYPES[maxima.dtype],
        kv_dtype=KV_DTYPES[maxima.kv_dtype],
        head_dim_qk=maxima.head_dim_qk,
        head_dim_v=maxima.head_dim_v,
        group=group,
        kv_heads=maxima.Hkv,
        page=maxima.page,
        requests=1 if prefix else rounded(maxima.batch),
        rows=0 if maxima.total_q else rounded(q_rows * group),
        score=captures_of(score),
        mask=captures_of(mask),
        shared_kv=shared_kv,
        scaled=scaled,
        scales=scales,
        sinks=sinks,
        lse=lse,
        prefix=prefix,
        offset=offset,
        aligned=row % 16 == 0 and key % 16 == 0 and (shared_kv or value % 16 == 0),
        positive_scale=positive_scale,
        split_keys=SPLIT_KEYS if batch_invariant else 0,
    )
    fits = found.fits_l2(maxima.batch * maxima.kv_len, q_rows * group)
    return replace(found, keys_in_l2=fits and not maxima.total_q)
