"""plan(): one call -> the Problem, and the prepared launch that serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn import checks, options
from flexattn.device import detect
from flexattn.dispatch import dispatcher
from flexattn.launch import Launch, Lists, Outputs, prepare
from flexattn.lru import Lru
from flexattn.mods import Bound, bind
from flexattn.problem import (
    DTYPES,
    Layout,
    Problem,
    Sparsity,
    Structure,
    captures_of,
    kind_for,
)

ScoreMod = Callable[..., Tensor]

_launches: Lru[Any, Launch] = Lru(4096)


class Call(NamedTuple):
    """One call's arguments, as every path through this file hands them on."""

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None
    score: Bound | None
    block_mask: BlockMask | None
    scale: float
    enable_gqa: bool
    kernel_options: Mapping[str, Any] | None
    lse: bool
    max_scores: bool


def bind_on(fn: Callable[..., Any], kind: str, q: Tensor) -> Bound:
    """Trace a mod, and see that what it captures is where q is."""
    bound = bind(fn, kind)
    assert bound is not None
    index = q.get_device()
    for tensor in bound.tensors:
        if tensor.get_device() != index:
            bind(fn, kind, q.device)  # says what is wrong, unless it is a number on the CPU
            return bound._replace(tensors=tuple(each.to(q.device) for each in bound.tensors))
    return bound


class Plan(NamedTuple):
    """A prepared launch with the tensors that this call gives it."""

    launch: Launch
    call: Call
    lists: Lists | None
    mask: Bound | None

    def run(self) -> Outputs:
        """Launch on the current stream."""
        call = self.call
        return self.launch.run(
            call.q, call.k, call.v, call.scale, self.lists, call.score, self.mask
        )


def plan(call: Call) -> Plan:
    """Trace the mods and find the launch: from memory when its shapes were seen, else made."""
    mask = lists = None
    if call.block_mask is not None:
        checks.check_is_block_mask(call.block_mask)
        mask = bind_on(call.block_mask.mask_mod, "mask", call.q)
        lists = _lists(call.block_mask)
    return Plan(_find_launch(call, mask, lists), call, lists, mask)


def _find_launch(call: Call, mask: Bound | None, lists: Lists | None) -> Launch:
    q, k, v = call.q, call.k, call.v
    key = (
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        call.enable_gqa, call.lse, call.max_scores, call.scale > 0,
        q.dtype == torch.float32 and checks.tf32_allowed(q),
        _identity(call.score), _identity(mask),
        _mask_identity(call.block_mask, lists),
        repr(call.kernel_options) if call.kernel_options else None,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _prepare(call, mask, lists)
        _launches.put(key, launch)
    return launch


def _prepare(call: Call, mask: Bound | None, lists: Lists | None) -> Launch:
    q, k, v = call.q, call.k, call.v
    checks.check_tensors(q, k, v, call.enable_gqa)
    checks.check_kernel_input(q, v)
    if call.block_mask is not None:
        checks.check_block_mask(call.block_mask, q, k)
    chosen = options.parse(call.kernel_options)
    target = detect(q.device)
    B, Hq, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    kind = chosen.kind or kind_for(q_len, kv_len, B, Hq, target.num_sms)[0]
    sparsity = None
    if lists is not None:
        assert call.block_mask is not None
        q_block, kv_block = call.block_mask.BLOCK_SIZE
        per_head = lists.kv_num.shape[1] > 1 and Hq != k.shape[1]
        sparsity = Sparsity(q_block, kv_block, lists.full_idx is not None, per_head)
    structure = Structure(
        kind=kind,  # type: ignore[arg-type]
        dtype=DTYPES[q.dtype],
        head_dim_qk=head_dim,
        head_dim_v=v.shape[-1],
        group=Hq // k.shape[1] if kind == "decode" else 0,
        score=captures_of(call.score),
        mask=captures_of(mask),
        sparsity=sparsity,
        layout=Layout(
            q.stride(-1) == 1, k.stride(-1) == 1, v.stride(-1) == 1, checks.aligned(q, k, v)
        ),
        lse=call.lse,
        max_scores=call.max_scores,
        tf32=checks.tf32_allowed(q),
        positive_scale=call.scale > 0,
    )
    problem = Problem(structure, B, Hq, k.shape[1], q_len, kv_len)
    return prepare(problem, target, q.device, dispatcher(), chosen, q, k, v, lists)


def _identity(bound: Bound | None) -> tuple[Any, ...] | None:
    if bound is None:
        return None
    return (bound.mod.fingerprint, *[t.stride()[-1:] == (1,) for t in bound.tensors])


def _mask_identity(mask: BlockMask | None, lists: Lists | None) -> tuple[Any, ...] | None:
    if mask is None or lists is None:
        return None
    return (
        mask.BLOCK_SIZE,
        mask.seq_lengths,
        mask.kv_indices.device,
        *[None if each is None else each.shape for each in lists],
    )


def _lists(mask: BlockMask) -> Lists:
    return Lists(
        _list(mask.kv_num_blocks),
        _list(mask.kv_indices),
        None if mask.full_kv_num_blocks is None else _list(mask.full_kv_num_blocks),
        None if mask.full_kv_indices is None else _list(mask.full_kv_indices),
    )


def _list(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int32:
        tensor = tensor.to(torch.int32)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
