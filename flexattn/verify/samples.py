"""Sampled rows and keys of one launch, compared with plain torch by the accuracy gate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.mods.expr import ScoreMod
from flexattn.problem import FP8, out_dtype
from flexattn.problem.inputs import NO_DESCALES, Descales, Dropout
from flexattn.reference import Precision, Reference, SomeRows, attention
from flexattn.reference.parts import SavedForward, gradient_of_rows, gradients_of_keys
from flexattn.runtime.backward import Gradients
from flexattn.runtime.launch import Outputs
from flexattn.verify.gate import Triple, Verdict, badness, judge, judge_named

# A sample's error scatters more than that of a whole tensor, by which the gate's budget is set.
_MARGIN = 3.0
# Scores of the sampled rows of one head, which bound the memory of a check.
_SCORES = 2**20
_ROWS = 16
# The step of scores within which a mod that jumps may decide either way.
_NUDGE = 2.0**-18


class Unjudged(Exception):
    """Why a launch cannot be compared with plain torch on its own inputs."""


class Attended(NamedTuple):
    """A forward's inputs. score_mod, block_mask: as plain torch runs them."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    score_mod: ScoreMod | None = None
    block_mask: BlockMask | None = None
    sinks: Tensor | None = None
    descales: Descales = NO_DESCALES
    dropout: Dropout | None = None


def beyond(verdict: Verdict) -> bool:
    """Whether a sample's error is more than rounding."""
    return bool(verdict.faults) or any(
        not row.error <= _MARGIN * row.budget for row in verdict.rows
    )


def judge_rows(call: Attended, got: Outputs, borders: Sequence[int], seed: int = 0) -> Verdict:
    """The verdict on rows of four heads: both ends, borders of blocks, some at random.

    borders: sizes of blocks of rows. Raises Unjudged where the inputs or the oracle's rows are not
    finite, or where a mod reads outside of a tensor.
    """
    B, Hq, L, _ = call.q.shape
    draw = torch.Generator("cpu").manual_seed(seed)
    b, h = _some(B, draw), _some(Hq, draw)
    most = max(1, _SCORES // (call.k.shape[2] * len(b) * len(h)))
    rows = sampled_positions(L, borders, min(_ROWS, most), draw)
    where = call.q.device
    at = SomeRows(b.to(where), h.to(where), rows.to(where), Hq)
    q = at.of(call.q)
    _need_finite(call.q, call.k, call.v)
    sinks = None if call.sinks is None else call.sinks[at.h]

    def run(precision: Precision, scale: float = call.scale) -> Reference:
        return attention(
            q, call.k, call.v, score_mod=call.score_mod, block_mask=call.block_mask, scale=scale,
            sinks=sinks, descales=call.descales, dropout=call.dropout, precision=precision, at=at,
        )  # fmt: skip

    exact, rounded = run(Precision.ORACLE), run(Precision.ROUNDED)
    sound = _sound(exact) & _sound(rounded)
    if not bool(sound.any()):
        raise Unjudged("rows of plain torch are not finite")
    mine = [None if x is None else at.of(x)[sound] for x in got]
    dtype = out_dtype(q.dtype)

    def against(reference: Reference) -> Verdict:
        return judge((mine[0], mine[1], mine[2]), of(exact), of(reference), dtype)

    def of(found: Reference) -> Triple:
        return found.out[sound], found.lse[sound], found.max_scores[sound]

    verdict = against(rounded)
    if not beyond(verdict):
        return verdict
    # A mod that compares scores may jump elsewhere by a kernel's rounding.
    nudged = [run(Precision.STORED, call.scale * (1 + step)) for step in (_NUDGE, -_NUDGE)]
    return min([verdict, *map(against, nudged)], key=_excess)


def judge_gradients(
    saved: SavedForward,
    got: Gradients,
    borders: tuple[Sequence[int], Sequence[int]],
    seed: int = 0,
) -> Verdict:
    """The verdict on dq of some rows, dk and dv of some keys; those of captured tensors are not
    judged here.

    borders: sizes of blocks of rows, and of keys. Raises Unjudged as `judge_rows`.
    """
    (B, Hq, L, _), (Bk, Hkv, S, _) = saved.q.shape, saved.k.shape
    draw, device = torch.Generator("cpu").manual_seed(seed), saved.q.device
    _need_finite(saved.q, saved.k, saved.v, saved.out, saved.dout)
    b, h, kb, kv = (_some(n, draw).to(device) for n in (B, Hq, Bk, Hkv))
    rows = sampled_positions(L, borders[0], _ROWS, draw).to(device)
    keys = sampled_positions(S, borders[1], _ROWS, draw).to(device)
    at = SomeRows(b, h, rows, Hq)

    def of_keys(x: Tensor) -> Tensor:
        return x[kb[:, None, None], kv[:, None], keys]

    def plain(precision: Precision) -> dict[str, Tensor]:
        dk, dv = gradients_of_keys(saved, kb, kv, keys, precision)
        return {"dq": gradient_of_rows(saved, at, precision), "dk": dk, "dv": dv}

    mine = {"dq": at.of(got.dq), "dk": of_keys(got.dk), "dv": of_keys(got.dv)}
    exact, rounded = plain(Precision.ORACLE), plain(Precision.ROUNDED)
    rounded = {name: x.to(mine[name].dtype) for name, x in rounded.items()}
    if not all(bool(x.isfinite().all()) for x in (*exact.values(), *rounded.values())):
        raise Unjudged("a gradient of plain torch is not finite")
    return judge_named(mine, exact, rounded)


def sampled_positions(
    length: int, borders: Iterable[int], most: int, draw: torch.Generator
) -> Tensor:
    """Some of range(length), sorted: both ends, both sides of a block's first and last border."""
    wanted = [0, length - 1]
    for size in borders:
        last = (length - 1) // size * size
        wanted += [last - 1, last, size - 1, size]
    found = dict.fromkeys(each for each in wanted if 0 <= each < length)
    extra = torch.randint(length, (most,), generator=draw, device="cpu").tolist()
    chosen = list(dict.fromkeys([*list(found)[: max(most - 3, 1)], *extra]))[:most]
    return torch.tensor(sorted(chosen), device="cpu")


def _some(count: int, draw: torch.Generator) -> Tensor:
    """The last of `count` batches or heads, and one at random."""
    other = int(torch.randint(count, (), generator=draw, device="cpu"))
    return torch.tensor(sorted({other, count - 1}), device="cpu")


def _sound(found: Reference) -> Tensor:
    """The rows with a finite output, and an lse that is finite or -inf (a row without keys)."""
    return found.out.isfinite().all(-1) & ~found.lse.isnan() & (found.lse != torch.inf)


def _excess(verdict: Verdict) -> tuple[int, float]:
    """Orders verdicts, the worst last."""
    faults, used = badness(verdict)
    return faults, torch.inf if used != used else used


def _need_finite(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype.itemsize == 1:  # of eight bits these are NaN, and e5m2's infinities
            finite = (x.view(torch.uint8) & 0x7F).amax() < (0x7F if x.dtype in FP8 else 0x7C)
        else:  # nothing is allocated, and NaN goes through
            least, most = torch.aminmax(x)
            finite = least.isfinite() & most.isfinite()
        if not bool(finite):
            raise Unjudged("an input holds numbers that are not finite")
