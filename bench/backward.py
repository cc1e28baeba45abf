"""`python -m bench.backward`: gradients of training shapes, GPU time of a whole backward.

A backward is all that autograd runs for it: delta or what stands for it, the gradients, and what
turns them into the inputs' dtype. Useful work is 2.5 times the forward's. Below the times stands
what a forward with its backward allocates at its peak, as a share of the bar: inputs, output,
gradients, lse, delta, and one fp32 dq. `--rows '^grid'` has the twelve rows of the bar; torch's
compiled flex_attention runs where it is named.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.command import main, parse_config, typed
from bench.inputs import Inputs, check, check_gradients, make
from bench.peers import (
    BACKWARD_PEERS,
    TORCH_PEERS,
    Peer,
    Ready,
    Refusal,
    exactly_trained,
    ours_with,
)  # fmt: skip
from bench.results import Gate
from bench.rows import Row, backward_rows
from bench.runner import Kind, Method, poison
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.triton_backward.config import BackwardConfig

# Five products where the forward has two.
BACKWARD_FLOPS = 2.5
# What serves where a field is of both.
_CONFIGS: dict[str, type[HopperBackwardConfig] | type[BackwardConfig]] = {
    "GLUON": HopperBackwardConfig, "TRITON": BackwardConfig,
}  # fmt: skip

METHOD = Method(rounds=15, min_ms=10.0, flush_l2=False, graph=False)


@dataclass(frozen=True)
class Backward:
    """A peer's backward of one forward, which may be called often; the forward alone of its rows.

    leaves: q, k and v, then what the score_mod learns. dout: the gradient of out.
    """

    ready: Ready
    leaves: tuple[Tensor, ...]
    out: Tensor | None
    dout: Tensor | None

    @classmethod
    def of(cls, ready: Ready, x: Inputs) -> Backward:
        """The forward runs here."""
        leaves = tuple(each.detach().requires_grad_() for each in ready.leaves)
        if x.row.group == "forward":
            return cls(ready, leaves, None, None)
        draw = torch.Generator(x.q.device).manual_seed(1)
        with torch.enable_grad():
            out = ready.forward(*leaves)
        dout = torch.empty_like(out).normal_(generator=draw)
        return cls(ready, (*leaves, *x.learned), out, dout)

    def __call__(self) -> Any:
        if self.out is None:
            return self.ready.forward(*self.leaves)
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)


def _prepare(peer: Peer, x: Inputs) -> Backward | Refusal:
    found = peer(x)
    return Backward.of(found, x) if isinstance(found, Ready) else found


def _judge(run: Backward, x: Inputs) -> Gate:
    poison(*x.tensors)
    if run.dout is None:
        return Gate.of(check(run().detach(), x))
    return Gate.of(check_gradients(run(), run.dout, x))


def _work(row: Row) -> float:
    return row.flops * (1 if row.group == "forward" else BACKWARD_FLOPS)


def _peak(run: Backward, x: Inputs) -> int:
    """Bytes that a forward and its backward have at most, with what they are given."""
    if run.out is None or not x.q.is_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    replace(run, out=run.ready.forward(*run.leaves[: len(run.ready.leaves)]))()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + _given(x)


def allowed(x: Inputs) -> int:
    """Bytes of what is given, out, the gradients, lse and delta, and dq in float32."""
    statistics = 2 * 4 * x.q.shape[:3].numel()
    return 2 * _given(x) + statistics + 4 * x.q.numel()


def _given(x: Inputs) -> int:
    """Bytes of q, k, v, the gradient of out, and of what is learned."""
    dout = x.q.nbytes // x.q.shape[-1] * x.v.shape[-1]
    return dout + sum(each.nbytes for each in (*x.tensors, *x.learned))


BACKWARD = Kind(
    lambda row, method: make(row, method.device, method.dtype), _judge, _prepare, _work,
    grad=True, memory=_peak, bar=allowed,
)  # fmt: skip


def variant(text: str) -> Peer:
    """Ours with kernel options, or with fields of a template's config: "dp_rs=1", "guarded=1"."""
    given = parse_config(text)
    if all(map(_is_option, given)):
        return ours_with(given)
    for backend, config in _CONFIGS.items():
        if given.keys() <= {each.name for each in fields(config)}:
            return exactly_trained(typed(given, config), backend)
    return ours_with(given)


def _is_option(name: str) -> bool:
    return name.isupper() or name.startswith("num_")


run = partial(
    main, "backward", backward_rows(), METHOD, known=BACKWARD_PEERS, named=TORCH_PEERS,
    variant=variant, kind=BACKWARD,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run())
