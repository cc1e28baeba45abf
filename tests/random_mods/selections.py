"""Random Selections beside score mods, masks and sinks: results and gradients, held to float64's.

Indices may be given twice, lie below 0, past the keys or far away; rows may be empty; heads are
one, key's or query's; units and rows are of any size, so that all ways of a Selection are drawn.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

from flexattn import Selection
from flexattn.catalogue import CASES, case, causal, head_bias, relative_bias, sliding_window
from tests.random_mods.checking import prepared
from tests.random_mods.gradients import hold_gradients
from tests.random_mods.outcomes import Outcome, Task, outcome
from tests.selections import assert_right, dense_mask
from tests.support import DTYPES, inputs

SIZES = (1, 3, 16, 16, 20, 32, 48, 64, 64, 128, 128, 256)
MASKS = [each.name for each in CASES if each.build is not CASES[0].build]
MASKS = [name for name in MASKS if case(name).make(1, 1, 1, 4, 4).mask_mod is not None]
SCORES = (None, None, "softcap_30", "alibi", "length_temperature", "relative_bias", "head_bias")
# What lies far outside, by how wide indices are.
FAR = {torch.int32: (-(2**31), 2**31 - 1), torch.int64: (-(2**40), 2**40)}


class Drawn(NamedTuple):
    """A Selection, and the call that it stands in; make(*tables) gives the score_mod."""

    selection: Selection
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    make: Any
    tables: list[torch.Tensor]
    sinks: torch.Tensor | None
    call: str


def random_indices(draw: random.Random, shape: tuple[int, ...], units: int) -> torch.Tensor:
    """Some below 0, some past the last unit, some twice, some far away; rows that have none."""
    dtype = draw.choice((torch.int32, torch.int64))
    made = torch.Generator().manual_seed(draw.randrange(2**31))
    odd = draw.choice((0, 2))
    indices = torch.randint(-odd, units + odd, shape, generator=made, dtype=dtype)
    if draw.random() < 0.3:
        far = torch.rand(shape, generator=made) < 0.1
        indices[far] = draw.choice(FAR[dtype])
    if draw.random() < 0.3:
        indices[torch.rand(shape[:3], generator=made) < 0.3] = -1
    # As another layout has them.
    return indices.mT.contiguous().mT if draw.random() < 0.2 else indices


def drawn(seed: int, index: int, longest: int, device: str) -> Drawn:
    """The call of this name."""
    draw = random.Random(f"{seed} {index} selection")
    made = torch.Generator().manual_seed(index)
    Hkv, group, B = draw.choice((1, 2)), draw.choice((1, 2, 3)), draw.choice((1, 2))
    Hq = Hkv * group
    L, S = draw.randint(1, longest), draw.randint(1, longest)
    L = draw.choice((1, 3, 16)) if draw.random() < 0.2 else L
    D, dtype = draw.choice((16, 40, 64)), draw.choice(("fp32", "fp32", "fp16", "bf16"))
    unit, rows = draw.choice(SIZES), draw.choice(SIZES)
    k, heads = draw.choice((1, 1, 2, 5, 9)), draw.choice((1, Hkv, Hq))
    blocks, units = -(-L // rows), -(-S // unit)
    shape = draw.choice((1, B)), heads, blocks, k
    masked = draw.choice(("none", "causal", "window", "case", "case"))
    name = draw.choice(MASKS)
    mask_mod = {
        "none": None,
        "causal": causal,
        "window": sliding_window(draw.randint(0, S)),
        "case": case(name).make(B, Hq, Hkv, L, S, device, torch.float32, index).mask_mod,
    }[masked]
    if draw.random() < 0.2:
        scores = torch.randn((*shape[:3], units), generator=made).to(device)
        found = Selection.from_topk(
            scores, k, unit=unit, rows=rows, causal=mask_mod is causal,
            mask_mod=None if mask_mod is causal else mask_mod,
        )  # fmt: skip
    else:
        indices, counts = random_indices(draw, shape, units).to(device), None
        if draw.random() < 0.5:
            counts = torch.randint(-1, k + 2, shape[:3], generator=made).to(device)
        found = Selection(indices, counts, unit, rows, mask_mod)
    score = draw.choice(SCORES)
    tables: list[torch.Tensor] = []
    if score == "relative_bias":
        tables = [torch.randn(Hq, 2 * max(L, S), generator=made).to(device)]
        make: Any = lambda table: relative_bias(table, max(L, S))  # noqa: E731
    elif score == "head_bias":
        tables = [torch.randn(B, Hq, L, S, generator=made).to(device)]
        make = head_bias
    else:
        mod = score and case(score).make(B, Hq, Hkv, L, S, device, torch.float32).score_mod
        make = None if mod is None else lambda: mod
    sinks = torch.randn(Hq, generator=made).to(device) if draw.random() < 0.3 else None
    q, key, value = inputs(B, Hq, Hkv, L, S, D, dtype=DTYPES[dtype], device=device)
    call = f"{dtype} {B=} {Hq=} {Hkv=} {L=} {S=} {D=} {unit=} {rows=} {k=} {heads=} {score=}"
    call += f" mask={name if masked == 'case' else masked} sinks={sinks is not None}"
    return Drawn(found, q, key, value, make, tables, sinks, call)


def check_selection(seed: int, index: int, longest: int, device: str) -> str:
    """Hold a call and its gradients, in tables and sinks too, to the oracle; returns it in words.

    Raises AssertionError where one is wrong, and what flexattn raises.
    """
    selection, q, k, v, make, tables, sinks, call = drawn(seed, index, longest, device)
    try:
        score_mod = None if make is None else make(*tables)
        assert_right(selection, q, k, v, score_mod=score_mod, sinks=sinks)
        if q.dtype is torch.bfloat16:  # whose own rounding is most of what gradients are off by
            q, k, v = (x.float() for x in (q, k, v))
        more = {"make": make, "tensors": tables, "sinks": sinks}
        hold_gradients(q, k, v, mask_mod=dense_mask(selection, q, k), chosen=selection, **more)
    except Exception as error:
        error.args = (f"{error}\n{call}",) if len(error.args) == 1 else error.args
        raise
    return call


def checked_selection(task: Task) -> Outcome:
    """The outcome of one call."""
    named, device = (task.seed, task.index), prepared()
    return outcome(task, "", lambda: check_selection(*named, task.longest, device))
