"""A call made up for kernels that were chosen: one batch, one KV head, the same structure.

It stands in for the caller's where that cannot be read: while a CUDA graph is captured, before
there is a call, where inputs hold NaN, and in a group of processes, which then decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexattn.device import cuda_driver
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.problem import Problem
from flexattn.problem.inputs import Dropout
from flexattn.runtime.candidates import Choice
from flexattn.runtime.dispatch import Dispatcher
from flexattn.runtime.key_lists import BothLists, made_by_key
from flexattn.runtime.launch import Lists, prepare_launch
from flexattn.verify.first_use import Attended, Unjudged, judge_rows
from flexattn.verify.gate import Verdict
from flexattn.verify.gradients import judge_of, make_saved
from flexattn.verify.oracle import (
    block_mask_of,
    make_inputs,
    make_sinks,
)

# Of the oracle of gradients, which computes all of them.
_SCORES = 2**21
_SEED = 0x5EED


@dataclass(frozen=True)
class ChosenKernels:
    """Kernels that dispatch chose, and the parts of a call that they are of.

    lists: of the block mask, by query and by key.
    """

    choice: Choice
    where: torch.device
    scale: float
    score: Bound | None = None
    mask: Bound | None = None
    lists: Lists | None = None
    dropout: Dropout | None = None

    def choose(self, problem: Problem, *_: object) -> Choice:
        """As Dispatcher.choose, for the made-up problem."""
        return replace(self.choice, problem=problem)


def judge_forward(chosen: ChosenKernels) -> Verdict:
    """Launch a made-up forward, and judge some of its rows."""
    problem, lists = _small(chosen, chosen.choice.problem.q_len)
    structure, where = problem.structure, chosen.where
    q, k, v = make_inputs(problem, where)
    sinks, dropout = make_sinks(problem, where), _drawn(chosen)
    with apart(where):
        launch = prepare_launch(
            problem, chosen.choice.device, where, _dispatcher(chosen), NONE, q, k, v, lists
        )
        rest = launch.rest_of(lists, chosen.score, chosen.mask, dropout)
        found = launch.run(q, k, v, chosen.scale, rest, sinks)
        block_mask = None
        if lists is not None and structure.sparsity is not None:
            lengths = problem.q_len, problem.kv_len
            mask_mod = mask_callable(chosen.mask)
            block_mask = block_mask_of(lists, structure.sparsity, mask_mod, lengths)
        call = Attended(
            q, k, v, chosen.scale, score_callable(chosen.score), block_mask, sinks,
            dropout=dropout, e4m3_weights=structure.e4m3_weights,
        )  # fmt: skip
        return judge_rows(call, found, borders_of(chosen.choice)[0])


def judge_backward(chosen: ChosenKernels) -> Verdict:
    """Launch the backward of a made-up call of few rows, and judge all gradients of it.

    Packed sequences are one made-up sequence. Raises Unjudged for a call with dropout.
    """
    if chosen.dropout is not None:
        raise Unjudged("gradients of captured tensors beside dropout")
    p = chosen.choice.problem
    rows = max(1, min(p.q_len, _SCORES // (p.kv_len * (p.Hq // p.Hkv))))
    problem, lists = _small(chosen, rows)
    both, sparsity = None, problem.structure.sparsity
    if lists is not None and sparsity is not None:
        lengths = problem.q_len, problem.kv_len
        block_mask = block_mask_of(lists, sparsity, mask_callable(chosen.mask), lengths)
        both = BothLists(lists, made_by_key(block_mask, lists))
    saved = make_saved(
        problem, chosen.where, chosen.scale, chosen.score, chosen.mask, both, ((0, 0),)
    )
    if p.structure.ragged_kv:  # what lies behind the last sequence is one more
        problem = replace(problem, B=2)
    got = saved.prepare(problem, chosen.choice.device, _dispatcher(chosen), NONE)()
    return judge_of(saved.call)(got)


def borders_of(choice: Choice) -> tuple[list[int], list[int]]:
    """Sizes of the blocks of rows and of keys that a kernel and its mask have."""
    config: Any = choice.config
    found = [[getattr(config, name, 64)] for name in ("BLOCK_M", "BLOCK_N")]
    sparsity = choice.problem.structure.sparsity
    if sparsity is not None:
        found[0].append(sparsity.q_block)
        found[1].append(sparsity.kv_block)
    return found[0], found[1]


def _dispatcher(chosen: ChosenKernels) -> Dispatcher:
    fixed: Any = chosen
    return fixed  # type: ignore[no-any-return]


def _small(chosen: ChosenKernels, rows: int) -> tuple[Problem, Lists | None]:
    """The problem with one batch, one KV head and some rows, and its mask's lists."""
    p = chosen.choice.problem
    group, lists = p.Hq // p.Hkv, chosen.lists
    small = replace(p, B=1, Hq=group, Hkv=1, q_len=rows, broadcast_kv=False)
    if lists is None or p.structure.sparsity is None:
        return small, lists
    blocks = -(-rows // p.structure.sparsity.q_block)
    parts = (None if x is None else x[:1, :group, :blocks].contiguous() for x in lists)
    return small, Lists(*parts)  # type: ignore[arg-type]


def _drawn(chosen: ChosenKernels) -> Dropout | None:
    """Dropout with a seed of its own, so that no generator of the caller's moves."""
    if chosen.dropout is None:
        return None
    return chosen.dropout._replace(seed=torch.tensor([_SEED], device=chosen.where))


@contextmanager
def apart(where: torch.device) -> Iterator[None]:
    """Runs work on a stream of its own while the current stream is captured."""
    if where.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield
        return
    with cuda_driver.relaxed_capture(), torch.cuda.stream(torch.cuda.Stream(where)):
        yield
