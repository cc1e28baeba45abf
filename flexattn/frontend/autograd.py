"""Autograd around a call: its forward is the planned launch, its backward plans one of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.errors import UnsupportedError
from flexattn.frontend.call import Call
from flexattn.frontend.gradients import Asked, check_gradients, run_backward
from flexattn.frontend.plan import Plan, plan
from flexattn.runtime.launch import Outputs


def with_gradients(call: Call) -> Outputs:
    """Serve an admitted call whose results can be differentiated.

    In q, k, v, sinks and the floating tensors that score_mod captures, through out and lse.
    max_scores has no gradient. Raises UnsupportedError for what has no derivative, before it runs.
    """
    check_gradients(call)
    asked = call.statistics
    # lse is saved for the backward; nothing else is, beside inputs and output.
    planned = plan(call._replace(return_lse=False, return_aux=_with_lse(call)))
    captured = () if call.score is None else call.score.tensors
    apply: Any = _Attention.apply
    out, lse, maxima = apply(
        planned, Asked.of(call), call.q, call.k, call.v, call.sinks, *captured
    )
    return Outputs(out, lse if asked.lse else None, maxima)


def _with_lse(call: Call) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True, max_scores=call.statistics.max_scores)


class _Attention(torch.autograd.Function):
    """Of (plan, asked, q, k, v, sinks, *score_mod's tensors): out, lse and max_scores."""

    @staticmethod
    def forward(
        ctx: Any,
        planned: Plan,
        asked: Asked,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        outputs = planned.run()
        assert outputs.lse is not None
        masked = () if asked.mask is None else asked.mask.tensors
        ctx.save_for_backward(q, k, v, outputs.out, outputs.lse, sinks, *captured, *masked)
        ctx.set_materialize_grads(False)
        if outputs.max_scores is not None:
            ctx.mark_non_differentiable(outputs.max_scores)
        # Tensors are saved as autograd saves them, and by nobody else.
        ctx.asked, ctx.captured = _without_tensors(asked), len(captured)
        return outputs.out, outputs.lse, outputs.max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> Any:
        """Gradients in the order of forward's arguments."""
        if dout is None and dlse is None:
            return (None,) * (6 + ctx.captured)
        saved = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[2:])
        # Only where a graph of the gradients is asked for is there one to refuse.
        run = _Gradient.apply if torch.is_grad_enabled() else _gradients
        found = run(ctx.asked, ctx.captured, wanted, dout, dlse, *saved)
        return (None, None, *found)


class _Gradient(torch.autograd.Function):
    """The gradients of _Attention, whose own have no kernel."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "the gradients of flex_attention are differentiated again",
            "its backward has no backward",
            "use torch.nn.functional.scaled_dot_product_attention's math backend, or plain torch",
        )


def _gradients(
    asked: Asked,
    captures: int,
    wanted: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    *saved: Any,
) -> tuple[Tensor | None, ...]:
    """Those of (q, k, v, sinks, *captured); wanted: which of them are asked for."""
    q, k, v, out, lse, sinks, *others = saved
    asked = _with_tensors(asked, others[:captures], others[captures:])
    found = run_backward(asked, (q, k, v), out, lse, dout, dlse)
    dsinks = _of_sinks(sinks, lse, found.delta) if wanted[3] else None
    of_slots = dict(zip(asked.slots, found.captured, strict=True))
    given = (found.dq, found.dk, found.dv, dsinks, *map(of_slots.get, range(captures)))
    return tuple(x if want else None for x, want in zip(given, wanted, strict=True))


def _of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink weighs exp(sink - lse) of its row and has no value: that times -delta, summed."""
    logits = sinks.float()[:, None]
    weight = torch.where(logits == -torch.inf, 0.0, torch.exp(logits - lse))
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)


def _without_tensors(asked: Asked) -> Asked:
    score, mask = (x and x._replace(tensors=()) for x in (asked.score, asked.mask))
    return asked._replace(score=score, mask=mask)


def _with_tensors(asked: Asked, score: list[Tensor], mask: list[Tensor]) -> Asked:
    return asked._replace(
        score=asked.score and asked.score._replace(tensors=tuple(score)),
        mask=asked.mask and asked.mask._replace(tensors=tuple(mask)),
    )
