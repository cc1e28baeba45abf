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
from flexattn.problem import out_dtype
from flexattn.problem.inputs import Descales
from flexattn.reference import Precision, Reference, attention
from flexattn.settings import current
from flexattn.verify.gate import E4M3_SHARE, RMS_SHARE, judge
from tests.random_mods.mods import random_mod
from tests.random_mods.outcomes import Outcome, Task, outcome
from tests.support import DTYPES, block_mask, inputs, poison, run

HEADS = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2))
TENSORS = DTYPES | {"e4m3": torch.float8_e4m3fn}


def check(seed: int, index: int, longest: int, device: str, e4m3: bool = False) -> str:
    """Run a call with the mod and hold it to torch's eager rule; returns its sizes in words.

    e4m3: q, k and v are of it, with factors of heads, and in half of the calls weights may be.
    Raises AssertionError where it is wrong, and what flexattn raises. A quarter decodes.
    """
    draw = random.Random(f"{seed} {index} check")
    (Hq, Hkv), B = draw.choice(HEADS), draw.choice((1, 2))
    L, S = (2 * draw.randrange((longest + 1) // 2) + 1 for _ in range(2))
    L = draw.choice((1, 1, 3, 13)) if draw.random() < 0.25 else L
    D, dtype = draw.choice((64, 64, 128, 256)), draw.choice(("bf16", "bf16", "fp16"))
    maxima, weights = draw.random() < 0.5, "exact"
    if e4m3:
        D, dtype = 16 * draw.randint(1, 16), "e4m3"
        weights = draw.choice(("exact", "e4m3"))
    call = f"{dtype} {B=} {Hq=} {Hkv=} {L=} {S=} {D=} {weights=}"
    score_mod, mask_mod = random_mod(seed, index).make(B, Hq, L, S, device)
    q, k, v = inputs(B, Hq, Hkv, L, S, D, dtype=TENSORS[dtype], device=device)
    wide, factors = (q, k, v), Descales()
    more: dict[str, Any] = {}
    if e4m3:
        made_of = torch.Generator().manual_seed(index)
        factors = Descales(
            *((torch.rand(x.shape[:2], generator=made_of) + 0.5).to(device) for x in wide)
        )
        wide = tuple(x.double() * y[..., None, None] for x, y in zip(wide, factors, strict=True))
        more = {f"{name}_descale": x for name, x in zip("qkv", factors, strict=True)}
        more["kernel_options"] = {"FP8_WEIGHTS": weights}
    try:
        mask = block_mask(mask_mod, q, k)
        made = {"score_mod": score_mod, "block_mask": mask}
        with torch.no_grad():
            got = run(q, k, v, max_scores=maxima, **made, **more)
            exact = eager(*wide, score_mod, mask_mod)
            # Where no weight is rounded, within the budget of weights of 16 bits.
            rounds = weights == "e4m3" and D > 128
            held = (q, k, v if rounds else v.to(out_dtype(v.dtype)))
            rounded = attention(*held, descales=factors, precision=Precision.ROUNDED, **made)
        share = E4M3_SHARE if rounds else RMS_SHARE
        verdict = judge(got, exact, rounded, out_dtype(q.dtype), share)
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


def checked_e4m3(task: Task) -> Outcome:
    """The same with inputs of e4m3. Raises RuntimeError without a GPU: nothing interprets it."""
    if prepared() == "cpu":
        raise RuntimeError("no template for e4m3 is interpreted: run it on a Hopper GPU")
    named = (task.seed, task.index)
    return outcome(task, random_mod(*named), lambda: check(*named, task.longest, "cuda", True))


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
