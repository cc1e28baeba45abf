"""A random mod run at odd lengths, held to torch's eager flex_attention in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention

from flexattn import create_block_mask, noop_mask
from flexattn.reference import Precision, Reference, attention
from flexattn.settings import current
from flexattn.verify.gate import judge
from tests.random_mods.mods import random_mod
from tests.random_mods.outcomes import Outcome, Task, outcome
from tests.support import DTYPES, block_mask, inputs, poison, run

HEADS = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2))


def check(seed: int, index: int, longest: int, device: str) -> str:
    """Run a call with the mod and hold it to torch's eager rule; returns its sizes in words.

    Raises AssertionError where it is wrong, and what flexattn raises. A quarter decodes.
    """
    draw = random.Random(f"{seed} {index} check")
    (Hq, Hkv), B = draw.choice(HEADS), draw.choice((1, 2))
    L, S = (2 * draw.randrange((longest + 1) // 2) + 1 for _ in range(2))
    L = draw.choice((1, 1, 3, 13)) if draw.random() < 0.25 else L
    D, dtype = draw.choice((64, 64, 128, 256)), draw.choice(("bf16", "bf16", "fp16"))
    call = f"{dtype} {B=} {Hq=} {Hkv=} {L=} {S=} {D=}"
    score_mod, mask_mod = random_mod(seed, index).make(B, Hq, L, S, device)
    q, k, v = inputs(B, Hq, Hkv, L, S, D, dtype=DTYPES[dtype], device=device)
    try:
        mask = block_mask(mask_mod, q, k)
        made = {"score_mod": score_mod, "block_mask": mask}
        with torch.no_grad():
            got = run(q, k, v, max_scores=draw.random() < 0.5, **made)
            exact = eager(q, k, v, score_mod, mask_mod)
            rounded = attention(q, k, v, precision=Precision.ROUNDED, **made)
        verdict = judge(got, exact, rounded, q.dtype)
        assert verdict.passed, verdict.message()
    except Exception as error:
        error.args = (f"{error}\n{call}",) if len(error.args) == 1 else error.args
        raise
    return call


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
) -> Reference:
    """torch's eager rule in float64. It asks the mask everywhere, and reads no list of blocks."""
    L, S = q.shape[2], k.shape[2]
    block = create_block_mask(noop_mask, None, None, L, S, q.device)
    described = (*block.as_tuple()[:-1], mask_mod or noop_mask)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        out, lse, top = math_attention(
            q.double(), k.double(), v.double(), score_mod or _unchanged, described,
            1 / math.sqrt(q.shape[-1]), {},
        )  # fmt: skip
    finally:
        torch.set_default_dtype(default)
    # Its logarithms are to the base 2.
    return Reference(out, lse * math.log(2), top * math.log(2))


def _unchanged(score: torch.Tensor, *positions: torch.Tensor) -> torch.Tensor:
    return score


def checked(task: Task) -> Outcome:
    """The same as an outcome."""
    named, device = (task.seed, task.index), prepared()
    return outcome(task, random_mod(*named), lambda: check(*named, task.longest, device))


@lru_cache(maxsize=1)
def prepared() -> str:
    """The device of this process, whose outputs hold NaN from now on.

    Raises RuntimeError where the oracle alone would answer, and be compared with itself.
    """
    poison(pytest.MonkeyPatch())
    if current().interpret:
        from tests.quick_interpreter import hurry

        hurry()
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU: set FLEXATTN_INTERPRET=1 to run in Triton's interpreter")
    return "cuda"
