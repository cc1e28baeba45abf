"""Selections for tests, and the map of the pairs of query and key that they keep."""

import math
import random
from dataclasses import replace

import torch

from flexattn import Selection, create_block_mask, create_mask
from flexattn.catalogue import causal
from tests.gradients import compared
from tests.serving import (
    assert_right as assert_plan_right,
    finely_quantized,
    plan_for,
    run as run_plan,
)
from tests.support import assert_close_as, assert_judged, run


def pairs(selection, batch, Hq, q_len, kv_len):
    """bool [batch, Hq, q_len, kv_len] from the indices, one by one, and its mask_mod."""
    indices, counts = selection.indices.cpu(), selection.counts
    counts = counts if counts is None else counts.cpu()
    B, heads, blocks, k = indices.shape
    kept = torch.zeros(batch, Hq, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(Hq):
            for r in range(blocks):
                at = b % B, h * heads // Hq, r
                valid = k if counts is None else max(0, int(counts[at]))
                for unit in indices[at][:valid].tolist():
                    if unit >= 0:
                        rows = slice(r * selection.rows, (r + 1) * selection.rows)
                        keys = slice(unit * selection.unit, (unit + 1) * selection.unit)
                        kept[b, h, rows, keys] = True
    if selection.mask_mod is not None:
        device = selection.indices.device
        sizes = batch, Hq, q_len, kv_len
        kept &= create_mask(selection.mask_mod, *sizes, device=str(device)).cpu()
    return kept


def dense_mask(selection, q, k):
    """A mask_mod that reads those pairs."""
    kept = pairs(selection, *q.shape[:3], k.shape[2]).to(q.device)

    def mask_mod(b, h, q_idx, kv_idx):
        return kept[b, h, q_idx, kv_idx]

    return mask_mod


def mask_of(selection, q, k):
    """The BlockMask of a mask_mod that reads those pairs."""
    batch, Hq, q_len, kv_len = *q.shape[:3], k.shape[2]
    return create_block_mask(dense_mask(selection, q, k), batch, Hq, q_len, kv_len, q.device)


def assert_right(selection, q, k, v, got=None, **more):
    """Hold out and lse of a call, or what is given, to the oracle by the accuracy rule."""
    with torch.no_grad():
        if got is None:
            got = run(q, k, v, max_scores=False, block_mask=selection, **more)
        assert_judged(got, q, k, v, block_mask=mask_of(selection, q, k), **more)


def assert_gradients(selection, q, k, v):
    """Hold the gradients of q, k and v to the oracle's."""
    for each in compared(q, k, v, mask_mod=dense_mask(selection, q, k), chosen=selection):
        assert_close_as(*each)


def drawn(seed, sizes=(16, 32, 64, 128)):
    """A Selection with all that may be odd in one, and (batch, Hq, Hkv, q_len, kv_len)."""
    draw = random.Random(f"selection {seed}")
    torch_draw = torch.Generator().manual_seed(seed)
    rows, unit = draw.choice(sizes), draw.choice(sizes)
    Hkv, group, batch = draw.choice((1, 2)), draw.choice((1, 2, 3)), draw.choice((1, 2))
    q_len, kv_len = draw.randint(1, 300), draw.randint(1, 300)
    k, heads = draw.choice((1, 2, 5)), draw.choice((1, Hkv, Hkv * group))
    blocks, units = -(-q_len // rows), -(-kv_len // unit)
    shape = draw.choice((1, batch)), heads, blocks, k
    # Some below 0, some past the keys, some twice.
    indices = torch.randint(-2, units + 2, shape, generator=torch_draw)
    counts = torch.randint(0, k + 1, shape[:3], generator=torch_draw)
    found = Selection(
        indices.to(draw.choice((torch.int32, torch.int64))),
        draw.choice((None, counts)),
        unit,
        rows,
        draw.choice((None, causal)),
    )
    return found, (batch, Hkv * group, Hkv, q_len, kv_len)


def drawn_units(each, k, unit):
    """A plan's indices [B, Hkv, k]: some below 0, past the keys or twice; one head has none."""
    draw = torch.Generator().manual_seed(97 * k + unit)
    shape = len(each.kv_lens), each.heads[1], k
    units = -(-max(each.kv_lens) // unit)
    found = torch.randint(-2, units + 3, shape, generator=draw, dtype=torch.int32)
    found[..., k // 2] = found[..., 0]
    found[0, -1] = -1
    return found.to(each.device)


def check_plan(each, k, unit, *, mask_mod=None, exact=None, given=lambda plan: {}, **options):
    """Hold a plan that reads chosen keys to the oracle; no other key is there. Returns the plan.

    The other arguments are those of `tests.serving.check`.
    """
    Hq, Hkv = each.heads
    units = drawn_units(each, k, unit)
    chosen = Selection(units[:, :, None], None, unit)
    keys = pairs(chosen, len(units), Hq, 1, max(each.kv_lens))[:, :, 0].to(each.device)

    def kept(b, h, q_idx, kv_idx):
        inside = keys[b, h, kv_idx]
        return inside if mask_mod is None else inside & mask_mod(b, h, q_idx, kv_idx)

    def poisoned(source):
        found = []
        for b, x in enumerate(source):
            there = keys[b, :: Hq // Hkv, : len(x)].T[..., None]
            found.append(torch.where(there, x.float(), math.nan).to(x.dtype))
        return found

    sinks = options.pop("sinks", None)
    ragged = len(set(each.q_lens)) > 1
    plan = plan_for(
        each,
        selection=(k, unit),
        mask_mod=mask_mod,
        sinks=sinks is not None,
        ragged=ragged,
        **options,
    )
    few = replace(each, k=poisoned(each.k), v=poisoned(each.v))
    call = {} if sinks is None else {"sinks": sinks}
    layout = options.get("layout", "NHD")
    got = run_plan(plan, few, layout=layout, selection=units, **call, **given(plan))
    score_mod = options.get("score_mod")
    assert_plan_right(got, each, exact=exact, mask_mod=kept, score_mod=score_mod, **call)
    return plan


def latent_of_eight_bits(each, dtype, page):
    """As of `finely_quantized` with scales of tokens, where V is the first columns of K."""
    few, wide, steps = finely_quantized(each, dtype, "token", page)
    few.v[:] = [x[..., : v.shape[2]] for x, v in zip(few.k, each.v, strict=True)]
    wide.v[:] = [x.float() * step for x, step in zip(few.v, steps.v, strict=True)]
    return few, wide, steps
