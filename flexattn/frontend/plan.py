"""plan(): one call -> the Problem, and the prepared launch that serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.device import Device, detect
from flexattn.errors import UnsupportedError
from flexattn.kernels.choose import options
from flexattn.kernels.choose.defaults import refused
from flexattn.mods import Bound, bind
from flexattn.problem import DTYPES, FP8, Layout, Problem, Shape, checks, kind_for, make_problem
from flexattn.problem.descales import NO_DESCALES, Descales
from flexattn.problem.mask_class import known_class, mask_class
from flexattn.records.store import generation
from flexattn.records.untuned import note
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import Launch, Lists, Outputs, prepare
from flexattn.settings import current
from flexattn.util.lru import Lru

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
    sinks: Tensor | None = None
    descales: Descales = NO_DESCALES


def bind_on(fn: Callable[..., Any], kind: str, q: Tensor) -> Bound:
    """Trace a mod, and see that what it captures is where q is and lies there as it reads."""
    bound = bind(fn, kind)
    assert bound is not None
    index, where = q.get_device(), q.device
    for tensor in bound.tensors:
        if tensor.get_device() != index or tensor.is_neg() or tensor.device != where:
            bind(fn, kind, q.device)  # says what is wrong, unless it is a number on the CPU
            there = tuple(each.to(q.device).resolve_neg() for each in bound.tensors)
            return bound._replace(tensors=there)
    return bound


class Plan(NamedTuple):
    """A prepared launch with the tensors that this call gives it."""

    launch: Launch
    call: Call
    lists: Lists | None
    mask: Bound | None

    def rest(self) -> tuple[Any, ...]:
        """The launch's arguments after the scale."""
        return self.launch.rest_of(self.lists, self.call.score, self.mask)

    def run(self) -> Outputs:
        """Launch on the current stream."""
        call = self.call
        return self.launch.run(
            call.q, call.k, call.v, call.scale, self.rest(), call.sinks, call.descales
        )


def plan(call: Call) -> Plan:
    """Trace the mods and find the launch: from memory when its shapes were seen, else made."""
    mask = lists = None
    if call.block_mask is not None:
        checks.check_is_block_mask(call.block_mask)
        mask = bind_on(call.block_mask.mask_mod, "mask", call.q)
        if known_class(call.block_mask) is None:
            _mask_class(call)
        lists = Lists.of(call.block_mask)
    return Plan(_find_launch(call, mask, lists), call, lists, mask)


def _find_launch(call: Call, mask: Bound | None, lists: Lists | None) -> Launch:
    q, k, v = call.q, call.k, call.v
    settings = current()
    key = (
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        call.enable_gqa, call.lse, call.max_scores, call.scale > 0,
        q.dtype == torch.float32 and checks.tf32_allowed(q),
        _identity(call.score), _identity(mask),
        _mask_identity(call, lists),
        None if call.sinks is None else (call.sinks.dtype, call.sinks.shape, call.sinks.device),
        call.descales.facts(),
        repr(call.kernel_options) if call.kernel_options else None,
        settings.mode, settings.cache, settings.cache_dir, generation(),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _prepare(call, mask, lists)
        _launches.put(key, launch)
    return launch


def _check(call: Call) -> None:
    checks.check_tensors(call.q, call.k, call.v, call.enable_gqa)
    checks.check_input(call.q, call.v)
    checks.check_sinks(call.sinks, call.q)
    if call.block_mask is not None:
        checks.check_block_mask(call.block_mask, call.q, call.k)


def _prepare(call: Call, mask: Bound | None, lists: Lists | None) -> Launch:
    _check(call)
    q, k, v = call.q, call.k, call.v
    chosen = options.parse(call.kernel_options)
    target = detect(q.device)
    B, Hq, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    fp8 = q.dtype in FP8
    kind = chosen.kind or kind_for(q_len, kv_len, B, Hq, target.num_sms, fp8)[0]
    sparsity = None
    if lists is not None:
        assert call.block_mask is not None
        sparsity = lists.sparsity(call.block_mask.BLOCK_SIZE, Hq // k.shape[1])
    problem = make_problem(
        kind,  # type: ignore[arg-type]
        FP8[q.dtype] if fp8 else DTYPES[q.dtype],
        Shape(B, Hq, k.shape[1], q_len, kv_len, head_dim, v.shape[-1]),
        call.score,
        mask,
        sparsity,
        Layout(q.stride(-1) == 1, k.stride(-1) == 1, v.stride(-1) == 1, checks.aligned(q, k, v)),
        mask_class=_mask_class(call),
        lse=call.lse,
        max_scores=call.max_scores,
        tf32=checks.tf32_allowed(q, chosen.tf32),
        positive_scale=call.scale > 0,
        sinks="" if call.sinks is None else DTYPES[call.sinks.dtype],
        rules_off=chosen.rules_off,
        tanh=chosen.tanh,
        kv_dtype=(DTYPES | FP8)[k.dtype],
    )
    if fp8:
        _check_fp8(problem, target, chosen)
    if problem.structure.kv_dtype:
        _check_mixed(problem, target, chosen)
    launch = prepare(
        problem, target, q.device, dispatcher(), chosen, q, k, v, lists, call.descales
    )
    if not chosen.rules_off and chosen.tanh == "auto":  # a tuner would tune the ordinary kernel
        note(problem, target, launch.choice.how, call.score, mask)
    return launch


def _check_fp8(problem: Problem, target: Device, chosen: options.Options) -> None:
    """Raise UnsupportedError unless Hopper's template, the only one for fp8, can serve a call."""
    why = ""
    if problem.structure.kind == "decode" or chosen.language == "triton":
        why = "kernel_options ask for a Triton template"
    elif not chosen.overrides:
        why = refused(problem, target, "gluon")
    if why:
        raise UnsupportedError(
            f"{problem.describe()} on {target.name}: {why}",
            "float8_e4m3fn is multiplied by the prefill template for Hopper alone",
            "multiply q, k and v by their descales and pass them in bfloat16",
        )


def _check_mixed(problem: Problem, target: Device, chosen: options.Options) -> None:
    """Raise UnsupportedError unless a Triton template can convert a call's keys and values."""
    refused = ""
    if problem.structure.kv_dtype in FP8.values() and 0 < target.capability < 89:
        refused = f"Triton converts eight bits on sm_89 and newer, not on {target.arch}"
    elif chosen.language == "gluon":
        refused = "kernel_options ask for the Gluon template"
    if refused:
        raise UnsupportedError(
            f"{problem.describe()} on {target.name}: {refused}",
            "keys and values that are narrower than the queries are converted by Triton's "
            "templates alone",
            f"pass key and value in {problem.structure.dtype}",
        )


def _mask_class(call: Call) -> str:
    """The mask's class; a mask that is seen for the first time is checked before it is read."""
    if call.block_mask is None:
        return ""
    if known_class(call.block_mask) is None:
        _check(call)
    return mask_class(call.block_mask)


def _identity(bound: Bound | None) -> object:
    if bound is None:
        return None
    if not bound.tensors:
        return bound.mod.fingerprint
    return (bound.mod.fingerprint, *[t.stride()[-1:] == (1,) for t in bound.tensors])


def _mask_identity(call: Call, lists: Lists | None) -> tuple[Any, ...] | None:
    mask = call.block_mask
    if mask is None or lists is None:
        return None
    return (
        known_class(mask),
        mask.BLOCK_SIZE,
        mask.seq_lengths,
        mask.kv_indices.device,
        *[None if each is None else each.shape for each in lists],
    )
