"""flex_decode(): a plan made on first use, for those who do not want to hold one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import InputError
from flexattn.mods import Bound, bind
from flexattn.problem import rounded
from flexattn.problem.serving import LAYOUTS
from flexattn.serving.cache import KVCache, Scaled, halves
from flexattn.serving.checks import refuse_types
from flexattn.serving.launching import kept_plans, making
from flexattn.serving.plan import DecodePlan
from flexattn.settings import current
from flexattn.util.locks import renewed


class _Kept(NamedTuple):
    """A plan for later calls. bound: what the key's addresses are of, alive as long as it is.

    running: its launches share a workspace, so those of a second thread come after the first's.
    """

    plan: DecodePlan
    bound: Sequence[Bound | None]
    running: threading.Lock


def flex_decode(
    q: Tensor,
    kv_cache: KVCache,
    *,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scaled: Scaled = True,
    scale: float | None = None,
    layout: str = "NHD",
    head_dim_v: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool | None = None,
) -> Tensor | Any:
    """Attention of a batch of requests over their cached keys, in one kernel for any lengths.

    q [B, q_len, Hq, D], or [total_q, Hq, D] with cu_seqlens_q int32 [B + 1]. kv_cache: (K, V),
    each [pages, page, Hkv, D] with block_table int32 [B, pages of a request], or [B, keys, Hkv, D]
    without; "HND" has heads before keys; one tensor holds K and V at [:, 0] and [:, 1], or with
    head_dim_v is MLA's, where V is the first columns of K. seq_lens int32 [B] on q's device: keys
    of each request, those of its queries included. score_mod, mask_mod: as flex_attention's, over
    positions in the request; the last query stands at the last key, and no mask_mod means that
    every query sees every key. sinks fp32 [Hq]. k_scale and v_scale fp32:
    scaled says of what, as DecodePlan's, True: [1] or [Hkv]. batch_invariant: as DecodePlan's.

    Returns out like q (with V's head dimension), and with return_lse the natural log-sum-exp fp32
    of each row. The first call of a kind compiles; hold a DecodePlan where nothing may. Where a
    CUDA graph captures it, a call has a workspace of its own. Raises InputError, ConfigError,
    ModError and UnsupportedError.
    """
    refuse_types(
        kv_cache, q=q, seq_lens=seq_lens, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    dims = {"q": (q, 3 + (cu_seqlens_q is None)), "seq_lens": (seq_lens, 1)}
    dims |= {} if block_table is None else {"block_table": (block_table, 2)}
    for name, (each, rank) in dims.items():
        if each.dim() != rank:
            raise InputError(f"{name} has shape {list(each.shape)}", f"it has {rank} dimensions")
    k = kv_cache[0] if isinstance(kv_cache, tuple) else kv_cache
    shared = not isinstance(kv_cache, tuple) and head_dim_v is not None
    if not isinstance(kv_cache, tuple) and not shared:
        k, _ = halves(kv_cache)
    if k.dim() != 4 or layout not in LAYOUTS:
        raise InputError(
            f"a cache of shape {list(k.shape)} as {layout}", f"one of {list(LAYOUTS)}"
        )
    keys_at, heads_at = LAYOUTS[layout]
    page = k.shape[keys_at] if block_table is not None else 0
    kv_len = k.shape[keys_at] if block_table is None else block_table.shape[1] * page
    total_q = 0 if cu_seqlens_q is None else _above(q.shape[0])
    if isinstance(kv_cache, tuple):
        head_dim_v = kv_cache[1].shape[-1]
    if k_scale is None and scaled is True:
        scaled = False
    if batch_invariant is None:
        batch_invariant = current().batch_invariant
    bound = [bind(score_mod, "score"), bind(mask_mod, "mask")]
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    about: dict[str, Any] = {
        "batch": _above(seq_lens.shape[0]),
        "kv_len": _above(kv_len),
        "heads": (q.shape[-2], k.shape[heads_at]),
        "head_dim": (q.shape[-1], q.shape[-1] if head_dim_v is None else head_dim_v),
        "q_len": 1 if total_q else _above(q.shape[1]),
        "total_q": total_q,
        "dtype": q.dtype,
        "device": q.device,
        "page_size": page,
        "layout": layout,
        "kv_dtype": k.dtype,
        "scale": scale,
        "sinks": sinks is not None,
        "scaled": scaled,
        "shared_kv": shared,
        "lse": return_lse,
        "batch_invariant": batch_invariant,
    }
    key = (*about.values(), *[live_identity(each) for each in bound], stream)
    # A graph may outlive a kept plan; one that is made while it captures is filled by its replays.
    captured = _captured(q)
    found: _Kept | None = None if captured else kept_plans.get(key)
    if found is None:
        with making:
            plan = DecodePlan(score_mod=score_mod, mask_mod=mask_mod, **about)
        found = _Kept(plan, bound, renewed(threading.Lock()))
        if not captured:
            kept_plans.put(key, found)
    plan = found.plan
    m = plan.problem
    out = torch.empty((*q.shape[:-1], m.head_dim_v), dtype=m.out_dtype, device=q.device)
    lse = None
    if return_lse:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    with found.running:
        return plan.run(
            q, kv_cache, seq_lens=seq_lens, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
        )  # fmt: skip


def _captured(q: Tensor) -> bool:
    """True if a CUDA graph captures what is launched now."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _above(size: int) -> int:
    """A maximum, rounded up so that few plans serve many batches."""
    return rounded(max(1, size))


def live_identity(bound: Bound | None) -> object:
    """Equal where a mod is the same and reads the same tensors, while these live."""
    if bound is None:
        return None
    captured = [(t.data_ptr(), t.shape, t.stride()) for t in bound.tensors]
    return (bound.mod.fingerprint, *captured, *bound.scalars)
