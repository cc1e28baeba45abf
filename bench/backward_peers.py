"""Who is differentiated: a peer turns a row's inputs into a forward, and says in what tensors.

What is timed is autograd's own call of a backward: all of its kernels, and nothing of the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flexattn
from bench.fa4 import fa4_call
from bench.inputs import Inputs
from bench.peers import OURS
from bench.refusal import Refusal
from bench.rows import Row
from flexattn.frontend.autograd import with_tensors
from flexattn.frontend.gradients import AskedGradients, BackwardPlan, plan_backward
from flexattn.kernels.choose.options import Options
from flexattn.kernels.choose.registry import family_of
from flexattn.mods import bind
from flexattn.runtime.backward import prepare_backward
from flexattn.runtime.dispatch import dispatcher

__all__ = [
    "BACKWARD_PEERS", "DROPOUT", "TORCH_PEERS", "WITHOUT_LSE", "Trained", "Trainer",
    "exactly_trained", "learned", "ours_trained",
]  # fmt: skip

# The row beside which ours is also timed with options of training.
VARIED = "d128-8k-causal"
WITHOUT_LSE = f"{OURS}-without-lse"
DROPOUT, DROPPED = "dropout", 0.1


@dataclass(frozen=True)
class Trained:
    """A forward, the tensors that it is differentiated in, and the gradient of its output.

    leaves: q, k and v, then what the score_mod captures and learns.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    dout: Tensor

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """The backward of one forward, which is run here, as often as it is called."""
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


Trainer: TypeAlias = Callable[[Inputs, Tensor], "Trained | Refusal"]


def learned(x: Inputs) -> tuple[Tensor, ...]:
    """The tensors of a row's score_mod that require a gradient."""
    bound = bind(x.score_mod, "score")
    return () if bound is None else tuple(each for each in bound.tensors if each.requires_grad)


def _leaves(x: Inputs) -> tuple[Tensor, ...]:
    return *(each.detach().requires_grad_() for each in (x.q, x.k, x.v)), *learned(x)


def ours_trained(options: Mapping[str, Any], **more: Any) -> Trainer:
    """flexattn.flex_attention as a user trains with it, with kernel_options."""

    def build(x: Inputs, dout: Tensor) -> Trained:
        s, mask = x.row.shape, None
        if x.mask_mod is not None:
            mask = flexattn.create_block_mask(
                x.mask_mod, None, None, s.q_len, s.kv_len, x.q.device
            )
        leaves = _leaves(x)
        q, k, v = leaves[:3]

        def forward() -> Any:
            return flexattn.flex_attention(
                q, k, v, score_mod=x.score_mod, block_mask=mask, enable_gqa=x.gqa,
                kernel_options=dict(options) or None, **more,
            )  # fmt: skip

        return Trained(forward, leaves, dout)

    return build


class _Exactly:
    """In place of the frontend's GradCall: plans of a backward have a config of one's own."""

    def __init__(self, asked: AskedGradients, given: Mapping[str, Any]) -> None:
        self._asked, self._given = asked, given
        self._plan: BackwardPlan | None = None

    def plan_backward(self, mask: Any, others: list[Tensor], *tensors: Tensor) -> BackwardPlan:
        if self._plan is None:
            q, k, v, out, dout = tensors
            asked = with_tensors(self._asked, mask, others)
            first, lists = plan_backward(asked, *tensors).launch, asked.lists()
            problem, device = first.problem, first.choice.device
            config = replace(first.choice.config, **self._given)
            fitting = family_of(config).at_sizes(config, problem, problem, device)
            exact = Options(exact=fitting)
            launch = prepare_backward(
                problem, device, q.device, dispatcher(), exact, (q, k, v), out, dout, lists,
            )  # fmt: skip
            rest = launch.rest_of(lists, asked.score, asked.mask, asked.dropout)
            self._plan = BackwardPlan(launch, rest)
        return self._plan


def exactly_trained(given: Mapping[str, Any], backend: str = "GLUON") -> Trainer:
    """Ours with a backend's default but for fields that kernel_options cannot say."""

    def build(x: Inputs, dout: Tensor) -> Trained:
        made = ours_trained({"BACKEND": backend})(x, dout)
        assert isinstance(made, Trained)

        def forward() -> Tensor:
            out = made.forward()
            node: Any = out.grad_fn
            served = _Exactly(node.asked, given)
            node.grads = lambda: served
            return out

        return Trained(forward, made.leaves, dout)

    return build


