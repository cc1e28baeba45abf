"""Who serves a row: a peer turns its inputs into a callable that gives out [B, q_len, Hq, Dv]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.peers import OURS, Refusal
from bench.serving_inputs import Served
from bench.streaming import STREAMING, streaming
from bench.trees_plans import prefix_tree
from flexattn.serving import CascadePlan, DecodePlan, TreePlan

__all__ = [
    "EMPTY",
    "INVARIANT",
    "SERVING_PEERS",
    "ServingPeer",
    "served_with",
]

EMPTY = "empty kernel"
INVARIANT = f"{OURS} batch-invariant"
# Of a cascade, changes of the second pass: "own.per_sm=1".
OWN = "own."
ServingPeer: TypeAlias = Callable[[Served], "Callable[[], Tensor] | Refusal"]


def served_with(changes: Mapping[str, Any], invariant: bool = False) -> ServingPeer:
    """Ours, with these fields of the config changed from the default.

    invariant: with batch_invariant, so that each row's bits are its own.
    """

    def build(x: Served) -> Callable[[], Tensor] | Refusal:
        row = x.row
        if invariant:
            if row.variant in ("cascade", "mla", "prefix-tree"):
                return Refusal("batch invariance is for one pass over heads of 64 or 128")
            return _run(_changed(x, changes, batch_invariant=True), x)
        if row.variant == "cascade":
            return _cascade(x, changes)
        if row.variant == "prefix-tree":
            return _tree(x, changes)
        return _run(_changed(x, changes), x)

    return build


def _common(x: Served) -> dict[str, Any]:
    row = x.row
    return {
        "heads": (row.hq, row.hkv), "head_dim": (row.d, row.dv), "q_len": row.q_len,
        "device": x.q.device, "dtype": x.q.dtype, "page_size": row.page, "kv_dtype": x.k.dtype,
        "score_mod": x.score_mod, "mask_mod": x.mask_mod, "scaled": row.scaled,
        "batch": len(row.lens),
    }  # fmt: skip


def _plan(x: Served, **more: Any) -> DecodePlan:
    return DecodePlan(
        kv_len=max(x.row.lens), sinks=x.sinks is not None, shared_kv=x.row.variant == "mla",
        **_common(x), **more,
    )  # fmt: skip


def _changed(x: Served, changes: Mapping[str, Any], **more: Any) -> DecodePlan:
    found = _plan(x, **more)
    if not changes:
        return found
    return _plan(x, config=replace(found.config, **changes), **more)


def _run(plan: DecodePlan, x: Served) -> Callable[[], Tensor]:
    cache = x.k if x.row.variant == "mla" else (x.k, x.v)
    call = {
        "seq_lens": x.lens, "block_table": x.table, "sinks": x.sinks, "k_scale": x.scales,
        "v_scale": x.scales,
    }  # fmt: skip
    return lambda: plan.run(x.q, cache, **call)  # type: ignore[arg-type, return-value]


def _split(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes of the shared pass, and of the own one."""
    own = {key.removeprefix(OWN): value for key, value in changes.items() if OWN in key}
    return {key: value for key, value in changes.items() if OWN not in key}, own


def _cascade(x: Served, changes: Mapping[str, Any]) -> Callable[[], Tensor]:
    row = x.row
    assert x.table is not None
    pages = row.shared // row.page

    def plan(**more: Any) -> CascadePlan:
        own = max(row.lens) - row.shared
        return CascadePlan(prefix_len=row.shared, own_len=own, **_common(x), **more)

    found = plan()
    if changes:
        rest, own = _split(changes)
        found = plan(
            prefix_config=replace(found.prefix.config, **rest),
            config=replace(found.own.config, **own),
        )
    start = torch.full_like(x.lens, row.shared)
    call = {
        "prefix_len": start[:1].clone(), "kv_start": start, "seq_lens": x.lens,
        "prefix_table": x.table[:1, :pages].contiguous(),
        "block_table": x.table[:, pages:].contiguous(),
    }  # fmt: skip
    return lambda: found.run(x.q, (x.k, x.v), **call)[0]


