"""What follows Hopper's backward finds dq where threads, or the copy engine, have added it."""

import re
from dataclasses import replace

import pytest
import torch

from flexattn.device import detect
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig, columns
from flexattn.kernels.hopper_backward.narrow import dq_boxes
from flexattn.runtime.build import builder
from tests.families import render
from tests.problems import H200, problem

CPU, LENGTH = torch.device("cpu"), 130
PLAIN, TALL, SPLIT = (HopperBackwardConfig(*tile, 1) for tile in ((64, 128), (128, 128), (64, 64)))
ENGINE = {"dq_tma": True}
BY_PRODUCT = replace(SPLIT, by_product=True)
FORMS = {
    "whole": (PLAIN, 64, 64),
    "narrow": (PLAIN, 80, 80),
    "fewer than values": (PLAIN, 40, 104),
    "tall": (TALL, 48, 48),
    "shared": (SPLIT, 176, 192),
    "by product whole": (BY_PRODUCT, 256, 256),
    "by product": (BY_PRODUCT, 160, 160),
    "by product, few": (BY_PRODUCT, 72, 144),
    "lean": (PLAIN, 184, 120),
    "lean, few": (PLAIN, 136, 128),
    "engine whole": (replace(PLAIN, **ENGINE), 128, 128),
    "engine": (replace(PLAIN, **ENGINE), 80, 80),
    "engine, few": (replace(PLAIN, **ENGINE), 64, 128),
    "engine tall": (replace(TALL, **ENGINE), 48, 48),
    "halves": (replace(PLAIN, dq_halves=True, **ENGINE), 104, 104),
}
_ADD = re.compile(r"\"(@some )?red\.\S+ \[a\+(\d+)\], \{\$(\d+), \$(\d+), \$(\d+), \$(\d+)\}")


def held(config, width, groups):
    """(thread, value, row, column) of a product of dq, as wgmma leaves it with the threads."""
    rows = config.BLOCK_M
    by_rows = rows == 128
    for warp in range(4 * groups):
        group, n = divmod(warp, 4)
        share = width if by_rows or groups == 1 else width // 2
        for lane in range(32):
            for value in range(share // 2):
                row = 16 * n + lane // 4 + 8 * (value // 2 % 2) + 64 * group * by_rows
                column = value // 4 * 8 + 2 * (lane % 4) + value % 2
                yield 32 * warp + lane, value, row, column + share * group * (not by_rows)


def added_by_threads(text, config, structure):
    """Where the sum of a row and a column is in a tile, by the assembly of the kernel."""
    tile, places = columns(structure), {}
    lean, narrow = "def add_rest" in text, "ADD = gl.constexpr" not in text
    parts = [("add_tile", 0, 128 if lean else tile, 2)]
    if lean:
        parts.append(("add_rest", 128, 64, 2))
    if config.by_product:
        parts = [("add_tile", 0, tile // 2, 1), ("add_tile_if", tile // 2, tile // 2, 1)]
    for name, behind, width, groups in parts:
        body = text[text.index(f"def {name}(") :]
        if not narrow:
            body = text[text.index("ADD = gl.constexpr") :]
        body = body[: body.index('"}"')]
        adds = {}
        values = width // 2 if groups == 1 or config.BLOCK_M == 128 else width // 4
        for some, offset, *operands in _ADD.findall(body):
            for n, operand in enumerate(map(int, operands)):
                adds[operand - values] = (int(offset) + 4 * n, bool(some))
        step = re.search(r"mul\.wide\.u32 b, w, (\d+)", body)
        for thread, value, row, column in held(config, width, groups):
            if value not in adds:
                continue
            offset, some = adds[value]
            if not narrow:
                by = thread + 128 * (behind > 0)
                places[row, behind + column] = (16 * by + offset) // 4
                continue
            if some and groups == 2 and thread >= 128:
                continue
            base = 16 * (thread % 128) + (int(step[1]) if step else 0) * (thread // 128)
            places[row, behind + column] = (base + offset) // 4
    return places


def added_by_engine(config, structure):
    """The same, of the tile in shared memory and its boxes."""
    boxes, tile = dq_boxes(structure, config), columns(structure)
    size, places = config.BLOCK_M * tile // boxes.count, {}
    at = dict(boxes.used[0] + boxes.used[1])
    for thread, value, row, column in held(config, tile, 2):
        eights = tile // 8 if config.BLOCK_M == 128 else tile // 16
        lies = (thread // 128 * eights + value // 4) * 512 + thread % 128 * 4 + value % 4
        if lies // size in at:
            places[row, column] = at[lies // size] * size + lies % size
    return places


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_found_where_they_are_added(form):
    check(*FORMS[form])


@pytest.mark.parametrize("D", range(40, 257, 8))
def test_every_head_dimension_has_its_columns(D):
    config = next(c for c in (replace(PLAIN, **ENGINE), BY_PRODUCT) if fits(c, D))
    check(config, D, D)
    check(replace(config, by_product=False, dq_tma=False), D, D)


def fits(config, D):
    wanted = problem("backward", D, group=1)
    return not family_of(config).limits.reasons(config, wanted.structure, H200)


def check(config, D, Dv):
    """Each sum of a head's columns has a place of its own in a tile, and goes where it belongs."""
    wanted = problem("backward", D, Dv, kv_len=LENGTH, q_len=LENGTH, group=1)
    assert not family_of(config).limits.reasons(config, wanted.structure, H200)
    around = family_of(config).around(wanted, config, detect(CPU))
    if config.dq_tma:
        places = added_by_engine(config, wanted.structure)
    else:
        text = render(wanted.structure, config, H200, "test").text
        places = added_by_threads(text, config, wanted.structure)
    scratch, count = dict(around.scratch), -(-LENGTH // config.BLOCK_M)
    sums = torch.full((1, count, *scratch["DQ_ACC"][2:]), torch.nan)  # of one head
    tiles = sums.view(count, -1)
    at = [(row, column, place) for (row, column), place in places.items() if column < D]
    row, column, place = torch.tensor(at).unbind(1)
    assert (
        len(at) == config.BLOCK_M * D == len(set(place.tolist())) and len(tiles[0]) > place.max()
    )
    dq = torch.randn(len(tiles), config.BLOCK_M, D)
    tiles[:, place] = dq[:, row, column]
    flags = config.flags
    given = {"DQ_ACC": sums, "DQ": torch.full((1, 1, LENGTH, D), torch.nan).bfloat16()}
    if flags in scratch:
        given[flags] = torch.full(scratch[flags], 2.0).int()
    strides = zip("bhm", given["DQ"].stride(), strict=False)
    fixed = {f"stride_dq{axis}": step for axis, step in strides}
    fixed |= {"Hq": 1, "q_len": LENGTH, "num_queries": count, "sm_scale": 0.5}
    kernel = builder().kernel(around.after, detect(CPU), -1)
    launch = kernel.prepare(count, fixed, tuple(given), spare=(*fixed, *given))
    launch.launch(-1, tuple(given.values()))
    found = dq.view(1, 1, -1, D)[:, :, :LENGTH] * 0.5
    torch.testing.assert_close(given["DQ"], found.bfloat16())