def deterministic(x: Inputs, dout: Tensor) -> Trained | Refusal:
    """Ours where every run must give the same bits."""
    return _varied(x.row) or ours_trained({"DETERMINISTIC": True})(x, dout)


def dropout(x: Inputs, dout: Tensor) -> Trained | Refusal:
    """Ours with a tenth of the weights dropped; its numbers are the tests' to hold."""
    if "dropout_p" not in inspect.signature(flexattn.flex_attention).parameters:
        return Refusal("flex_attention has no dropout_p")
    return _varied(x.row) or ours_trained({}, dropout_p=DROPPED)(x, dout)


def _varied(row: Row) -> Refusal | None:
    return None if row.name == VARIED else Refusal(f"it is beside ours in {VARIED}")


def without_lse(x: Inputs, dout: Tensor) -> Trained | Refusal:
    """The forward that nobody differentiates, beside the one that saves lse for a backward."""
    if x.row.group != "forward":
        return Refusal("of a row of a forward alone")
    made = ours_trained({})(x, dout)
    assert isinstance(made, Trained)

    def forward() -> Tensor:
        with torch.no_grad():
            return made.forward()

    return Trained(forward, made.leaves, dout)


def fa4_trained(x: Inputs, dout: Tensor) -> Trained | Refusal:
    """FlashAttention-4; of score_mods its own soft-capping alone has a backward without ours."""
    if x.row.score not in ("none", "softcap"):
        return Refusal(f"FA4 takes {x.row.score} with a derivative that the caller writes")
    found = fa4_call(x)
    if isinstance(found, Refusal):
        return found
    call, tensors = found
    leaves = tuple(each.requires_grad_() for each in tensors)
    return Trained(lambda: call(*leaves), leaves, dout.transpose(1, 2).contiguous())


def torch_trained(mode: str | None) -> Trainer:
    """torch's flex_attention under torch.compile, for static shapes."""

    def build(x: Inputs, dout: Tensor) -> Trained:
        s, mask = x.row.shape, None
        if x.mask_mod is not None:
            mask = create_block_mask(x.mask_mod, None, None, s.q_len, s.kv_len, x.q.device)
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        # One forward is differentiated many times: its buffers are not to be given away.
        torch._functorch.config.donated_buffer = False
        leaves = _leaves(x)
        q, k, v = leaves[:3]
        return Trained(
            lambda: compiled(
                q, k, v, score_mod=x.score_mod, block_mask=mask, enable_gqa=x.gqa
            ), leaves, dout,
        )  # fmt: skip

    return build


def sdpa_trained(backend: SDPBackend | None) -> Trainer:
    """scaled_dot_product_attention by one backend, or by torch's own choice."""

    def build(x: Inputs, dout: Tensor) -> Trained | Refusal:
        if not x.row.plain:
            return Refusal("SDPA takes no mods")
        q, k, v = leaves = _leaves(x)

        def forward() -> Tensor:
            causal = x.row.mask == "causal"
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=x.gqa)

        def forced() -> Tensor:
            assert backend is not None
            with sdpa_kernel(backend):
                return forward()

        return Trained(forward if backend is None else forced, leaves, dout)

    return build


def of_backwards(peer: Trainer) -> Trainer:
    """A rival, whose forward says nothing of ours with and without lse."""

    def build(x: Inputs, dout: Tensor) -> Trained | Refusal:
        if x.row.group == "forward":
            return Refusal("bench.prefill times forwards")
        return peer(x, dout)

    return build


BACKWARD_PEERS: dict[str, Trainer] = {
    OURS: ours_trained({}),
    WITHOUT_LSE: without_lse,
    f"{OURS}-deterministic": deterministic,
    DROPOUT: dropout,
    "fa4": of_backwards(fa4_trained),
    "sdpa-cudnn": of_backwards(sdpa_trained(SDPBackend.CUDNN_ATTENTION)),
}
# Timed where they are named: they compile for half a minute, tuned for minutes, a row.
TORCH_PEERS: dict[str, Trainer] = {
    "torch-flex": of_backwards(torch_trained(None)),
    "torch-flex-tuned": of_backwards(torch_trained("max-autotune-no-cudagraphs")),
}
