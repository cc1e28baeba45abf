"""What a release of Triton is held to on a GPU: the catalogue in four forms, and random mods.

Each random mod is rich in `//`, `%` and shifts and has one form, drawn by the seed; each entry of
the catalogue has all. Every result is held to the oracle in float64 by the accuracy rule.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexattn.catalogue import Case
from tests.cases import CASES
from tests.gradients import assert_gradients
from tests.random_mods.checking import HEADS, prepared
from tests.random_mods.divided import divided_mod
from tests.random_mods.gradients import check_gradients
from tests.random_mods.mods import RandomMod
from tests.random_mods.outcomes import Outcome, Task, failure
from tests.serving import assert_right, batch, plan_for, run as run_plan
from tests.support import DTYPES, assert_accurate, block_mask, inputs

FORMS = ("forward", "backward", "decode", "serving")
CATALOGUE = [(entry, form) for form in FORMS for entry in CASES]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """L, S: of rows and keys; a plan's requests have S keys at most, and L of them are new."""

    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    D: int
    dtype: str
    backend: str

    @staticmethod
    def drawn(draw: random.Random, form: str, longest: int, device: str) -> _Sizes:
        (Hq, Hkv), B = draw.choice(HEADS), draw.choice((2, 3))
        L, S = (2 * draw.randrange(6, (longest + 1) // 2) + 1 for _ in range(2))
        if form in ("decode", "serving"):
            L, S = draw.choice((1, 1, 3, 5)), 3 * S if device == "cuda" else S
        D = draw.choice((64, 64, 128, 256) if device == "cuda" else (16, 24))
        dtype = draw.choice(("bf16", "bf16", "fp16") if device == "cuda" else ("fp32",))
        backend = draw.choice(("TRITON", _prefill(device))) if form == "forward" else ""
        return _Sizes(B, Hq, Hkv, L, S, D, dtype, backend or "TRITON_DECODE")


def _prefill(device: str) -> str:
    """The template that is not every GPU's, where there is one."""
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    return "GLUON" if hopper else "TRITON"


def part_of(task: Task) -> tuple[str, str]:
    """(catalogue or random, form) of a task; the catalogue has the first indices."""
    if task.index < len(CATALOGUE):
        return "catalogue", CATALOGUE[task.index][1]
    return "random", random.Random(f"{task.seed} {task.index} form").choice(FORMS)


def check_battery(task: Task, device: str) -> str:
    """Run one and hold it to the oracle; returns its sizes in words.

    Raises AssertionError where it is wrong, and what flexattn raises.
    """
    kind, form = part_of(task)
    draw = random.Random(f"{task.seed} {task.index} battery")
    sizes = _Sizes.drawn(draw, form, task.longest, device)
    index = task.index - len(CATALOGUE)
    if kind == "random" and form == "backward":
        mod = divided_mod(task.seed, index, score=True)
        return check_gradients(task.seed, index, task.longest, device, mod)
    try:
        mod, (B, H, L, S) = _mod_of(task), _shape(sizes, form)
        if isinstance(mod, RandomMod):
            score_mod, mask_mod = mod.make(B, H, L, S, device)
        else:
            built = mod.make(B, H, sizes.Hkv, L, S, device, DTYPES[sizes.dtype])
            score_mod, mask_mod = built.score_mod, built.mask_mod
        _hold(form, sizes, device, score_mod, mask_mod)
    except Exception as error:
        error.args = (f"{error}\n{sizes}",) if len(error.args) == 1 else error.args
        raise
    return str(sizes)


def _shape(sizes: _Sizes, form: str) -> tuple[int, int, int, int]:
    """B, H, L and S of what mods capture; a plan's rows stand among the keys."""
    return sizes.B, sizes.Hq, sizes.S if form == "serving" else sizes.L, sizes.S


def _hold(form: str, s: _Sizes, device: str, score_mod: Any, mask_mod: Any) -> None:
    dtype = DTYPES[s.dtype]
    if form == "serving":
        mods = {"score_mod": score_mod, "mask_mod": mask_mod}
        lengths = [s.S, s.S // 2 + s.L, s.L][: s.B]
        each = batch([s.L] * s.B, lengths, s.Hq, s.Hkv, s.D, dtype=dtype, device=device)
        assert_right(run_plan(plan_for(each, page=16, **mods), each), each, **mods)
        return
    q, k, v = inputs(s.B, s.Hq, s.Hkv, s.L, s.S, s.D, dtype=dtype, device=device)
    if form == "backward":
        make = None if score_mod is None else lambda: score_mod
        block = 128 if device == "cuda" else 16
        assert_gradients(q, k, v, make=make, mask_mod=mask_mod, block=block)
        return
    mask = block_mask(mask_mod, q, k)
    options = {"BACKEND": s.backend}
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=options)


def battery(task: Task) -> Outcome:
    """The same in a process of its own."""
    begin = time.monotonic()
    device = prepared()
    found: dict[str, Any] = {}
    try:
        found["mod"] = str(_mod_of(task))
        found |= {"how": "served", "call": check_battery(task, device)}
    except Exception as error:  # whatever it is, it is what a user would see
        found |= failure(error)
    seconds = round(time.monotonic() - begin, 2)
    return Outcome(task.index, seconds=seconds, **found)


def _mod_of(task: Task) -> Case | RandomMod:
    kind, form = part_of(task)
    if kind == "catalogue":
        return CATALOGUE[task.index][0]
    return divided_mod(task.seed, task.index - len(CATALOGUE), score=form == "backward")


def parts(found: Sequence[Outcome], seed: int) -> str:
    """A line for each part: how many were right, and which were not."""
    members_of: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for each in found:
        members_of[part_of(Task(seed, each.index))].append(each)
    lines = []
    for names, members in sorted(members_of.items()):
        name = " ".join(names)
        others = [each for each in members if each.how != "served"]
        named = ", ".join(f"{each.index} {each.how}" for each in others[:8])
        told = f": {named}" if named else ""
        lines.append(f"{name:20s} {len(members) - len(others):4d} of {len(members)} right{told}")
    return "\n".join(lines)
