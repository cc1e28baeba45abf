"""A plan's arguments as a Problem."""

from __future__ import annotations

from typing import Any

import torch

from flexattn.errors import InputError, InputTypeError
from flexattn.kernels.paged_decode.invariant import SPLIT_KEYS
from flexattn.mods import Bound
from flexattn.problem import (
    DENSE,
    DTYPES,
    MAX_HEADS,
    MAX_LENGTH,
    Layout,
    captures_of,
    rounded,
)
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.problem.serving import (
    KV_DTYPES,
    LAYOUTS,
    SERVING_ITEMSIZE,
    ServingForm,
    ServingProblem,
)
from flexattn.serving.cache import Scaled, asked_scales


def plan_problem(
    *,
    batch: int,
    kv_len: int,
    heads: tuple[int, int],
    head_dim: tuple[int, int],
    q_len: int = 1,
    total_q: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    page: int = 0,
    layout: str = "NHD",
    score: Bound | None = None,
    mask: Bound | None = None,
    sinks: bool = False,
    scaled: Scaled | str = False,
    shared_kv: bool = False,
    lse: bool = False,
    prefix: bool = False,
    offset: bool = False,
    positive_scale: bool = True,
    batch_invariant: bool = False,
    lengths: str = "",
) -> ServingProblem:
    """A plan's problem, by DecodePlan's names; raises InputError for what no kernel serves."""
    kv_dtype = kv_dtype or dtype
    asked = {
        "batch": batch, "q_len": q_len, "total_q": total_q, "kv_len": kv_len, "Hq": heads[0],
        "Hkv": heads[1], "head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype,
        "page_size": page, "layout": layout,
    }  # fmt: skip
    _check(asked)
    able = ("mixed",) if total_q else ("uniform", "ragged")
    if lengths and lengths not in able:
        do = "leave it out for the best record"
        raise InputError(f"lengths={lengths!r}", f"it is one of {', '.join(able)}", do)
    (Hq, Hkv), (D, Dv) = heads, head_dim
    row, key, value = D * dtype.itemsize, D * kv_dtype.itemsize, Dv * kv_dtype.itemsize
    aligned = row % 16 == 0 and key % 16 == 0 and (shared_kv or value % 16 == 0)
    found = asked_scales(scaled, page)
    form = ServingForm(
        dtype=DTYPES[dtype],
        kv_dtype=KV_DTYPES[kv_dtype],
        head_dim_qk=D,
        head_dim_v=Dv,
        group=Hq // Hkv,
        kv_heads=Hkv,
        page=page,
        requests=1 if prefix else rounded(batch),
        rows=0 if total_q else rounded((batch if prefix else 1) * q_len * (Hq // Hkv)),
        score=captures_of(score),
        mask=captures_of(mask),
        shared_kv=shared_kv,
        scaled=found.scaled,
        scales=found.scales,
        sinks="float32" if sinks else "",
        lse=lse,
        prefix=prefix,
        offset=offset,
        layout=DENSE if aligned else Layout(True, True, True, False),
        positive_scale=positive_scale,
        split_keys=SPLIT_KEYS if batch_invariant else 0,
    )
    return ServingProblem(
        structure=form, B=batch, Hq=Hq, Hkv=Hkv, q_len=total_q or q_len, kv_len=kv_len,
        mask_class=lengths, cache_layout=layout,
    )  # fmt: skip


def _check(asked: dict[str, Any]) -> None:
    """Raise InputError for what no kernel serves."""
    batch, q_len, total_q, kv_len, Hq, Hkv, dims, dtype, kv_dtype, page, layout = asked.values()
    for name, each in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if not isinstance(each, torch.dtype):
            raise InputTypeError(
                f"{name} is {each!r:.80}", f"{name} is a torch.dtype", "pass torch.bfloat16"
            )
    eight = SERVING_ITEMSIZE.get(KV_DTYPES.get(kv_dtype, "")) == 1
    rules = (
        (1 <= batch <= 2**12, "batch is between 1 and 4096"),
        (total_q > 0 or q_len >= 1, "q_len is at least 1"),
        (total_q >= 0, "total_q is at least 1; 0 means q_len for each request"),
        (1 <= kv_len <= MAX_LENGTH, f"kv_len is between 1 and {MAX_LENGTH}"),
        ((total_q or batch * q_len) * max(1, Hq) < 2**31, "rows x heads stay below 2**31"),
        (0 < Hkv <= Hq and Hq % Hkv == 0, "Hq is a multiple of Hkv, and both are above 0"),
        (Hq <= MAX_HEADS, f"Hq is at most {MAX_HEADS}"),
        (0 <= page <= 256, "a page has 1 to 256 keys; 0 means a contiguous cache"),
        (layout in LAYOUTS, f"layout is one of {', '.join(LAYOUTS)}"),
        (dtype in DTYPES, f"dtype is one of {', '.join(map(str, DTYPES))}"),
        (eight or kv_dtype == dtype, "the cache has q's dtype, float8_e4m3fn or float8_e5m2"),
        (not eight or dtype != torch.float32, "a cache of 8 bits serves queries of 16 bits"),
        (
            1 <= min(dims) and max(dims) <= MAX_HEAD_DIM,
            f"head dimensions are between 1 and {MAX_HEAD_DIM}",
        ),
    )
    for kept, rule in rules:
        if not kept:
            told = ", ".join(f"{name}={value}" for name, value in asked.items())
            raise InputError(f"DecodePlan({told})", rule)
