"""Sampled rows and keys of one launch, held to plain torch by the accuracy gate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.mods.signatures import ScoreMod
from flexattn.problem import out_dtype
from flexattn.problem.descales import NO_DESCALES, Descales
from flexattn.problem.dropout import Dropout
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
    """Why a launch cannot be held to plain torch on its own inputs."""


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
    """Whether a sample's error is no rounding."""
    return bool(verdict.faults) or any(
        not row.error <= _MARGIN * row.budget for row in verdict.rows
    )


def judge_rows(call: Attended, got: Outputs, borders: Sequence[int], seed: int = 0) -> Verdict:
    """The worst verdict on the rows of three heads: both ends, borders of blocks, some at random.

    borders: sizes of blocks of rows. Raises Unjudged where the inputs or the oracle's rows are not
    finite, or where a mod reads outside of a tensor.
    """
    B, Hq, L, _ = call.q.shape
    draw = torch.Generator("cpu").manual_seed(seed)
    verdicts = []
    for b, h in _pairs(B, Hq, draw):
        rows = sampled_positions(L, borders, min(_ROWS, max(1, _SCORES // call.k.shape[2])), draw)
        verdicts.append(_judge_head(call, got, b, h, rows.to(call.q.device)))
    return max(verdicts, key=_excess)


def judge_gradients(
    saved: SavedForward,
    got: Gradients,
    borders: tuple[Sequence[int], Sequence[int]],
    seed: int = 0,
) -> Verdict:
    """The worst verdict on dq of some rows, dk and dv of some keys; those of captured tensors are
    not judged here.

    borders: sizes of blocks of rows, and of keys. Raises Unjudged as `judge_rows`.
    """
    (B, Hq, L, _), (_, Hkv, S, _) = saved.q.shape, saved.k.shape
    draw, device = torch.Generator("cpu").manual_seed(seed), saved.q.device
    for name, x in (("q", saved.q), ("out", saved.out), ("its gradient", saved.dout)):
        _need_finite(name, x)
    verdicts = []
    for b, h in _pairs(B, Hq, draw):
        kv_head = h * Hkv // Hq
        kb = min(b, saved.k.shape[0] - 1)
        _need_finite("k", saved.k[kb, kv_head])
        _need_finite("v", saved.v[kb, kv_head])
        rows = sampled_positions(L, borders[0], min(_ROWS, max(1, _SCORES // S)), draw).to(device)
        keys = sampled_positions(S, borders[1], _ROWS, draw).to(device)
        mine = {
            "dq": got.dq[b, h, rows], "dk": got.dk[kb, kv_head, keys],
            "dv": got.dv[kb, kv_head, keys],
        }  # fmt: skip
        exact, rounded = (
            _gradients(saved, b, h, kv_head, rows, keys, each)
            for each in (Precision.ORACLE, Precision.ROUNDED)
        )
        rounded = {name: x.to(mine[name].dtype) for name, x in rounded.items()}
        if not all(bool(x.isfinite().all()) for x in (*exact.values(), *rounded.values())):
            raise Unjudged("a gradient of plain torch is not finite")
        verdicts.append(judge_named(mine, exact, rounded))
    return max(verdicts, key=_excess)


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


def _pairs(B: int, Hq: int, draw: torch.Generator) -> list[tuple[int, int]]:
    b, h = (int(torch.randint(n, (), generator=draw, device="cpu")) for n in (B, Hq))
    return sorted({(0, 0), (b, h), (B - 1, Hq - 1)})


def _judge_head(call: Attended, got: Outputs, b: int, h: int, rows: Tensor) -> Verdict:
    group = call.q.shape[1] // call.k.shape[1]
    kb, kv = min(b, call.k.shape[0] - 1), slice(h // group, h // group + 1)
    q = call.q[b : b + 1, h : h + 1].index_select(2, rows)
    k, v = call.k[kb : kb + 1, kv], call.v[kb : kb + 1, kv]
    for name, x in (("q", q), ("k", k), ("v", v)):
        _need_finite(name, x)

    def run(precision: Precision, scale: float = call.scale) -> Reference:
        return attention(
            q, k, v, score_mod=call.score_mod, block_mask=call.block_mask, scale=scale,
            sinks=None if call.sinks is None else call.sinks[h : h + 1],
            descales=_of_head(call.descales, b, slice(h, h + 1), kv), dropout=call.dropout,
            precision=precision, at=SomeRows(b, h, rows, call.q.shape[1]),
        )  # fmt: skip

    exact, rounded = run(Precision.ORACLE), run(Precision.ROUNDED)
    sound = _sound(exact) & _sound(rounded)
    if not bool(sound.any()):
        raise Unjudged("rows of plain torch are not finite")
    mine = [None if x is None else x[b, h, rows][sound] for x in got]
    dtype = out_dtype(q.dtype)

    def against(reference: Reference) -> Verdict:
        return judge((mine[0], mine[1], mine[2]), of(exact), of(reference), dtype)

    def of(found: Reference) -> Triple:
        return found.out[0, 0][sound], found.lse[0, 0][sound], found.max_scores[0, 0][sound]

    verdict = against(rounded)
    if not beyond(verdict):
        return verdict
    # A mod that compares scores may jump elsewhere by a kernel's rounding.
    nudged = [run(Precision.STORED, call.scale * (1 + step)) for step in (_NUDGE, -_NUDGE)]
    return min([verdict, *map(against, nudged)], key=_excess)


def _sound(found: Reference) -> Tensor:
    """Which rows have an output, and no lse that is NaN or infinite but for a row without keys."""
    lse = found.lse[0, 0]
    return found.out[0, 0].isfinite().all(-1) & ~lse.isnan() & (lse != torch.inf)


def _excess(verdict: Verdict) -> tuple[int, float]:
    """Orders verdicts, the worst last."""
    faults, used = badness(verdict)
    return faults, torch.inf if used != used else used


def _need_finite(name: str, x: Tensor) -> None:
    wide = x.float() if x.dtype.itemsize == 1 else x
    if not bool(wide.isfinite().all()):
        raise Unjudged(f"{name} holds numbers that are not finite")


def _of_head(descales: Descales, b: int, q: slice, kv: slice) -> Descales:
    parts = zip(descales, (q, kv, kv), strict=True)
    return Descales(
        *(None if x is None else x[min(b, x.shape[0] - 1)][None, head] for x, head in parts)
    )


def _gradients(
    saved: SavedForward,
    b: int,
    h: int,
    kv_head: int,
    rows: Tensor,
    keys: Tensor,
    precision: Precision,
) -> dict[str, Tensor]:
    dk, dv = gradients_of_keys(saved, b, kv_head, keys, precision)
    return {"dq": gradient_of_rows(saved, b, h, rows, precision), "dk": dk, "dv": dv}
