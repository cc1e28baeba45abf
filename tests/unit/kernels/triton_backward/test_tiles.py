"""Programs of a backward cover every key and every row once; its tiles fit a mask's blocks."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.triton_backward.config import (
    BackwardConfig,
    backward_grid,
    fit_to_mask,
    reads_runs,
    sizes_of_launch,
)
from tests.problems import H200, problem

CONFIG = BackwardConfig(64, 128, 128, 64, 8, 2)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (127, 129), (4096, 8192), (130, 1)])
def test_programs_without_a_mask(q_len, kv_len):
    wanted = problem("backward", q_len=q_len, kv_len=kv_len)
    sizes = sizes_of_launch(wanted, CONFIG)
    keys, rows = -(-kv_len // 128), -(-q_len // 128)
    assert sizes["kv_programs"] == wanted.B * wanted.Hkv * keys and sizes["shared_heads"] == 4
    grid = backward_grid(wanted, CONFIG)
    assert grid.programs == sizes["kv_programs"] + wanted.B * wanted.Hq * rows


def test_keys_of_one_batch_are_shared_by_the_heads_of_all():
    wanted = replace(problem("backward"), broadcast_kv=True)
    sizes = sizes_of_launch(wanted, CONFIG)
    assert sizes["kv_units"] == wanted.Hkv and sizes["shared_heads"] == 4 * wanted.B


@pytest.mark.parametrize("block", [(128, 128), (64, 256), (24, 40), (1024, 16)], ids=str)
def test_tiles_divide_blocks_or_cover_them(block):
    """A tile that covers a block has its rest to itself: the next block begins a tile."""
    wanted = problem("backward", mask_mod=causal, block=block, q_len=1000, kv_len=777)
    config = fit_to_mask(CONFIG, wanted.structure)
    for tile, size in zip(
        (config.BLOCK_M1, config.BLOCK_M2, config.BLOCK_N1, config.BLOCK_N2),
        (block[0], block[0], block[1], block[1]),
        strict=True,
    ):
        assert size % tile == 0 or size < tile
    sizes = sizes_of_launch(wanted, config)
    covered = sizes["kv_programs"] // sizes["kv_units"] * min(config.BLOCK_N1, block[1])
    assert covered >= 777 and sizes["q_tiles"] * min(config.BLOCK_M2, block[0]) >= 1000


def test_runs_are_read_where_every_tile_divides_its_block():
    wanted = problem("backward", mask_mod=causal, runs=True)
    assert reads_runs(wanted.structure, CONFIG)
    assert not reads_runs(wanted.structure, replace(CONFIG, BLOCK_M1=256))
    assert not reads_runs(problem("backward", mask_mod=causal).structure, CONFIG)


def test_what_cannot_run_is_refused_in_words():
    family = family_of(CONFIG)

    def words(config, **changes):
        wanted = problem("backward", **changes)
        return "; ".join(family.limits.reasons(config, wanted.structure, H200))

    assert not words(CONFIG)
    assert "powers of two" in words(replace(CONFIG, BLOCK_N2=48))
    assert "num_warps" in words(replace(CONFIG, num_warps=3))
    assert "shared memory" in words(replace(CONFIG, BLOCK_N1=256, num_stages=4), D=256)
    tma = replace(CONFIG, use_tma=True)
    assert not words(tma)
    assert "tensor descriptors" in words(tma, D=192, Dv=128)
    assert "one dtype" in words(CONFIG, kv_dtype="float8_e4m3fn")


def test_a_search_offers_what_can_run():
    from flexattn.kernels.choose.defaults import space

    wanted = problem("backward", mask_mod=causal, runs=True)
    found = space(wanted, H200, "quick")
    assert 1 < len(found) <= 12 and any(isinstance(each, BackwardConfig) for each in found)
    assert len({family_of(each).short(each) for each in found}) == len(found)
