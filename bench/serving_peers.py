"""Candidates of a serving row: a peer turns its inputs into a call of out [B, q_len, Hq, Dv]."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flexattn
from bench.inputs import E4M3
from bench.peers import OURS, Refusal
from bench.serving_inputs import SCALE, Served, planned
from bench.serving_rows import WINDOWED
from bench.streaming import STREAMING, streaming
from flexattn.kernels.hopper import ragged
from flexattn.kernels.hopper.family import PREFILL as hopper
from flexattn.serving import kernels

EMPTY, PREFILL = "empty kernel", "prefill."
INVARIANT = f"{OURS} batch-invariant"
ServingPeer: TypeAlias = Callable[[Served], "Callable[[], Tensor] | Refusal"]


def served_with(changes: Mapping[str, Any], invariant: bool = False) -> ServingPeer:
    """Ours, with these fields of the config changed from the default.

    changes: behind PREFILL, fields of the config of prefills. invariant: with batch_invariant, so
    that each row's bits are its own. A plan without a kernel of prefills refuses their fields.
    """
    prefills = {
        key.removeprefix(PREFILL): value for key, value in changes.items() if PREFILL in key
    }
    others = {key: value for key, value in changes.items() if PREFILL not in key}

    def build(x: Served) -> Callable[[], Tensor] | Refusal:
        if invariant and (x.row.shares or x.row.latent or x.chosen is not None):
            return Refusal("batch invariance is for one pass over heads of 64 or 128")
        with prefills_with(prefills):
            run = planned(x, others, invariant)
        if prefills and run.func.__self__.prefill_config is None:
            return Refusal(f"a plan of this row has no kernel of prefills to have {prefills}")
        return run

    return build


@contextmanager
def prefills_with(changes: Mapping[str, Any]) -> Iterator[None]:
    """Plans that are made inside have these fields in the configs of their prefills.

    Names with an underscore are numbers of the rules by which the device lists tiles.
    """
    able = hopper.able
    fields = {name: value for name, value in changes.items() if name[0] != "_"}
    rules = {name: float(changes[name]) for name in changes if name not in fields}
    rules = {name: int(rule) if rule.is_integer() else rule for name, rule in rules.items()}

    def changed(_: Any, *about: Any) -> Iterator[Any]:
        return (replace(each, **fields) for each in able(*about))

    with patch.dict(vars(ragged), rules), patch.object(type(hopper), "able", changed):
        yield


def one_kernel(x: Served) -> Callable[[], Tensor] | Refusal:
    """Ours, whose decode kernel serves the prefills as well."""
    if not x.row.new:
        return Refusal("it is beside the kernel of prefills")
    with patch.object(kernels, "_prefill_kernels", lambda *_: None):
        return planned(x)


def empty(x: Served) -> Callable[[], Tensor]:
    """A kernel that does nothing: what a launch costs by the same method."""

    def call() -> Tensor:
        torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        return x.q

    return call


def cudnn(x: Served) -> Callable[[], Tensor] | Refusal:
    """cuDNN through SDPA, on a contiguous cache of its own."""
    if not x.row.uniform:
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
        able = row.q_len == 1 and row.variant in ("plain", "softcap") and x.chosen is None
        if not able or x.table is None:
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


def fa3(x: Served) -> Callable[[], Tensor] | Refusal:
    """FlashAttention-3 over pages, with its own choice of splits and of heads packed in rows."""
    row = x.row
    able = row.variant in ("plain", "causal", "window") and x.chosen is None
    if x.table is None or row.eight_bits or not able:
        return Refusal("it has no such mod, and its scales are of other shapes")
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError as error:
        return Refusal.of(error)
    call: dict[str, Any] = {"cache_seqlens": x.lens, "page_table": x.table}
    call["causal"] = row.variant == "causal" or bool(row.new)
    if row.variant == "window":
        call["window_size"] = (max(row.lens) // WINDOWED - 1, 0)
    if row.new:
        ends = torch.tensor([0, *row.new], device=x.q.device).cumsum(0, dtype=torch.int32)
        call |= {"cu_seqlens_q": ends, "max_seqlen_q": max(row.new)}
    return lambda: flash_attn_with_kvcache(x.q, x.k, x.v, **call)


def contiguous(x: Served) -> Callable[[], Tensor] | Refusal:
    """Our flex_attention on one request's keys as one tensor."""
    if len(x.row.lens) > 1 or not x.row.new or x.score_mod is not None or x.row.eight_bits:
        return Refusal("it is beside the causal chunk of one request")
    past, mask_mod = x.row.lens[0] - x.row.new[0], x.mask_mod
    q, k, v = (each.transpose(0, 1)[None].contiguous() for each in (x.q, *x.keys(0)))
    mask = flexattn.create_block_mask(
        lambda b, h, m, n: mask_mod(b, h, m + past, n), None, None, q.shape[2], k.shape[2],
        device=q.device,
    )  # fmt: skip

    def call() -> Tensor:
        out: Tensor = flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return call


def flashmla(x: Served) -> Callable[[], Tensor] | Refusal:
    """FlashMLA's sparse decode of the same tokens, from a cache of 656 bytes a token of its own.

    Of rows that share their pages, its sparse prefill from 16 bits. Its library is what the loader
    finds as _flashmla_C.abi3.so.
    """
    row, table = x.row, x.table
    if x.chosen is None or not row.latent or table is None:
        return Refusal("it decodes chosen tokens of a latent cache")
    try:
        ctypes.CDLL("_flashmla_C.abi3.so", ctypes.RTLD_GLOBAL)
    except OSError as error:
        return Refusal(f"{error}")
    chosen = x.chosen[:, 0].long()
    slots = table.long().gather(1, chosen // row.page) * row.page + chosen % row.page
    slots = slots.int()[:, None]
    if row.shared:
        prompt = x.q[:, 0], x.k.flatten(0, 1), slots, row.d**-0.5, row.dv, None, None, None
        return lambda: torch.ops._flashmla_C.sparse_prefill_fwd(*prompt)[0][:, None]
    if not row.eight_bits:
        return Refusal("its decode has a cache of eight bits")
    latent, rope = x.k[..., : row.dv], (x.k[..., row.dv :].float() * SCALE).to(x.q.dtype)
    scales = torch.full((*latent.shape[:3], 4), SCALE, device=x.q.device)
    parts = latent.contiguous(), scales, rope.contiguous()
    cache = torch.cat([each.view(torch.uint8) for each in parts], -1).view(E4M3)
    given: list[Any] = [x.q, cache, slots, None, None]
    beside = [None, None, None, row.dv, row.d**-0.5, None]
    decode = torch.ops._flashmla_C.sparse_decode_fwd
    # The first call shares out the work; later ones are given its tables.
    tables = decode(*given, None, None, *beside)[2:4]
    return lambda: decode(*given, *tables, *beside)[0]


SERVING_PEERS: dict[str, ServingPeer] = {
    OURS: served_with({}),
    INVARIANT: served_with({}, invariant=True),
    EMPTY: empty,
    STREAMING: streaming,
    "sdpa-cudnn": cudnn,
    "fa3": fa3,
    f"{OURS}-one-kernel": one_kernel,
    f"{OURS}-contiguous": contiguous,
    "flashinfer": flashinfer(False),
    "flashinfer-tc": flashinfer(True),
    "flashmla": flashmla,
}
