"""MLA's template for Hopper: what it serves, and how its parts are merged."""

from dataclasses import replace

import pytest
import torch

from flexattn.device import named
from flexattn.kernels.paged_decode.config import ServingConfig, merge_shape
from flexattn.kernels.paged_decode.limits import serving_reasons
from tests.problems import H200, served, serving_candidates, serving_space
from tests.serving import MLA

# Operands swapped.
FEW = ServingConfig(16, 64, 4, 3, 1, combine="launch", split_policy="whole")


def form(heads=16, B=64, page=64, q_len=1, dims=(576, 512), total_q=0, **options):
    dtypes = (options.pop("dtype", torch.bfloat16), options.pop("kv", torch.bfloat16))
    sizes = (B, q_len, total_q, 8192, heads, 1, *dims, *dtypes, page, "NHD")
    return served(*sizes, None, None, **{"shared_kv": True, **options}).structure


@pytest.mark.parametrize(
    ("about", "word"),
    [
        ({"page": 8}, "page"),
        ({"page": 48}, "page"),
        ({"dims": (576, 256)}, "576 and 512"),
        ({"shared_kv": False}, "shared_kv"),
        ({"kv": torch.float8_e4m3fn}, "16 bits"),
        ({"dtype": torch.float32, "kv": torch.float32}, "16 bits"),
        ({"prefix": True}, "prefix"),
    ],
)
def test_what_it_does_not_serve_it_names(about, word):
    assert not serving_reasons(MLA, form(), H200)
    assert word in "\n".join(serving_reasons(MLA, form(**about), H200))
    assert not any(each.for_mla for each in serving_space(form(**about), H200))


@pytest.mark.parametrize(
    "change", [{"BLOCK_N": 64}, {"num_stages": 2}, {"combine": "last"}, {"combine": "await"}]
)
def test_configs_it_does_not_have(change):
    assert serving_reasons(replace(MLA, **change), form(), H200)


@pytest.mark.parametrize(
    "change",
    [{"BLOCK_N": 128}, {"BLOCK_M": 32}, {"BLOCK_M": 8}, {"num_stages": 1}, {"num_stages": 4}],
)
def test_configs_that_few_rows_do_not_have(change):
    """An SM holds three tiles of keys beside 16 rows, two beside 32."""
    assert not serving_reasons(FEW, form(), H200)
    assert serving_reasons(replace(FEW, **change), form(), H200)
    assert not serving_reasons(replace(FEW, BLOCK_M=32, num_stages=2), form(heads=32), H200)


def test_devices():
    for name in ("nvidia-a100", "nvidia-b200"):
        assert "sm_90" in "\n".join(serving_reasons(MLA, form(), named(name)))
    found = [each for each in serving_space(form(), H200) if each.for_mla]
    assert {each.least for each in found if not each.swap_ab} == {1, 2, 4, 8}
    assert {(each.least, each.num_stages) for each in found if each.swap_ab} == {
        (least, stages) for least in (1, 2) for stages in (2, 3)
    }
    assert found[0] == serving_space(form(B=1), H200)[0] == replace(FEW, num_stages=2)
    assert not any(each.swap_ab for each in serving_space(form(heads=64), H200))


def test_all_sms_merge_the_parts_of_one_request():
    one = merge_shape(form(B=1), MLA, H200)
    assert (one.rows, one.columns, one.grid(132)) == (1, 128, 64)
    assert one.rows * one.row_parts == 16, "rows that there are, not those of the tile"
    few = merge_shape(form(B=1), FEW, H200)
    assert (few.rows, few.columns, few.parts, few.grid(132)) == (1, 64, 128, 128)
    many = merge_shape(form(heads=128), MLA, H200)
    assert many.work_tiles == 128 and many.columns == 512
    # More programs than are there at once would make a launch without parts wait for each wave.
    assert many.row_parts * many.turns * many.rows == 64 and many.grid(132) <= 4 * 132
    # More work tiles than programs: each program has the one that it ends in.
    for about in ({"B": 256}, {"total_q": 512}):
        shape = merge_shape(form(**about), MLA, H200)
        assert (shape.work_tiles, shape.grid(132)) == (0, 132 * shape.row_parts)


def test_chosen_keys():
    """Few rows are gathered too, and single keys sifted; one request has tiles of 32 rows."""
    two = replace(FEW, num_stages=2)
    few, units = form(selection=(2048, 1)), form(selection=(64, 32))
    assert not serving_reasons(two, few, H200) and serving_reasons(FEW, few, H200)
    for about, many in ((few, True), (units, False), (form(selection=(2049, 1)), False)):
        for config in (two, MLA):
            assert config.gathers(about) and config.sifts(about) == many
    for heads, B, config in (
        (16, 8, two), (128, 1, replace(two, BLOCK_M=32)), (128, 2, MLA), (24, 8, MLA)
    ):  # fmt: skip
        problem = served(
            B, 1, 0, 32768, heads, 1, 576, 512, torch.bfloat16, torch.float8_e4m3fn, 64, "NHD",
            None, None, shared_kv=True, scaled=True, selection=(2048, 1),
        )  # fmt: skip
        assert next(serving_candidates(problem, H200)) == config
        # Parts of 64 rows of eight bits are float16, so that a merge holds twice as many.
        short = config == MLA
        assert config.short_parts(problem.structure) == short and not config.short_parts(few)
        shape = merge_shape(problem.structure, config, H200)
        assert shape.rows * shape.columns * shape.parts == (16384 if short else 4096)
