"""After ten values of every captured number the loops spill no more than they did at the first."""

from functools import cache
from itertools import islice

import pytest
import torch

from flexattn import catalogue
from flexattn.kernels.choose.defaults import candidates
from flexattn.mods import bind
from flexattn.mods.bind import clear
from flexattn.presets.mods import last_keys, sliding_tiles
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import loop_spills, resources, starved
from tests import odd_mods
from tests.families import render
from tests.problems import H200, problem

VALUES = 10
# Configs of large tiles that may give way to each other before a smaller one serves.
GIVING_WAY = 4


def tiled_neighbourhood(width, height, columns, rows, tile_width, tile_height):
    """attention-gym's: tokens of a tile lie together, and a window moves inwards at the edges."""

    def place(at):
        tile, inside = at // (tile_height * tile_width), at % (tile_height * tile_width)
        x = tile % (width // tile_width) * tile_width + inside % tile_width
        return x, tile // (width // tile_width) * tile_height + inside // tile_width

    def mask_mod(b, h, q_idx, kv_idx):
        (q_x, q_y), (x, y) = place(q_idx), place(kv_idx)
        q_x = q_x.clamp(columns // 2, width - 1 - columns // 2)
        q_y = q_y.clamp(rows // 2, height - 1 - rows // 2)
        return ((q_x - x).abs() <= columns // 2) & ((q_y - y).abs() <= rows // 2)

    return mask_mod


def block_diffusion(length, size):
    """Noised tokens see their own block and clean ones before it; clean ones are block causal."""

    def mask_mod(b, h, q_idx, kv_idx):
        q_block, block = q_idx % length // size, kv_idx % length // size
        q_noised, noised = q_idx < length, kv_idx < length
        own = (q_block == block) & (q_noised == noised)
        earlier = (q_block > block) & q_noised & ~noised
        return own | earlier | ((q_block >= block) & ~q_noised & ~noised)

    return mask_mod


def bare_tiles(frames, rows, cols, *rest):
    return catalogue.sliding_tile_3d((frames, rows, cols), rest[:3], rest[3:])


def media_tiles(frames, rows, cols, tokens, *window):
    return sliding_tiles((frames, rows, cols), tokens, window)


def rope(width):
    """attention-gym's MLA: what positions add is a dot product of captured rows."""
    rows = torch.zeros(2, 32, 64, width, dtype=torch.bfloat16)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + torch.dot(rows[b, h, q_idx], rows[b, h // 32, kv_idx])

    return score_mod


TABLE = torch.zeros(32, 16384, dtype=torch.bfloat16)
BLOCKS = torch.zeros(2, 32, 64, 64, dtype=torch.bool)
ANCESTORS = torch.zeros(64, 64, dtype=torch.bool)
# A factory of numbers: which mod it makes, what the first call gives, and how each number grows.
MASKS = {
    "causal_offset": (catalogue.causal_offset, (5,), (7,)),
    "sliding_window": (catalogue.sliding_window, (100,), (9,)),
    "dilated_window": (catalogue.dilated_window, (100, 3), (9, 1)),
    "checkerboard": (odd_mods.checkerboard, (3,), (2,)),
    "block_table": (lambda size: catalogue.block_table(BLOCKS, size), (16,), (3,)),
    "natten_2d": (catalogue.natten_2d, (16, 16, 5), (1, 3, 2)),
    "sliding_tile_3d": (bare_tiles, (6, 6, 5, 2, 3, 2, 3, 2, 1), (2, 3, 1, 1, 1, 1, 1, 1, 1)),
    "sliding_tiles": (media_tiles, (8, 6, 10, 128, 3, 3, 5), (1, 2, 1, 64, 1, 1, 1)),
    "last_keys": (lambda window: last_keys(window, 2, 4096), (128,), (64,)),
    "tree": (lambda context: catalogue.tree(ANCESTORS, context), (100,), (11,)),
    "tiled_neighbourhood": (tiled_neighbourhood, (16, 16, 5, 5, 4, 4), (15, 7, 2, 2, 1, 1)),
    "block_diffusion": (block_diffusion, (512, 16), (96, 3)),
}
SCORES = {
    "scaled": (catalogue.scaled, (0.5,), (0.25,)),
    "softcap": (catalogue.softcap, (30.0,), (5.0,)),
    "t5_bias": (lambda most: catalogue.t5_bias(TABLE.mT[:32], most), (100,), (30,)),
    "relative_bias": (lambda offset: catalogue.relative_bias(TABLE, offset), (8192,), (-16,)),
    "nested": (lambda factor: odd_mods.nested(factor, TABLE[0]), (0.75,), (0.125,)),
    "last_entries": (
        lambda length: odd_mods.last_entries(TABLE, length), (8192,), (-64,),
    ),
}  # fmt: skip
ALL = {name: ("mask", *each) for name, each in MASKS.items()}
ALL |= {name: ("score", *each) for name, each in SCORES.items()}
# All numbers at once, which is the most general kernel; of several the first, and the last.
WHAT_CHANGES = [
    (name, which)
    for name, (_, _, first, _) in ALL.items()
    for which in (None, *((0, len(first) - 1) if len(first) > 1 else ()))
]


@pytest.fixture(autouse=True)
def fresh():
    bind(catalogue.causal, "mask")
    clear()


def spilt(kind, mod, D=128):
    """Words in the loops of the config that serves: one that spills gives way to the next."""
    wanted = problem("prefill", D, **{f"{kind}_mod": mod})
    found = []
    for config in islice(candidates(wanted, H200), GIVING_WAY):
        source = render(wanted.structure, config, H200, "test")
        spills, _, stack = loop_spills(compile_source(source, H200).asm["cubin"])
        if not starved(spills, stack):
            return 0
        found.append(spills)
    return min(found)


@cache
def spilt_at_first(name, D):
    kind, factory, first, _ = ALL[name]
    clear()
    return spilt(kind, factory(*first), D)


def after_ten(name, which):
    """The mod of the last of ten values, all bound; which: the number that changes."""
    kind, factory, first, steps = ALL[name]

    def made(i):
        numbers = (
            start + i * step if which in (None, place) else start
            for place, (start, step) in enumerate(zip(first, steps, strict=True))
        )
        return factory(*numbers)

    mods = [made(i) for i in range(VALUES)]
    for mod in mods:
        bind(mod, kind)
    return kind, mods[-1]


def check(name, which, D=128):
    before = spilt_at_first(name, D)
    clear()
    kind, last = after_ten(name, which)
    assert bind(last, kind).scalars
    assert spilt(kind, last, D) <= before


def test_a_dot_product_of_captured_rows_does_not_spill():
    """Sixteen values for each key of a tile were held at once: 3,006 words, and every config of
    large tiles was compiled before one that has room for them."""
    wanted = problem("prefill", score_mod=rope(16))
    config = next(candidates(wanted, H200))
    taken = resources(compile_source(render(wanted.structure, config, H200, "test"), H200), H200)
    assert not taken.loop_spills


@pytest.mark.full_matrix
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("width", [4, 8, 16, 32, 64])
def test_dot_products_of_any_width_do_not_spill(width, D):
    assert not spilt("score", rope(width), D)


@pytest.mark.full_matrix
@pytest.mark.parametrize(("name", "which"), WHAT_CHANGES)
def test_ten_values_spill_no_more_than_the_first(name, which):
    """The second canvas of tiled_neighbourhood spilt 1,727 words in loops, the first none."""
    check(name, which)


@pytest.mark.full_matrix
@pytest.mark.oldest
@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("name", ["sliding_tile_3d", "tiled_neighbourhood", "block_diffusion"])
def test_other_head_dimensions_neither(name, D):
    check(name, None, D)
