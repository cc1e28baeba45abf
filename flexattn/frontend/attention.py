"""flex_attention(): from its arguments to the path that answers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from flexattn.errors import UnsupportedError, WrongKernelError
from flexattn.frontend.autograd import prepared
from flexattn.frontend.call import (
    NOT_ADMITTED,
    TENSORS,
    Call,
    admit,
    check_kernels_drop,
    check_memory,
    check_transforms,
    drawn,
    functionals,
    tangent,
    without_torch,
)
from flexattn.frontend.launch_cache import CallKey, as_given, call_key, launch_cache, remember
from flexattn.frontend.plan import plan, verified_plan
from flexattn.kernels.choose import options
from flexattn.kernels.choose.registry import plugin_module
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods.derivative import has_own_gradient
from flexattn.mods.expr import ScoreMod
from flexattn.problem import FP8, checks, out_dtype
from flexattn.problem.inputs import add_sinks
from flexattn.problem.mask_lists import query_lists
from flexattn.runtime.codecache import without_collections
from flexattn.runtime.launch import Outputs, strides_like
from flexattn.settings import current, say_once

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flexattn.frontend.selection import Selection

Route = Literal["kernel", "interpreter", "reference", "torch", "empty", "plugin"]
# Paths on which no plan is made.
PLANLESS = ("reference", "torch", "empty", "plugin")


class Extras(TypedDict, total=False):
    """The arguments that flex_attention has beyond torch's."""

    sinks: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    dropout_p: float


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | Selection | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, Any] | None = ...,
    *,
    return_aux: None = ...,
    **extras: Unpack[Extras],
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | Selection | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[True] = ...,
    kernel_options: Mapping[str, Any] | None = ...,
    *,
    return_aux: None = ...,
    **extras: Unpack[Extras],
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | Selection | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: Mapping[str, Any] | None = ...,
    *,
    return_aux: AuxRequest,
    **extras: Unpack[Extras],
) -> tuple[Tensor, AuxOutput]: ...


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Selection | None = None,
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
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with the scores modified and masked by two Python callables, as torch defines it.

    Tensors have any strides and lengths. The dtypes are float16, bfloat16 and float32, and float64
    on the CPU. On Hopper and the CPU all three may be float8_e4m3fn. Key and value may both be
    float8_e4m3fn beside any query (on sm_89 and newer, AMD and the CPU), and float16 or bfloat16
    beside a float32 one.

    Args:
        query: [B, Hq, L, E]; Hq is a multiple of Hkv.
        key: [B or 1, Hkv, S, E].
        value: [B or 1, Hkv, S, Ev].
        score_mod: score_mod(score, b, h, q_idx, kv_idx) returns the score that is used.
        block_mask: from `create_block_mask`, torch's or ours, or a `Selection` of keys.
        scale: of the scores; 1/sqrt(E) by default.
        enable_gqa: allows Hq to differ from Hkv.
        return_lse: also returns lse; `return_aux` is the newer way.
        kernel_options: torch's FlexKernelOptions.
        return_aux: which statistics to return, as an AuxRequest.
        sinks: [Hq], a logit for each query head. It joins the softmax's sum, has no value, and is
            not scaled. float16, bfloat16 or float32, or of query's dtype.
        q_descale: [B, Hq], a float32 factor of each head of a float8 query, above 0; 1 by default.
            Scores are scaled before score_mod sees them.
        k_descale: [B or 1, Hkv], the same of key. A head whose factor is not above 0 gives NaN.
        v_descale: [B or 1, Hkv], the same of value, whose part of the output it scales.
        dropout_p: the share of the weights that is dropped, from 0 to 1, with a seed from torch's
            default generator of query's device. Those that are kept are divided by 1 - dropout_p.
            As with torch's scaled_dot_product_attention, pass 0 outside of training.

    Returns:
        out [B, Hq, L, Ev] in query's dtype, bfloat16 for float8. Its memory has the order of
        query's dimensions, the last innermost. With return_lse a pair of out and lse [B, Hq, L]
        (float32, natural log). With return_aux a pair of out and an AuxOutput. lse includes the
        sink, max_scores does not. A row that may attend to nothing gives zeros, and lse -inf or
        its sink.

    Raises:
        InputError, ConfigError, ModError, UnsupportedError: for arguments that no kernel takes.
        CaptureError: on the CPU or with FLEXATTN_CHECK=1, if a mod reads outside of a tensor that
            it captures.

    Example::

        mask = create_block_mask(causal, None, None, 2000, 2000, device="cuda")
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    Method: online softmax over blocks (Dao, FlashAttention-2, arXiv 2307.08691); block-sparse
    masks and score_mod as in FlexAttention (arXiv 2412.05496); sinks as in gpt-oss (2508.10925);
    dropout by Philox4x32-7 (Salmon et al., SC11).
    """
    if block_mask is not None and hasattr(block_mask, "for_call"):  # a Selection
        beside = (
            score_mod, kernel_options, sinks, q_descale, k_descale, v_descale, dropout_p or None,
        )  # fmt: skip
        chosen: Any = block_mask
        if (apart := chosen.apart(query, key, value, enable_gqa, beside)) is not None:
            call = *apart[:3], None, apart.mask, scale, True, return_lse
            return apart.joined(flex_attention(*call, return_aux=return_aux))  # type: ignore
        block_mask = chosen.for_call(query, key)
    given = (
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux, sinks, q_descale, k_descale, v_descale, dropout_p,
    )  # fmt: skip
    if torch.compiler.is_dynamo_compiling():
        from flexattn.frontend.compiled.node import traced

        return traced(given)  # type: ignore[no-any-return]
    return answer(given)


def answer(
    arguments: tuple[Any, ...],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """The results of flex_attention for its arguments, outside of any graph."""
    given: Call = tuple.__new__(Call, arguments + NOT_ADMITTED)  # in a third of Call's own time
    key = call_key(given)
    known = launch_cache.find(key, given)
    if known is not None:
        entry, launch = known
        outputs = entry.run(launch, given)
    else:
        outputs = _serve(key, given)
    if given.return_aux is not None:
        return outputs.out, AuxOutput(lse=outputs.lse, max_scores=outputs.max_scores)
    if given.return_lse:
        assert outputs.lse is not None
        return outputs.out, outputs.lse
    return outputs.out


def _serve(key: CallKey | None, given: Call) -> Outputs:
    """The long way: check the call, choose its path, make its plan."""
    # What is new is traced, rendered, compiled and loaded.
    with without_collections():
        call = admit(given)
        route, why = _checked_route(call)
        call = drawn(call)
        key = key if as_given(given, call) else None
        if route not in PLANLESS:
            try:
                return _launched(key, given, call)
            except WrongKernelError as error:
                route, why = _without_kernels(call, error)
    return _planless(route, why, call)


def _launched(key: CallKey | None, given: Call, call: Call) -> Outputs:
    """Serve an admitted call by a kernel, and remember how."""
    if wants_grad(call):
        planned, grads = prepared(call)
        outputs = grads.attend(call.block_mask, call.q, call.k, call.v, call.sinks)
        remember(key, given, planned.call, planned.launch, planned.lists, grads.rest, grads)
        return outputs
    facts = None if key is None else (key[0][0], key[1])
    planned, found = verified_plan(lambda: plan(call, facts))
    rest = planned.rest()
    outputs = planned.run(rest) if found is None else found
    remember(key, given, call, planned.launch, planned.lists, rest)
    return outputs


def _without_kernels(call: Call, error: WrongKernelError) -> tuple[Route, str]:
    """The path of a call whose kernels are all known to be wrong here."""
    # Torch's kernel reads no scales, and drops nothing.
    narrow = call.q.dtype in FP8 or checks.mixes(call.q, call.k)
    lacks = call.q.is_cuda and (narrow or call.dropout is not None)
    if call.options.batch_invariant or lacks:
        raise error
    say_once(str(error))
    return ("torch" if call.q.is_cuda else "reference"), "no kernel is right here"


def run_admitted(call: Call) -> Outputs:
    """The outputs of an admitted call; nothing of it is stored but its launch."""
    route, why = _checked_route(call)
    if route not in PLANLESS:
        try:
            planned, outputs = verified_plan(lambda: plan(call))
        except WrongKernelError as error:
            route, why = _without_kernels(call, error)
        else:
            return planned.run() if outputs is None else outputs
    # A mod that was printed names no device for its constants.
    with torch.device(call.q.device):
        return _planless(route, why, call)


def _checked_route(call: Call) -> tuple[Route, str]:
    route, why = route_of(call)
    without = route in ("reference", "torch", "plugin") and not _nothing(call)
    if call.options.batch_invariant and without:
        raise UnsupportedError(
            f"BATCH_INVARIANT, and {why}",
            "the library's own kernels alone are batch-invariant",
            "pass tensors on a GPU, set FLEXATTN_INTERPRET=1, or leave BATCH_INVARIANT out",
        )
    if current().check and route != "empty":
        call.check_reads()
    return route, why


def _planless(route: Route, why: str, call: Call) -> Outputs:
    if route == "reference":
        return _reference(call)
    if route == "torch":
        say_once(f"{why}: the call is handed to torch's flex_attention")
        return _torch(call)
    return _empty(call) if route == "empty" else _plugin(call)


def route_of(call: Call) -> tuple[Route, str]:
    """The path that a call takes, with the reason in words."""
    q, fp8, wants = call.q, call.q.dtype in FP8, wants_grad(call)
    if wants and (fp8 or checks.mixes(q, call.k)):
        what, better = "mixed dtypes", "key and value in query's dtype"
        if fp8:
            what, better = "float8", "inputs of bfloat16"
        raise UnsupportedError(
            f"{wants} requires grad, query is {q.dtype}, key {call.k.dtype}",
            f"attention of {what} has no backward",
            f"call it under torch.no_grad(), or with {better}",
        )
    if q.device.type in checks.TORCHS:
        why = f"torch's own flex_attention serves tensors on {q.device.type}"
        if call.dropout is not None:
            raise without_torch(call, why)
        if fp8 or checks.mixes(q, call.k):
            raise UnsupportedError(
                f"query is {q.dtype}, key {call.k.dtype}, on {q.device.type}",
                "torch's own flex_attention serves that device, and takes one dtype of 16 or more "
                "bits",
                "convert them: x.to(torch.bfloat16)",
            )
        return "torch", why
    if q.device.type in checks.PLUGINS:
        return "empty" if _nothing(call) else "plugin", f"a plug-in serves {q.device.type}"
    if not q.is_cuda and not current().interpret:
        return "reference", "tensors on the CPU are computed by plain torch"
    if not q.is_cuda and fp8:
        return "reference", "the template for float8 is Hopper's, which nothing interprets"
    check_memory(_read(call))
    if call.dropout is not None:
        check_kernels_drop(call)
    if call.score is not None:
        check_transforms(call.score.tensors)
    if call.mask is not None:
        check_transforms(call.mask.tensors)
    if wants and (transformed := functionals(call.tensors)):
        if q.is_cuda:
            raise UnsupportedError(
                f"{transformed} is differentiated by torch.func",
                "a kernel reads tensors as they lie in memory, and autograd calls its backward",
                "use torch.autograd.grad, or backward()",
            )
        return "reference", f"{transformed} is differentiated by torch.func"
    if dual := tangent(_differentiable(call)):
        if q.is_cuda:
            raise UnsupportedError(
                f"{dual} has a tangent, as under torch.func.jvp",
                "no kernel computes forward-mode derivatives; plain torch does on the CPU",
                "differentiate in reverse mode: torch.func.vjp, or backward()",
            )
        return "reference", f"{dual} has a tangent"
    if _nothing(call):
        if wants:
            return "reference", f"{wants} requires grad, and there is nothing to attend to"
        return "empty", "there is no query, or no key to attend to"
    if call.beyond is not None:
        what = call.beyond.got
        if not q.is_cuda:
            return "reference", what
        if fp8 or checks.mixes(q, call.k) or call.dropout is not None:
            raise call.beyond
        return "torch", what
    if wants and call.score is not None and has_own_gradient(call.score.mod):
        why = f"{wants} requires grad, and score_mod has an autograd Function, or a hook"
        if q.is_cuda and call.dropout is not None:
            raise without_torch(call, why)
        return ("torch" if q.is_cuda else "reference"), why
    graded = f"; {wants} requires grad" if wants else ""
    if q.is_cuda:
        return "kernel", f"tensors on a GPU{graded}"
    return "interpreter", f"FLEXATTN_INTERPRET=1{graded}"


def _nothing(call: Call) -> bool:
    """True if there is no query, or no key to attend to: no number is added to another."""
    return call.q.numel() == 0 or call.k.numel() == 0 or call.v.shape[-1] == 0


def _differentiable(call: Call) -> Iterator[tuple[str, Tensor | None]]:
    """The tensors that a call may be differentiated in, with their names."""
    yield from zip(TENSORS, call.tensors, strict=True)
    for tensor in () if call.score is None else call.score.tensors:
        yield "a tensor that score_mod captures", tensor


def _read(call: Call) -> Iterator[Tensor | None]:
    """All that a launch reads by its address."""
    yield from call.tensors
    for bound in (call.score, call.mask):
        yield from () if bound is None else bound.tensors
    yield from () if call.block_mask is None else query_lists(call.block_mask)


def wants_grad(call: Call) -> str:
    """The name of what requires grad, or nothing."""
    for name, tensor in _differentiable(call) if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            return name
    return ""


def _empty(call: Call) -> Outputs:
    q, rows = call.q, call.q.shape[:3]
    shape = (*rows, call.v.shape[-1])
    out = q.new_empty_strided(shape, strides_like(q, shape), dtype=out_dtype(q.dtype)).zero_()
    lse = nothing = torch.full(rows, float("-inf"), dtype=torch.float32, device=q.device)
    if call.sinks is not None:
        out, lse = add_sinks(out, nothing, call.sinks)
    asked = call.statistics
    return Outputs(out, lse.clone() if asked.lse else None, nothing if asked.max_scores else None)


def _reference(call: Call) -> Outputs:
    from flexattn.reference import Reference, attention

    def computed(score_mod: ScoreMod | None, block_mask: BlockMask | None) -> Reference:
        return attention(
            call.q, call.k, call.v, score_mod=score_mod, block_mask=block_mask,
            scale=call.scale, sinks=call.sinks, descales=call.descales, dropout=call.dropout,
        )  # fmt: skip

    try:
        out, lse, max_scores = computed(call.score_mod, call.block_mask)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        if call.beyond is not None:
            raise call.beyond from error
        # vmap writes to no tensor that it does not map; an expression has no writes.
        mask, mask_mod = copy(call.block_mask), mask_callable(call.mask)
        if mask is not None and mask_mod is not None:
            mask.mask_mod = mask_mod
        out, lse, max_scores = computed(score_callable(call.score), mask)
    return Outputs(
        _laid_as(call.q, out),
        lse.float() if call.statistics.lse else None,
        max_scores.float() if call.statistics.max_scores else None,
    )


def _laid_as(q: Tensor, out: Tensor) -> Tensor:
    """The output with its dimensions in memory in the order of q's, as kernels and torch do."""
    strides = strides_like(q, tuple(out.shape))
    if out.stride() == strides:
        return out
    return out.new_empty_strided(out.shape, strides).copy_(out)


