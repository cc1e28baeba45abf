"""The kernel that merges parts of keys, which Hopper's forward left of a plan's prefills."""

from dataclasses import replace

import pytest
import torch

from flexattn.device import detect
from flexattn.kernels.hopper.ragged import (
    merge_programs,
    part_words,
    ragged_defaults,
    render_merge_parts,
)
from flexattn.runtime.build import builder
from tests.problems import H200, plan_of

CASES = {
    "a group": (8, 2, 128, {"packed_heads": 4}, {}),
    "rows of no head": (14, 2, 64, {"packed_heads": 8}, {"sinks": True}),
    "two tiles of a group": (10, 2, 96, {"packed_heads": 4}, {"lse": True, "sinks": True}),
    "three consumers": (8, 2, 64, {"packed_heads": 4, "consumers": 3}, {"lse": True}),
    "slices": (10, 2, 64, {"packed_heads": 1, "pack_gqa": True}, {"lse": True, "sinks": True}),
    "heads of consumers": (8, 2, 64, {"packed_heads": 1, "pack_gqa": True}, {"lse": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_merge(case):
    Hq, Hkv, D, fields, asked = CASES[case]
    problem = plan_of(4, total_q=999, keys=9999, heads=(Hq, Hkv), D=D, **asked)
    form = problem.structure
    first = replace(next(ragged_defaults(problem, H200)), splits=True, pack_gqa=False)
    config = replace(first, **fields)
    few = replace(detect(torch.device("cpu")), num_sms=8)
    group, rows, tiles = Hq // Hkv, config.all_rows, Hkv * config.head_tiles(Hq // Hkv)
    size = part_words(form, config, few) // (D + 1)
    torch.manual_seed(0)
    outs, logs = torch.randn(size // rows, rows, D), 4 * torch.randn(size // rows, rows)
    logs[tiles] = -torch.inf  # a part whose rows see no key
    outs[tiles] = 0
    # Of two tiles one ends within a request; the first has three parts.
    # Of slices it has the head of the first one.
    tiled = [[7, 999, 3, 0], [300, 1, 2, 3]]
    sliced = config.sliced(group)
    if sliced:
        tiled = [[7, 999, 3, 0, 4], [300, 1, 2, 3, 1]]
    cut = torch.tensor([2, 0, *(word for each in tiled for word in each)], dtype=torch.int32)
    sinks = torch.randn(Hq) if asked.get("sinks") else None
    out = torch.full((999, Hq, D), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((999, Hq), torch.nan)
    given = {
        "OUT": out,
        "WORKSPACE": torch.cat((outs.flatten(), logs.flatten())),
        "CUT_TILES": cut,
    }
    if sinks is not None:
        given["SINKS"] = sinks
    if asked.get("lse"):
        given["LSE"] = lse
    kernel = builder().kernel(render_merge_parts(form, config, few), few, -1)
    ready = kernel.prepare(merge_programs(form, config, few), {"stride_om": Hq * D}, tuple(given))
    ready.launch(-1, tuple(given.values()))
    wanted, total = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    for row, left, parts, slot, *heads in tiled:
        for tile in range(tiles):
            at = (slot + torch.arange(parts)) * tiles + tile
            for r in range(rows):
                token = r // config.packed_heads % config.BLOCK_M
                head = r % config.packed_heads + r // (config.BLOCK_M * config.packed_heads)
                head += tile % config.head_tiles(group) * config.heads
                if sliced:
                    token += (head + heads[0]) // group * config.BLOCK_M
                    head = (head + heads[0]) % group
                if token >= left or head >= group:
                    continue
                h = tile // config.head_tiles(group) * group + head
                each = logs[at, r] * 0.6931471805599453
                extra = each if sinks is None else torch.cat((each, sinks[h : h + 1]))
                total[row + token, h] = extra.logsumexp(0)
                weights = (each - total[row + token, h]).exp()
                wanted[row + token, h] = (weights @ outs[at, r]).bfloat16()
    # Both are rounded to bfloat16: one step apart at most.
    torch.testing.assert_close(out, wanted, equal_nan=True, atol=1e-5, rtol=2**-7)
    if asked.get("lse"):
        torch.testing.assert_close(lse, total, equal_nan=True, atol=1e-5, rtol=1e-6)
