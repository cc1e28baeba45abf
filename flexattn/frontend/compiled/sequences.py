"""flexattn::attend_sequences and its backward: packed sequences without mods as ops of a graph.

The ops run Hopper's kernels that read cu_seqlens, as eager calls do. `varlen_attn` with mods, and
on other devices, is torch's node with a document mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.frontend import varlen
from flexattn.frontend.autograd import of_sinks
from flexattn.frontend.call import autocast
from flexattn.frontend.compiled.op import define_op, library, transforming
from flexattn.frontend.documents import Packing
from flexattn.frontend.packed import Pack, as_offsets, is_readable
from flexattn.problem.checks import check_scale
from flexattn.runtime.launch import Outputs


def attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, rest: dict[str, Any]
) -> Outputs:
    """out [total_q, Hq, Ev], lse [total_q, Hq] of a call that is traced; rest: its arguments."""
    scale = rest["scale"]
    out, lse = torch.ops.flexattn.attend_sequences(
        *autocast(q, k, v), rest["sinks"], packing.cu_q, None if packing.alike else packing.cu_k,
        packing.left, packing.right, None if scale is None else float(scale),
        bool(rest["kernel_options"]),
    )  # fmt: skip
    return Outputs(out, lse, None)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor | None,
    left: int, right: int, scale: float | None, in_order: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # Both are contiguous. cu_k is None where each sequence has as many keys as queries.
    cu_k = cu_q if cu_k is None else cu_k
    with torch.no_grad(), transforming(), torch.autocast("cuda", enabled=False):
        out, lse = varlen.varlen_attn(
            q, k, v, cu_q, cu_k, window=(left, right), scale=scale, sinks=sinks, return_lse=True,
            deterministic=in_order,
        )  # fmt: skip
    return out.contiguous(), lse.T.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sizes = q.shape[:2]
    return q.new_empty((*sizes, v.shape[2])), q.new_empty(sizes, dtype=torch.float32)


def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, cu_k: Tensor | None,
    out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, left: int, right: int,
    scale: float | None, in_order: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # Gradients of q, k, v and sinks (empty without any), contiguous. out, lse: of `_attend`.
    packing = Packing(
        cu_q, cu_q if cu_k is None else cu_k, q.shape[0], k.shape[0], left, right, None
    )
    factor = check_scale(scale, q.shape[2])
    with torch.no_grad(), transforming(), torch.autocast("cuda", enabled=False):
        pack = Pack(
            None, varlen.window_mask(left, right), factor,
            varlen.with_document_mask(packing, None, factor, sinks), in_order,
        )  # fmt: skip
        cu = as_offsets(packing.cu_q), as_offsets(packing.cu_k)
        if is_readable(q, k, v, *cu, sinks) and pack.has_gradients((q, k, v), len(cu_q) - 1):
            grads = dout, None if dlse is None else dlse.T[None]
            found = pack.gradients((q, k, v), (out, lse.T[None]), grads, cu, sinks)
            given = [*found[:3]]
            if sinks is not None:
                given.append(of_sinks(sinks, lse.T[None], found.delta))
        else:
            given = _by_documents(packing, (q, k, v, sinks), (dout, dlse), factor, in_order)
    empty = [q.new_empty(0, dtype=torch.float32)] if sinks is None else []
    dq, dk, dv, dsinks = (x.contiguous() for x in given + empty)
    return dq, dk, dv, dsinks


def _by_documents(
    packing: Packing, tensors: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...],
    scale: float, in_order: bool,
) -> list[Tensor]:  # fmt: skip
    # The gradients with a document mask, where no kernel of packs is right.
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        *qkv, sinks = leaves
        attend: Any = varlen.varlen_attn
        out, lse = attend(
            *qkv, packing.cu_q, packing.cu_k, window=(packing.left, packing.right), scale=scale,
            sinks=sinks, return_lse=True, deterministic=in_order,
        )  # fmt: skip
        pairs = [(x, g) for x, g in zip((out, lse.T), grads, strict=True) if g is not None]
        results, given = zip(*pairs, strict=True)
        wanted = [x for x in leaves if x is not None]
        return [*torch.autograd.grad(results, wanted, given, materialize_grads=True)]


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0, dtype=torch.float32) if sinks is None else sinks
    dq, dk, dv, dsinks = (x.new_empty(x.shape) for x in (q, k, v, dsinks))
    return dq, dk, dv, dsinks


def _saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.set_materialize_grads(False)
    ctx.given = inputs[6:]


def _differentiated(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return (None,) * 10
    saved = ctx.saved_tensors
    *found, dsinks = _BACKWARD_OP(*saved, dout, dlse, *ctx.given)
    return (*found, None if saved[3] is None else dsinks, *(None,) * 6)


_TAKES = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_q, Tensor? cu_k"
_NUMBERS = "SymInt left, SymInt right, float? scale, bool in_order"
define_op(f"attend_sequences({_TAKES}, {_NUMBERS}) -> (Tensor, Tensor)", _attend, _fake)
_BACKWARD_OP = define_op(
    f"attend_sequences_backward({_TAKES}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, "
    f"{_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _attend_backward,
    _fake_backward,
)
torch.library.register_autograd(
    "flexattn::attend_sequences", _differentiated, setup_context=_saves, lib=library
)
