"""A random mod as a call on an H200 compiles it, with no GPU."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import describe
from flexattn.kernels.block_mask.source import render_block_mask
from flexattn.kernels.choose.options import NONE
from flexattn.mods import bind
from flexattn.mods.expr import walk
from flexattn.problem import Captures, Problem, Shape, Sparsity, make_problem
from flexattn.runtime.build import compile_source, unloaded
from flexattn.runtime.candidates import Choice
from flexattn.runtime.dispatch import chosen
from flexattn.settings import override
from tests.problems import H200
from tests.random_mods.mods import RandomMod, random_mod
from tests.random_mods.outcomes import Outcome, Task, failure

BLOCK = 128


def served(problem: Problem, device: Device) -> tuple[int, Choice]:
    """The candidate that serves a call, and how many were tried; raises what the call would raise.

    This alone knows how dispatch goes through its candidates.
    """
    with override(strict=False):
        choice = chosen(problem, device, NONE, partial(unloaded, device=device))
    return len(choice.attempts), choice


def problem_of(mod: RandomMod) -> Problem:
    """A call with this mod: prefill, and decode for a quarter, of sizes drawn for it."""
    draw = random.Random(f"{mod.seed} {mod.index} problem")
    kind = draw.choice(("prefill", "prefill", "prefill", "decode"))
    D, dtype = draw.choice((64, 128, 256)), draw.choice(("bfloat16", "bfloat16", "float16"))
    S = draw.choice((1031, 8192))
    L = draw.choice((1, 1, 5)) if kind == "decode" else S
    made = mod.make(2, 8, L, S)
    score, mask = (bind(fn, of) for fn, of in zip(made, ("score", "mask"), strict=True))
    sparsity = None
    if mask is not None:
        per_head = any(node.value == "h" for node in walk(mask.mod.expr))
        sparsity = Sparsity(BLOCK, BLOCK, True, per_head, draw.random() < 0.5)
    shape = Shape(2, 8, 2, L, S, D, D)
    return make_problem(kind, dtype, shape, score, mask, sparsity)  # type: ignore[arg-type]


def compiled(task: Task) -> Outcome:
    """Every kernel of a call: the attention, what merges decode's splits, the block mask."""
    begin = time.monotonic()
    mod = random_mod(task.seed, task.index)
    found: dict[str, Any] = {"mod": str(mod)}
    try:
        problem = problem_of(mod)
        found["call"] = problem.describe()
        number, choice = served(problem, H200)
        found |= {"how": "served", "candidate": number, "config": describe(choice.config)}
        if problem.structure.mask is not None:
            compile_source(_block_mask(problem.structure.mask), H200)
    except Exception as error:  # whatever it is, it is what a user would see
        found |= failure(error)
    return Outcome(task.index, seconds=round(time.monotonic() - begin, 2), **found)


def _block_mask(mask: Captures) -> Any:
    return render_block_mask(mask, BLOCK, BLOCK, H200)
