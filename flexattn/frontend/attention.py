"""flex_attention(): validate, make the Problem, dispatch, launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from flexattn.errors import InputError, InputTypeError, UnsupportedError
from flexattn.frontend.guards import Arguments, recall, remember
from flexattn.frontend.plan import Call, ScoreMod, bind_on, plan
from flexattn.frontend.transforms import check_transforms, tangent
from flexattn.kernels.choose import options
from flexattn.mods import Bound
from flexattn.problem import DTYPES, FP8, checks, out_dtype
from flexattn.problem.descales import Descales
from flexattn.problem.mask_class import keeps_all
from flexattn.problem.read_checks import check_reads
from flexattn.problem.sinks import add_sinks
from flexattn.runtime.compiler_context import without_collections
from flexattn.runtime.launch import Outputs, strides_like
from flexattn.settings import current, say_once

Route = Literal["kernel", "interpreter", "reference", "torch", "empty"]
# Paths on which no plan is made, which would check the call.
PLANLESS = ("reference", "torch", "empty")


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
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with the scores modified and masked by two Python callables, as torch defines it.

    query [B, Hq, L, E], key [B or 1, Hkv, S, E], value [B or 1, Hkv, S, Ev]; float16, bfloat16
    or float32 (float64 on the CPU), any strides, any lengths; Hq a multiple of Hkv. On Hopper and
    the CPU also float8_e4m3fn. Key and value may both be float8_e4m3fn beside any query (on sm_89
    and newer, AMD and the CPU), and float16 or bfloat16 beside a float32 one.
    score_mod(score, b, h, q_idx, kv_idx) -> score. block_mask: from `create_block_mask`, torch's
    or ours. scale: 1/sqrt(E) where None. kernel_options: torch's FlexKernelOptions.
    sinks [Hq]: a logit for each query head that joins the softmax's sum and has no value, as a
    score after score_mod: not scaled. float16, bfloat16 or float32, or of query's dtype.
    q_descale [B, Hq], k_descale, v_descale [B or 1, Hkv]: float32 factors of each head of float8
    inputs, 1 where None: scores are scaled before score_mod sees them, values in what comes out.
    Those of query and key are above 0, else their heads give NaN.

    Returns out [B, Hq, L, Ev] in query's dtype, bfloat16 for float8; with return_lse also lse
    [B, Hq, L] (float32, natural log); with return_aux an AuxOutput of what it asks for. out lies
    in memory in the order of query's dimensions, the last innermost. lse includes the sink,
    max_scores does not. A row that may attend to nothing gives zeros, and lse -inf or its sink.

    Raises InputError, ConfigError, ModError and UnsupportedError of `flexattn.errors`, and on the
    CPU or with FLEXATTN_CHECK=1 CaptureError where a mod reads outside of a tensor it captures.
    Method: online softmax over blocks (Dao, FlashAttention-2, arXiv 2307.08691); block-sparse
    masks and score_mod as in FlexAttention (arXiv 2412.05496); sinks as in gpt-oss (2508.10925).
    """
    if torch.compiler.is_dynamo_compiling():
        from flexattn.frontend.graph_break import outside

        return outside(  # type: ignore[no-any-return]
            flex_attention, query, key, value, score_mod, block_mask, scale, enable_gqa,
            return_lse, kernel_options, return_aux=return_aux, sinks=sinks,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
    given = Arguments(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux, sinks, q_descale, k_descale, v_descale,
    )  # fmt: skip
    outputs = recall(given) or _serve(given)
    if return_aux is not None:
        return outputs.out, AuxOutput(lse=outputs.lse, max_scores=outputs.max_scores)
    if return_lse:
        assert outputs.lse is not None
        return outputs.out, outputs.lse
    return outputs.out


def _serve(given: Arguments) -> Outputs:
    """The long way: validate, choose the path, make the plan."""
    # What is new is traced, rendered, compiled and loaded.
    with without_collections():
        call = make_call(*given)
        route, why = route_of(call)
        if route not in PLANLESS:
            planned = plan(call)
            if current().check:
                _check_reads(call, planned.mask)
            outputs = planned.run()
            remember(given, planned)
            return outputs
    mask = check_call(call)
    if current().check and route != "empty":
        _check_reads(call, mask)
    if route == "reference":
        return _reference(call)
    if route == "torch":
        say_once(f"{why}: the call is handed to torch's flex_attention")
        return _torch(call)
    return _empty(call)


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
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Call:
    """flex_attention's arguments as one value; raises InputError for what no path can take."""
    options.check_mapping(kernel_options)
    if return_lse and return_aux is not None:
        raise InputError("return_lse and return_aux", "only one of them may be given")
    if not isinstance(return_aux, (AuxRequest, NoneType)):
        raise InputTypeError(
            f"return_aux is {return_aux!r:.80}", "it is an AuxRequest", "pass AuxRequest(lse=True)"
        )
    if not (checks.is_dense(q) and checks.is_dense(k) and checks.is_dense(v)):
        checks.refuse_arguments(q, k, v)
    check_transforms((q, k, v, sinks))
    checks.check_devices(q)
    if isinstance(block_mask, BlockMask) and keeps_all(block_mask):
        block_mask = None
    # Kernels read memory as it is; a conjugate's imaginary part is the negative of its own.
    q, k, v = _autocast(q.resolve_neg(), k.resolve_neg(), v.resolve_neg())
    descales = Descales(q_descale, k_descale, v_descale)
    checks.check_descales(descales, q, k)
    if any(x is not None and x.is_neg() for x in descales):
        descales = Descales(*(None if x is None else x.resolve_neg() for x in descales))
    lse, max_scores = return_aux or (return_lse, False)
    scale = checks.check_scale(scale, q.shape[-1])
    score = None if score_mod is None else bind_on(score_mod, "score", q)
    if sinks is not None:
        checks.check_sinks(sinks, q)
        sinks = sinks.contiguous().resolve_neg()
    return Call(
        q, k, v, score_mod, score, block_mask, scale, enable_gqa, kernel_options, lse, max_scores,
        sinks, descales,
    )  # fmt: skip


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast the inputs take its dtype, as torch's flex_attention lets them."""
    where = q.device.type
    if not torch.is_autocast_enabled(where) or q.dtype not in DTYPES:
        return q, k, v
    dtype = torch.get_autocast_dtype(where)
    # Eight bits are converted where they are multiplied, to the same numbers.
    k, v = (x if x.dtype in FP8 else x.to(dtype) for x in (k, v))
    return q.to(dtype), k, v


def route_of(call: Call) -> tuple[Route, str]:
    """Which path a call takes, with the reason in words."""
    q, fp8 = call.q, call.q.dtype in FP8
    if fp8 and torch.is_grad_enabled() and (wants := _wants_grad(call)):
        raise UnsupportedError(
            f"{wants} requires grad, query is {q.dtype}",
            "attention of float8 has no backward",
            "call it under torch.no_grad(), or with inputs of bfloat16",
        )
    if checks.mixes(q, call.k) and torch.is_grad_enabled() and (wants := _wants_grad(call)):
        raise UnsupportedError(
            f"{wants} requires grad, query is {q.dtype}, key {call.k.dtype}",
            "attention of mixed dtypes has no backward",
            "call it under torch.no_grad(), or with key and value in query's dtype",
        )
    if not q.is_cuda and not current().interpret:
        return "reference", "tensors on the CPU are computed by plain torch"
    if not q.is_cuda and fp8:
        return "reference", "the template for float8 is Hopper's, which nothing interprets"
    if torch.is_grad_enabled() and (wants := _wants_grad(call)):
        return ("torch" if q.is_cuda else "reference"), f"{wants} requires grad"
    if wants := tangent(_differentiable(call)):
        if q.is_cuda:
            raise UnsupportedError(
                f"{wants} has a tangent, as under torch.func.jvp",
                "no kernel computes forward-mode derivatives; plain torch does on the CPU",
                "differentiate in reverse mode: torch.func.vjp, or backward()",
            )
        return "reference", f"{wants} has a tangent"
    if q.numel() == 0 or call.k.numel() == 0 or call.v.shape[-1] == 0:
        return "empty", "there is no query, or no key to attend to"
    if q.is_cuda:
        return "kernel", "tensors on a GPU"
    return "interpreter", "FLEXATTN_INTERPRET=1"


def _differentiable(call: Call) -> Iterator[tuple[str, Tensor | None]]:
    """The tensors that a call may be differentiated in, with their names."""
    yield from (("query", call.q), ("key", call.k), ("value", call.v), ("sinks", call.sinks))
    yield from zip(("q_descale", "k_descale", "v_descale"), call.descales, strict=True)
    for tensor in () if call.score is None else call.score.tensors:
        yield "a tensor that score_mod captures", tensor


def _wants_grad(call: Call) -> str:
    """The name of what requires grad, or nothing."""
    for name, tensor in _differentiable(call):
        if tensor is not None and tensor.requires_grad:
            return name
    return ""


def check_call(call: Call) -> Bound | None:
    """The rules that a plan checks, for the paths that make none; what mask_mod is bound to."""
    checks.check_tensors(call.q, call.k, call.v, call.enable_gqa)
    checks.check_input(call.q, call.v, float64=True)
    checks.check_sinks(call.sinks, call.q)
    options.parse(call.kernel_options)
    if call.block_mask is None:
        return None
    checks.check_block_mask(call.block_mask, call.q, call.k)
    return bind_on(call.block_mask.mask_mod, "mask", call.q)


def _check_reads(call: Call, mask: Bound | None) -> None:
    check_reads(
        call.q, call.k, call.scale, call.descales, call.score_mod, call.score, call.block_mask,
        mask,
    )  # fmt: skip


def _empty(call: Call) -> Outputs:
    q, rows = call.q, call.q.shape[:3]
    shape = (*rows, call.v.shape[-1])
    out = q.new_empty_strided(shape, strides_like(q, shape), dtype=out_dtype(q.dtype)).zero_()
    lse = nothing = torch.full(rows, float("-inf"), dtype=torch.float32, device=q.device)
    if call.sinks is not None:
        out, lse = add_sinks(out, nothing, call.sinks)
    return Outputs(out, lse.clone() if call.lse else None, nothing if call.max_scores else None)


def _reference(call: Call) -> Outputs:
    from flexattn.reference import attention

    out, lse, max_scores = attention(
        call.q, call.k, call.v, score_mod=call.score_mod, block_mask=call.block_mask,
        scale=call.scale, sinks=call.sinks, descales=call.descales,
    )  # fmt: skip
    return Outputs(
        _laid_as(call.q, out),
        lse.float() if call.lse else None,
        max_scores.float() if call.max_scores else None,
    )


def _laid_as(q: Tensor, out: Tensor) -> Tensor:
    """The output with its dimensions in memory in the order of q's, as kernels and torch do."""
    strides = strides_like(q, tuple(out.shape))
    if out.stride() == strides:
        return out
    return out.new_empty_strided(out.shape, strides).copy_(out)


def _torch(call: Call) -> Outputs:
    """Training: torch's own flex_attention has a backward, this library has none yet."""
    from flexattn.frontend.training import torch_flex_attention

    out, aux = torch_flex_attention()(
        call.q, call.k, call.v, score_mod=call.score_mod, block_mask=call.block_mask,
        scale=call.scale, enable_gqa=call.enable_gqa,
        kernel_options=options.for_torch(call.kernel_options),
        return_aux=AuxRequest(
            lse=call.lse or call.sinks is not None, max_scores=call.max_scores
        ),
    )  # fmt: skip
    lse = aux.lse
    if call.sinks is not None:
        # torch knows no sinks: what they take from a row follows from its lse alone.
        out, lse = add_sinks(out, lse, call.sinks)
    return Outputs(out, lse if call.lse else None, aux.max_scores)
