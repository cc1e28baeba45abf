"""Gradients of random mods, in all that they capture, held to autograd's in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from flexattn import explain
from tests.derivatives import assert_printed_derivatives
from tests.gradients import compared
from tests.random_mods.checking import HEADS, prepared
from tests.random_mods.mods import RandomMod, random_score
from tests.random_mods.outcomes import Outcome, Task, outcome
from tests.random_mods.stopping import stopping
from tests.random_mods.terms import FLOATS
from tests.support import DTYPES, assert_close_as, inputs

# Calls that are judged together where one was not within its budget.
AGAIN = 6
POINTS = 200


def learning(seed: int, index: int) -> RandomMod:
    """The mod of this name; half of them keep something from autograd."""
    drawn = random_score(seed, index)
    assert drawn.score is not None
    score = stopping(drawn.score, random.Random(f"{seed} {index} stops"))
    return replace(drawn, score=score)


def check_gradients(
    seed: int, index: int, longest: int, device: str, mod: RandomMod | None = None
) -> str:
    """Hold a mod's gradients in q, k, v and what it captures; returns the call's sizes in words.

    So is its derivative as it is printed for torch, at some points. mod: another of this name.

    Its halves are float32 here: autograd's gradients of these are rounded to sixteen bits.
    Raises AssertionError where one is wrong, and what flexattn raises.
    """
    draw = random.Random(f"{seed} {index} gradients")
    (Hq, Hkv), B = draw.choice(HEADS), draw.choice((1, 2))
    L, S = (2 * draw.randrange(4, (longest + 1) // 2) + 1 for _ in range(2))
    D, dtype = draw.choice((16, 24, 64)), draw.choice(("fp16", "fp32", "fp32"))
    call = f"{dtype} {B=} {Hq=} {Hkv=} {L=} {S=} {D=}"
    drawn = mod or learning(seed, index)
    part = drawn.score
    assert part is not None
    sizes = {"B": B, "H": Hq, "L": L, "S": S}
    values = part.values(sizes, device, torch.Generator().manual_seed(index))
    _, mask_mod = drawn.make(B, Hq, L, S, device)
    learn = [i for i, x in enumerate(part.captures) if x.dims and x.dtype in FLOATS]

    def make(*tensors: torch.Tensor) -> Any:
        known = dict(zip(learn, tensors, strict=True))
        wide = any(x.dtype == torch.float64 for x in tensors)
        captured = [known.get(i, x) for i, x in enumerate(values)]
        return part.over(captured, "float64" if wide else "float32")

    q, k, v = inputs(B, Hq, Hkv, L, S, D, dtype=DTYPES[dtype], device=device)
    tables = [torch.as_tensor(values[i]).float() for i in learn]
    more = {"make": make, "tensors": tables, "mask_mod": mask_mod}
    try:
        leaf, score_mod = (
            q.detach().requires_grad_(),
            make(*(x.clone().requires_grad_() for x in tables)),
        )
        route = explain(leaf, k, v, score_mod, enable_gqa=True).route
        assert route in ("kernel", "interpreter"), f"it is differentiated by {route}"
        draws = torch.Generator().manual_seed(index)
        if device == "cpu":
            assert_printed_derivatives(make, tables, (B, Hq, L, S), POINTS, draws)
        hold_gradients(q, k, v, **more)
    except Exception as error:
        error.args = (f"{error}\n{call}",) if len(error.args) == 1 else error.args
        raise
    return call


def hold_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> None:
    """Hold a call's gradients to the oracle's, those of several where one's are not within it."""
    if not all(map(_close, compared(q, k, v, **more))):
        runs = [compared(q.roll(i, 2), k.roll(i, 3), v, **more) for i in range(1, 1 + AGAIN)]
        for triples in zip(*runs, strict=True):
            _judge(*map(torch.stack, zip(*triples, strict=True)))


def _judge(got: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
    """Hold the mean error of several calls: of a few numbers, the largest of one call is luck.

    Three times the reference run's, whose lse is not rounded in base 2 as a forward's is, which
    gradients that cancel show. Where the root of |0| is differentiated autograd has no number,
    and a kernel needs none.
    """
    known = exact.isfinite()
    error, allowed = ((x.double() - exact)[known].square().mean().sqrt() for x in (got, rounded))
    eps = torch.finfo(got.dtype).eps
    assert got[known].isfinite().all(), "a gradient is no number"
    allowed = 3 * allowed + eps * exact[known].square().mean().sqrt()
    assert not known.any() or error <= allowed, f"an error of {error:.2e}, not {allowed:.2e}"


def _close(triple: tuple[torch.Tensor, ...]) -> bool:
    try:
        assert_close_as(*triple)
    except AssertionError:
        return False
    return True


def checked_gradients(task: Task) -> Outcome:
    """The outcome of one mod."""
    named, device = (task.seed, task.index), prepared()
    return outcome(task, learning(*named), lambda: check_gradients(*named, task.longest, device))
