"""FlashAttention-4 (package flash-attn-4) as a peer, in its own layout and its own mod forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.inputs import Inputs
from bench.refusal import Refusal
from flexattn.mods import bind

__all__ = ["fa4", "fa4_call"]


def fa4(x: Inputs) -> Callable[[], Tensor] | Refusal:
    """Its forward on [B, S, H, D] copies; refuses what it has no form for without block lists."""
    found = fa4_call(x)
    if isinstance(found, Refusal):
        return found
    call, leaves = found
    return lambda: call(*leaves).transpose(1, 2)


def fa4_call(
    x: Inputs,
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[Tensor, ...]] | Refusal:
    """Its forward, and the q, k and v that it is for: [B, S, H, D] copies of a row's."""
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        return Refusal(f"flash_attn.cute cannot be imported: {error}")
    if x.row.mask in ("documents", "blocks"):
        return Refusal(f"FA4 has no {x.row.mask} beside block lists of its own making")
    leaves = tuple(each.transpose(1, 2).contiguous() for each in (x.q, x.k, x.v))
    options: dict[str, Any] = {"causal": x.row.mask == "causal"}
    if x.row.mask == "window":
        options["window_size"] = (x.row.window, 0)
    if x.row.score == "softcap":
        options["softcap"] = x.row.cap
    elif x.row.score != "none":
        options |= _mod(x)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q, k, v, **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return call, leaves


def _mod(x: Inputs) -> dict[str, Any]:
    """ALiBi from the head's number; a relative table through its aux_tensors."""
    from cutlass import Float32, cute

    if x.row.score == "alibi":
        rate = -8.0 / x.row.shape.hq

        @cute.jit
        def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            slope = cute.math.exp2((h + 1).to(Float32) * rate, fastmath=True)
            return score + slope * (kv_idx - q_idx).to(Float32)

        return {"score_mod": alibi}
    bound = bind(x.score_mod, "score")
    assert bound is not None
    offset = x.row.shape.kv_len

    @cute.jit
    def relative(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        table = aux_tensors[0]
        bias = cute.make_rmem_tensor(1, table.element_type)
        distance = q_idx - kv_idx + offset
        bias[0] = table[h[0], distance[0]]
        return score + bias.load().to(Float32)

    return {"score_mod": relative, "aux_tensors": [bound.tensors[0]]}
