"""flex_attention(): validate, make the Problem, dispatch, launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from flexattn import checks, options
from flexattn.device import detect
from flexattn.dispatch import dispatcher
from flexattn.errors import InputError
from flexattn.launch import Launch, Lists, Outputs, prepare
from flexattn.lru import Lru
from flexattn.mods import Bound, bind
from flexattn.problem import DTYPES, Captures, Layout, Problem, Sparsity, Structure, kind_for
from flexattn.settings import current, say_once

ScoreMod = Callable[..., Tensor]
Route = Literal["kernel", "interpreter", "reference", "torch", "empty"]

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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with the scores modified and masked by two Python callables, as torch defines it.

    query [B, Hq, L, E], key [B or 1, Hkv, S, E], value [B or 1, Hkv, S, Ev]; float16, bfloat16
    or float32 (float64 on the CPU), any strides, any lengths; Hq a multiple of Hkv.
    score_mod(score, b, h, q_idx, kv_idx) -> score. block_mask: from `create_block_mask`, torch's
    or ours. scale: 1/sqrt(E) where None. kernel_options: torch's FlexKernelOptions.

    Returns out [B, Hq, L, Ev] in query's dtype; with return_lse also lse [B, Hq, L] (float32,
    natural log); with return_aux an AuxOutput of what it asks for. A row that may attend to
    nothing gives zeros and lse -inf.

    Raises InputError, ConfigError, ModError and UnsupportedError of `flexattn.errors`.
    Method: online softmax over blocks (Dao, FlashAttention-2, arXiv 2307.08691); block-sparse
    masks and score_mod as in FlexAttention (arXiv 2412.05496).
    """
    call = make_call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux,
    )  # fmt: skip
    route, why = route_of(call)
    if route == "reference":
        outputs = _reference(call)
    elif route == "torch":
        say_once(f"{why}: the call is handed to torch's flex_attention")
        outputs = _torch(call)
    elif route == "empty":
        outputs = _empty(call)
    else:
        outputs = plan(call).run()
    if return_aux is not None:
        return outputs.out, AuxOutput(lse=outputs.lse, max_scores=outputs.max_scores)
    if return_lse:
        assert outputs.lse is not None
        return outputs.out, outputs.lse
    return outputs.out


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Mapping[str, Any] | None,
    return_aux: AuxRequest | None,
) -> Call:
    """flex_attention's arguments as one value; raises InputError for what no path can take."""
    if return_lse and return_aux is not None:
        raise InputError("return_lse and return_aux", "only one of them may be given")
    if not (checks.is_dense(q) and checks.is_dense(k) and checks.is_dense(v)):
        checks.refuse_arguments(q, k, v)
    lse, max_scores = return_aux or (return_lse, False)
    scale = checks.check_scale(scale, q.shape[-1])
    score = None if score_mod is None else _bind(score_mod, "score", q)
    return Call(
        q, k, v, score_mod, score, block_mask, scale, enable_gqa, kernel_options, lse, max_scores
    )


def _bind(fn: Callable[..., Any], kind: str, q: Tensor) -> Bound:
    """Trace a mod, and see that what it captures is where q is."""
    bound = bind(fn, kind)
    assert bound is not None
    index = q.get_device()
    for tensor in bound.tensors:
        if tensor.get_device() != index:
            bind(fn, kind, q.device)  # says what is wrong, unless it is a number on the CPU
            return bound._replace(tensors=tuple(each.to(q.device) for each in bound.tensors))
    return bound


def route_of(call: Call) -> tuple[Route, str]:
    """Which path a call takes, with the reason in words."""
    q = call.q
    if not q.is_cuda and not current().interpret:
        return "reference", "tensors on the CPU are computed by plain torch"
    if torch.is_grad_enabled() and (wants := _wants_grad(call)):
        return ("torch" if q.is_cuda else "reference"), f"{wants} requires grad"
    if q.numel() == 0 or call.k.numel() == 0 or call.v.shape[-1] == 0:
        return "empty", "there is no query, or no key to attend to"
    if q.is_cuda:
        return "kernel", "tensors on a GPU"
    return "interpreter", "FLEXATTN_INTERPRET=1"


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
        mask = _bind(call.block_mask.mask_mod, "mask", call.q)
        lists = _lists(call.block_mask)
    return Plan(_find_launch(call, mask, lists), call, lists, mask)


def _find_launch(call: Call, mask: Bound | None, lists: Lists | None) -> Launch:
    q, k, v = call.q, call.k, call.v
    key = (
        q.dtype, q.device, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
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


def captures_of(bound: Bound | None) -> Captures | None:
    """What a kernel's code takes from a mod; None where the mod changes nothing."""
    if bound is None or _keeps_everything(bound):
        return None
    return Captures(bound.mod, tuple(t.stride()[-1:] == (1,) for t in bound.tensors))


def _keeps_everything(bound: Bound) -> bool:
    """torch's noop_mask, an identity score_mod, and all that simplifies to them."""
    expr = bound.mod.expr
    if bound.mod.kind == "mask":
        return expr.op == "const" and bool(expr.value)
    return expr.op == "var" and expr.value == "score"


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


def _wants_grad(call: Call) -> str:
    """The name of what requires grad, or nothing."""
    for name, tensor in (("query", call.q), ("key", call.k), ("value", call.v)):
        if tensor.requires_grad:
            return name
    learned = call.score is not None and any(each.requires_grad for each in call.score.tensors)
    return "a tensor that score_mod captures" if learned else ""


def _empty(call: Call) -> Outputs:
    checks.check_tensors(call.q, call.k, call.v, call.enable_gqa)
    q, rows = call.q, call.q.shape[:3]
    nothing = torch.full(rows, float("-inf"), device=q.device)
    return Outputs(
        q.new_zeros((*rows, call.v.shape[-1])),
        nothing if call.lse else None,
        nothing.clone() if call.max_scores else None,
    )


def _reference(call: Call) -> Outputs:
    from flexattn.reference import attention

    checks.check_tensors(call.q, call.k, call.v, call.enable_gqa)
    checks.check_devices(call.q)
    options.parse(call.kernel_options)
    if call.block_mask is not None:
        checks.check_block_mask(call.block_mask, call.q, call.k)
    out, lse, max_scores = attention(
        call.q, call.k, call.v, score_mod=call.score_mod, block_mask=call.block_mask,
        scale=call.scale,
    )  # fmt: skip
    return Outputs(
        out,
        lse.float() if call.lse else None,
        max_scores.float() if call.max_scores else None,
    )


def _torch(call: Call) -> Outputs:
    """Training: torch's own flex_attention has a backward, this library has none yet."""
    from flexattn.training import torch_flex_attention

    out, aux = torch_flex_attention()(
        call.q, call.k, call.v, score_mod=call.score_mod, block_mask=call.block_mask,
        scale=call.scale, enable_gqa=call.enable_gqa,
        kernel_options=options.for_torch(call.kernel_options),
        return_aux=AuxRequest(lse=call.lse, max_scores=call.max_scores),
    )  # fmt: skip
    return Outputs(out, aux.lse, aux.max_scores)