def _torch(call: Call) -> Outputs:
    """torch's own flex_attention, which computes what the kernels here do not.

    Raises the NoKernelError of a mod that torch does not compile either.
    """
    from torch._dynamo.exc import TorchDynamoException

    from flexattn.frontend.install import torch_flex_attention

    asked = call.statistics
    try:
        out, aux = torch_flex_attention()(
            call.q, call.k, call.v, score_mod=call.score_mod, block_mask=call.block_mask,
            scale=call.scale, enable_gqa=call.enable_gqa,
            kernel_options=options.for_torch(call.kernel_options),
            return_aux=AuxRequest(asked.lse or call.sinks is not None, asked.max_scores),
        )  # fmt: skip
    except TorchDynamoException as error:
        if call.beyond is None:
            raise
        raise call.beyond from error
    lse = aux.lse
    if call.sinks is not None:
        # torch knows no sinks: what they take from a row follows from its lse alone.
        out, lse = add_sinks(out, lse, call.sinks)
    return Outputs(out, lse if asked.lse else None, aux.max_scores)


def _plugin(call: Call) -> Outputs:
    """The outputs of the plug-in that serves the tensors' device; what it has not is refused."""
    if call.beyond is not None:
        raise call.beyond
    where, asked, graded = call.q.device, call.statistics, wants_grad(call)
    refused = f"{graded} requires grad" if graded else "sinks" if call.sinks is not None else ""
    if call.dropout is not None:
        refused = f"dropout_p={call.dropout_p}"
    if refused:
        raise UnsupportedError(
            f"{refused}, on {where}",
            f"kernels for {where.type} have no gradients, no sinks and no dropout",
            "leave them out, and call it under torch.no_grad()",
        )
    found: Outputs = plugin_module(where.type).attend(
        call.q, call.k, call.v, call.score, call.mask, call.block_mask, call.scale,
        (asked.lse, asked.max_scores),
    )  # fmt: skip
    return found
