"""`python -m bench.selection`: attention whose keys data choose, forward and backward.

Choices are the best of random scores, causal. Calls have one Selection's mask, or a new Selection
each. `reading` is a kernel that only reads the blocks that are chosen. Backward rows time the
gradients; of these dQ is judged. `--peers flexattn,flexattn-mask` has beside what single rows
choose the map that a mask reads. Useful work is that of the blocks that are chosen, and of a
backward 2.5 times that. `--host` times the host's part.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.command import main
from bench.inputs import attention, off
from bench.peers import OURS, Refusal
from bench.reading import READING, reading
from bench.results import Gate
from bench.runner import Kind, Method, poison
from flexattn import Selection, flex_attention
from flexattn.block_mask.chosen import ChosenBlocks
from flexattn.catalogue import causal

METHOD = Method(rounds=10, min_ms=4.0)
_K = 1024
# Rows that are checked of a head.
_CHECKED = 64


@dataclass(frozen=True)
class ChosenRow:
    """Of `length` rows and keys, each block of `rows` rows and key head chooses k units."""

    name: str
    hq: int
    hkv: int
    unit: int
    rows: int
    k: int
    length: int = 32 * _K
    d: int = 128
    group: str = "forward"

    @property
    def flops(self) -> float:
        """4 D for each pair of a row and a key of a unit that it chose, or 10 D."""
        units = sum(
            min(self.k, (first + self.rows - 1) // self.unit + 1)
            for first in range(0, self.length, self.rows)
        )
        share = 10.0 if self.group == "backward" else 4.0
        return share * self.d * self.hq * units * self.unit * self.rows

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        return 4 * self.length * self.hkv * self.d


FORWARD = (
    ChosenRow("moba-128", 16, 16, 128, 128, 16),
    ChosenRow("moba-128-gqa", 32, 8, 128, 128, 16),
    ChosenRow("moba-64", 16, 16, 64, 64, 64),
    ChosenRow("vsa-64", 16, 16, 64, 64, 16, 8 * _K),
    ChosenRow("nsa-64", 64, 4, 64, 1, 16, 8 * _K),
    ChosenRow("nsa-64-16k", 64, 4, 64, 1, 16, 16 * _K),
    ChosenRow("nsa-64-64k", 64, 4, 64, 1, 16, 64 * _K),
)
ROWS = (
    *FORWARD,
    *(replace(row, group="backward") for row in FORWARD if row.rows > 1 or row.length == 8 * _K),
)


@dataclass(frozen=True)
class Chosen:
    """q, k, v [1, heads, length, d] and the indices of a row's Selection."""

    row: ChosenRow
    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor

    def selection(self) -> Selection:
        """A new Selection of the same indices."""
        return Selection(self.indices, None, self.row.unit, self.row.rows, causal)

    def attend(self, mask: Any) -> Tensor:
        """The output of a call."""
        found: Any = flex_attention(self.q, self.k, self.v, block_mask=mask, enable_gqa=True)
        return found  # type: ignore[no-any-return]


def _make(row: ChosenRow, method: Method) -> Chosen:
    where = method.device
    draw = torch.Generator(where).manual_seed(zlib.crc32(row.name.encode()))
    q, k, v = (
        torch.randn(1, h, row.length, row.d, generator=draw, device=where, dtype=method.dtype)
        for h in (row.hq, row.hkv, row.hkv)
    )
    blocks = -(-row.length // row.rows), -(-row.length // row.unit)
    scores = torch.randn(1, row.hkv, *blocks, generator=draw, device=where)
    best = Selection.from_topk(scores, row.k, unit=row.unit, rows=row.rows, causal=True)
    return Chosen(row, q, k, v, best.indices)


def same(x: Chosen) -> Callable[[], Tensor] | Refusal:
    """Calls of one mask, or the gradient in q of one call, with those in k and v."""
    if x.row.group == "backward":
        leaves = [each.requires_grad_() for each in (x.q, x.k, x.v)]
        with torch.enable_grad():
            out = x.attend(x.selection())
        dout = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)[0]
    apart = x.selection().apart(x.q, x.k, x.v, True, ())
    if apart is None:
        return of_a_mask(x)
    call = partial(flex_attention, *apart[:3], block_mask=apart.mask, enable_gqa=True)
    return lambda: apart.joined(call())  # type: ignore[no-any-return]


def of_a_mask(x: Chosen) -> Callable[[], Tensor] | Refusal:
    """Calls of one mask: a map's, where single rows choose."""
    if x.row.group == "backward":
        return Refusal("a backward has the forward's lists")
    mask = x.selection().for_call(x.q, x.k)
    return lambda: x.attend(mask)


def new(x: Chosen) -> Callable[[], Tensor] | Refusal:
    """Calls that choose anew: a Selection of their own each."""
    if x.row.group == "backward":
        return Refusal("a backward has the forward's lists")
    return lambda: x.attend(x.selection())


def only_reads(x: Chosen) -> Callable[[], Tensor] | Refusal:
    """Calls that read what is chosen, as often as a forward's programs read it."""
    row = x.row
    if row.group == "backward":
        return Refusal("it reads what a forward reads")
    chosen = ChosenBlocks(x.indices, None, row.rows, row.unit, True, True)
    mask = chosen.mask(row.hkv, (row.length, row.length), causal)
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    if row.rows == 1:
        return reading(x.k, x.v, lists, row.unit, row.hkv, 1)
    return reading(x.k, x.v, lists, row.unit, row.hq)


def _judge(call: Callable[[], Tensor], x: Chosen) -> Gate:
    poison(x.q)
    found, row, said = call(), x.row, ""
    for h in (0, row.hq - 1):
        at = h * row.hkv // row.hq
        draw = torch.Generator().manual_seed(h)
        rows = torch.randperm(row.length, generator=draw)[:_CHECKED].to(found.device)
        units = torch.arange(row.length, device=found.device) // row.unit
        kept = (x.indices[0, at, rows // row.rows][:, :, None] == units).any(1)

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, kept: Tensor = kept) -> Any:
            return kept & (q_idx >= kv_idx)

        q, k, v = x.q[0, h, rows].double(), x.k[0, at].double(), x.v[0, at].double()
        both = []
        for coarse in (None, x.q.dtype):
            leaf = q.detach().requires_grad_(row.group == "backward")
            with torch.set_grad_enabled(leaf.requires_grad):
                out = attention(
                    leaf, k.detach(), v.detach(), (0, h), rows, None, mask, coarse=coarse
                )
                both.append(torch.autograd.grad(out.sum(), leaf)[0] if leaf.requires_grad else out)
        said += off(f"{row.group} of head {h}", found[0, h, rows], *both)
    return Gate.of(said)


CHOSEN = Kind(_make, _judge, lambda peer, x: peer(x))
run = partial(
    main, "selection", ROWS, METHOD,
    known={OURS: same, f"{OURS}-new-selection": new, READING: only_reads},
    named={f"{OURS}-mask": of_a_mask}, kind=CHOSEN,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run())
