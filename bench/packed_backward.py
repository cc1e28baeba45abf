"""`python -m bench.packed_backward`: gradients of the packs of `bench.packed`, a whole backward.

A backward is all that autograd runs for it; useful work is 2.5 times the forward's. Replays of
CUDA graphs are timed: the host takes longer for one than the GPU for a small pack. `--host` times
that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.backward import BACKWARD_FLOPS
from bench.command import main
from bench.inputs import PIECE, attention, off
from bench.packed import Pack, documents, flash, make_pack, ours, packed_rows
from bench.peers import OURS, Refusal
from bench.results import Gate
from bench.runner import Kind, Method, poison

METHOD = Method(rounds=15, min_ms=5.0, flush_l2=False, graph=True)


@dataclass(frozen=True)
class Backward:
    """A peer's backward of one forward, which may be called often."""

    leaves: tuple[Tensor, ...]
    out: Tensor
    dout: Tensor

    def __call__(self) -> Any:
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """A stream beside the default one, whose work no graph captures.

    Autograd runs a backward on the stream of its forward.
    """
    if device.type != "cuda":
        yield
        return
    here, aside = torch.cuda.current_stream(device), _stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        yield
    here.wait_stream(aside)


def _prepare(peer: Callable[[Pack], Any], x: Pack) -> Backward | Refusal:
    leaves = [each.detach().requires_grad_() for each in (x.q, x.k, x.v)]
    call = peer(replace(x, q=leaves[0], k=leaves[1], v=leaves[2]))
    if x.table is not None:
        leaves.append(x.table.requires_grad_())
    if isinstance(call, Refusal):
        return call
    draw = torch.Generator(x.q.device).manual_seed(1)
    with torch.enable_grad(), _aside(x.q.device):
        out = call()
    dout = torch.empty_like(out).normal_(generator=draw)
    return Backward(tuple(leaves), out, dout)


def _judge(call: Any, x: Pack) -> Gate:
    with _aside(x.q.device):
        poison(x.q)
    return Gate.of(check(call(), call.dout, x))


def check(got: tuple[Tensor, ...], dout: Tensor, x: Pack) -> str:
    """The faults of dq, dk and dv, in words: of the first and the last document's first heads."""
    lengths, found = x.row.lengths, ""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    heads = x.row.hq // x.row.hkv
    for b in sorted({0, len(lengths) - 1}):
        part = slice(starts[b], starts[b + 1])
        exact, rounded = (_gradients(x, dout, b, part, each) for each in (None, x.q.dtype))
        mine = (got[0][part, :heads].transpose(0, 1), got[1][part, 0], got[2][part, 0])
        for name, *each in zip(("dq", "dk", "dv"), mine, exact, rounded, strict=True):
            found += off(f"{name} of document {b}", *each)
    return found


def _gradients(
    x: Pack, dout: Tensor, b: int, part: slice, coarse: torch.dtype | None
) -> list[Tensor]:
    heads, length = x.row.hq // x.row.hkv, part.stop - part.start
    given = (x.q[part, :heads].transpose(0, 1), x.k[part, 0], x.v[part, 0])
    leaves = [each.detach().double().requires_grad_() for each in given]
    for h in range(heads):
        for first in range(0, length, PIECE):
            rows = torch.arange(first, min(first + PIECE, length), device=x.q.device)
            with torch.enable_grad():
                out = attention(
                    leaves[0][h, rows], *leaves[1:], (b, h), rows, x.score_mod, x.mask_mod,
                    coarse=coarse,
                )  # fmt: skip
            out.backward(dout[part][rows, h].to(out.dtype))
    return [each.grad for each in leaves if each.grad is not None]


BACKWARD = Kind(
    make_pack, _judge, _prepare, lambda row: BACKWARD_FLOPS * row.flops, grad=True
)  # fmt: skip
run = partial(
    main, "packed-backward", packed_rows(), METHOD,
    known={OURS: ours, f"{OURS}-documents": documents, "fa4": flash("flash_attn.cute.interface")},
    kind=BACKWARD,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run())