def _tree(x: Served, changes: Mapping[str, Any]) -> Callable[[], Tensor]:
    row = x.row
    assert x.table is not None

    def plan(**more: Any) -> TreePlan:
        return TreePlan(kv_len=max(row.lens), **_common(x), **more)

    found = plan()
    if changes:
        rest, own = _split(changes)
        found = plan(
            shared_config=replace(found.shared.config, **rest),
            config=replace(found.own.config, **own),
        )
    found.update(prefix_tree(len(row.lens), row.nodes), x.table)
    call = {"seq_lens": x.lens, "block_table": x.table}
    return lambda: found.run(x.q, (x.k, x.v), **call)[0]


def empty(x: Served) -> Callable[[], Tensor]:
    """A kernel that does nothing: what a launch costs by the same method."""

    def call() -> Tensor:
        torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        return x.q

    return call


def cudnn(x: Served) -> Callable[[], Tensor] | Refusal:
    """cuDNN through SDPA, on a contiguous cache of its own."""
    if not x.row.uniform or x.row.variant != "plain":
        return Refusal("cuDNN through SDPA takes no lengths and no mods")
    k, v = (torch.stack([x.keys(b)[i] for b in range(len(x.row.lens))]) for i in (0, 1))
    k, v = (each.transpose(1, 2).contiguous() for each in (k, v))
    q = x.q.transpose(1, 2)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return call


def flashinfer(tensor_cores: bool) -> ServingPeer:
    """FlashInfer's paged batch decode, planned before the clock starts."""

    def build(x: Served) -> Callable[[], Tensor] | Refusal:
        row = x.row
        if row.q_len != 1 or row.variant not in ("plain", "softcap") or x.table is None:
            return Refusal("its paged decode takes one token, a paged cache, and softcap at most")
        import flashinfer

        counts = [-(-n // row.page) for n in row.lens]
        indices = torch.cat([x.table[b, :count] for b, count in enumerate(counts)])
        indptr = torch.tensor([0, *counts]).cumsum(0).int()
        last = torch.tensor([(n - 1) % row.page + 1 for n in row.lens]).int()
        buffer = torch.empty(1 << 30, dtype=torch.uint8, device=x.q.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            buffer, "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(
            indptr.to(x.q.device), indices, last.to(x.q.device), row.hq, row.hkv, row.d, row.page,
            q_data_type=x.q.dtype, kv_data_type=x.k.dtype,
            logits_soft_cap=30.0 if row.variant == "softcap" else 0.0,
        )  # fmt: skip
        q = x.q[:, 0]
        return lambda: wrapper.run(q, (x.k, x.v))[:, None]

    return build


def flashinfer_cascade(x: Served) -> Callable[[], Tensor] | Refusal:
    """FlashInfer's cascade of as many levels as a row shares, and one of own keys."""
    row = x.row
    if row.variant not in ("cascade", "prefix-tree") or row.q_len != 1 or x.table is None:
        return Refusal("its cascade is for prefixes that requests share, and one token")
    import flashinfer

    batch, column = len(row.lens), 0
    queries, indptr, indices, last = [], [], [], []
    levels = [*row.nodes, (batch, row.lens[0] - row.shared)]
    for nodes, keys in levels:
        # The first request below each node has its pages.
        firsts = [node * batch // nodes for node in range(nodes)]
        pages = -(-keys // row.page)
        queries.append(torch.tensor([*firsts, batch]).int().to(x.q.device))
        indptr.append((torch.arange(nodes + 1) * pages).int().to(x.q.device))
        indices.append(x.table[firsts, column : column + pages].flatten())
        full = torch.full((nodes,), (keys - 1) % row.page + 1, dtype=torch.int32)
        last.append(full.to(x.q.device))
        column += pages
    buffer = torch.empty(1 << 30, dtype=torch.uint8, device=x.q.device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), buffer, "NHD")
    wrapper.plan(
        queries, indptr, indices, last, row.hq, row.hkv, row.d, row.page, q_data_type=x.q.dtype,
    )  # fmt: skip
    q = x.q[:, 0]
    return lambda: wrapper.run(q, (x.k, x.v))[:, None]


SERVING_PEERS: dict[str, ServingPeer] = {
    OURS: served_with({}),
    INVARIANT: served_with({}, invariant=True),
    EMPTY: empty,
    STREAMING: streaming,
    "sdpa-cudnn": cudnn,
    "flashinfer": flashinfer(False),
    "flashinfer-tc": flashinfer(True),
    "flashinfer-cascade": flashinfer_cascade,
}
