"""The warp-specialised templates, MLA's among them: what they serve, how parts are merged."""

from dataclasses import replace

import pytest
import torch

from flexattn.device import named
from flexattn.kernels.paged_decode.config import ServingConfig, merge_shape
from flexattn.kernels.paged_decode.limits import serving_reasons
from tests.problems import H200, of_form, plan_of, serving_candidates, serving_space
from tests.serving import MLA, PAIR

# Two warpgroups, and one.
ONE = replace(PAIR, num_warps=4)
DEPENDENT = ServingConfig(64, 64, 4, 3, combine="dependent")
# Operands swapped.
FEW = ServingConfig(16, 64, 4, 3, 1, combine="launch", split_policy="whole")


def form(heads=(48, 1), B=16, **options):
    return plan_of(B, heads=heads, **options).structure


def latent(heads=16, B=64, **options):
    """MLA's, of keys whose first columns are values."""
    sizes = {"page": 64, "D": (576, 512), "shared_kv": True}
    return form((heads, 1), B, **{**sizes, **options})


NEITHER = [
    ({"page": 8}, "page"),
    ({"page": 48}, "page"),
    ({"kv": torch.float8_e4m3fn}, "16 bits"),
    ({"dtype": torch.float32, "kv": torch.float32}, "16 bits"),
    ({"prefix": True}, "prefix"),
]


@pytest.mark.parametrize(
    ("config", "about", "word"),
    [
        *((config, *each) for each in NEITHER for config in (PAIR, MLA)),
        (PAIR, {"D": 96}, "64, 128 or 256"),
        (PAIR, {"D": (128, 64)}, "64, 128 or 256"),
        (PAIR, {"shared_kv": True}, "apart"),
        (PAIR, {"B": 513}, "512 requests"),
        (MLA, {"D": (576, 256)}, "576 and 512"),
        (MLA, {"shared_kv": False}, "shared_kv"),
    ],
)
def test_what_it_does_not_serve_it_names(config, about, word):
    made, name = (latent, "for_mla") if config == MLA else (form, "warp_specialized")
    assert not serving_reasons(config, made(), H200)
    assert word in "\n".join(serving_reasons(config, made(**about), H200))
    assert not any(getattr(each, name) for each in serving_space(made(**about), H200))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_stages": 3}, "even"),
        ({"num_stages": 8}, "2 to 6"),
        ({"num_stages": 1}, "2 to 6"),
        ({"num_warps": 2}, "4 or 8"),
        ({"per_sm": 2}, "shared memory"),
        ({"combine": "last"}, "second kernel"),
        ({"least": 0}, "least"),
    ],
)
def test_configs_it_does_not_have(change, word):
    assert word in "\n".join(serving_reasons(replace(PAIR, **change), form(), H200))


def test_a_thread_has_registers_enough():
    two = replace(ONE, num_stages=2, per_sm=2)
    assert not serving_reasons(two, form(), H200)
    assert "registers" in "\n".join(serving_reasons(replace(two, per_sm=3), form(), H200))
    assert "registers" in "\n".join(serving_reasons(replace(PAIR, per_sm=2), form(D=64), H200))


ONE_PROGRAM, TWO = replace(ONE, num_stages=3), replace(ONE, num_stages=2, per_sm=2)
EVEN = replace(DEPENDENT, per_sm=2)


@pytest.mark.parametrize(
    ("about", "default"),
    [
        ({}, ONE_PROGRAM),
        ({"heads": (64, 8), "q_len": 4}, ONE_PROGRAM),
        ({"heads": (16, 1)}, ONE_PROGRAM),
        ({"heads": (9, 1)}, ONE_PROGRAM),
        ({"heads": (64, 1), "B": 1}, ONE_PROGRAM),
        ({"heads": (48, 1), "B": 4}, ONE_PROGRAM),
        ({"page": 0}, ONE_PROGRAM),
        ({"heads": (128, 1), "B": 1}, ONE_PROGRAM),
        ({"heads": (128, 1)}, TWO),
        ({"heads": (71, 1), "D": 64, "B": 64}, TWO),
        # Work tiles for two programs of each SM.
        ({"heads": (64, 8), "q_len": 4, "B": 32}, ONE_PROGRAM),
        ({"heads": (64, 8), "q_len": 4, "B": 64}, TWO),
        ({"B": 512}, TWO),
        # Where it cannot run, nobody timed it, or few keys lie in the L2 cache.
        ({"B": 513}, EVEN),
        ({"page": 8}, EVEN),
        ({"kv": torch.float8_e4m3fn}, EVEN),
        ({"D": 64}, EVEN),
        ({"heads": (71, 1), "D": 64, "B": 4}, EVEN),
        ({"offset": True}, EVEN),
        ({"total_q": 512}, replace(EVEN, combine="launch")),
        ({"prefix": True}, replace(EVEN, combine="launch", per_sm=1)),
        ({"D": 256, "heads": (32, 2)}, ServingConfig(16, 64, 8, 3, 1)),
        ({"heads": (8, 1)}, ServingConfig(8, 128, 4, 1, 2, 1, "await", "heads")),
    ],
    ids=range(23),
)
def test_the_default(about, default):
    assert next(serving_candidates(form(**about), H200)) == default


def test_the_default_elsewhere():
    """No device before Hopper begins a kernel while the one before it runs."""
    for name, combine in (("nvidia-a100", "launch"), ("nvidia-b200", "dependent")):
        found = next(serving_candidates(form(), named(name)))
        assert found == replace(EVEN, combine=combine)
    assert next(serving_candidates(form(), named("amd-mi300x"))).combine == "launch"


def test_few_keys_of_64_columns_stay_in_l2():
    few = replace(of_form(form(heads=(71, 1), D=64, B=64)), kv_len=64)
    assert next(serving_candidates(few, H200)).warp_private


def test_where_it_is_tried():
    """A search tries it for more than 8 rows."""
    found = [each for each in serving_space(form(), H200) if each.warp_specialized]
    assert {(each.num_warps, each.num_stages) for each in found if each.per_sm == 1} == {
        (8, 2), (8, 4), (8, 6), (4, 2), (4, 3), (4, 4), (4, 5), (4, 6),
    }  # fmt: skip
    assert not any(each.warp_specialized for each in serving_space(form((8, 1)), H200))
    for name in ("nvidia-a100", "nvidia-b200"):
        assert "sm_90" in "\n".join(serving_reasons(PAIR, form(), named(name)))


def test_all_sms_merge_parts_in_a_dependent_launch():
    launched = merge_shape(form(), replace(DEPENDENT, combine="launch"), H200)
    assert (launched.work_tiles, launched.rows) == (0, 16)
    for config in (DEPENDENT, PAIR):
        shape = merge_shape(form(), config, H200)
        assert (shape.rows, shape.columns, shape.work_tiles) == (4, 128, 16)
        assert shape.grid(132) == 256
    assert merge_shape(form(B=512), DEPENDENT, H200).work_tiles == 0


def test_where_kernels_cannot_depend():
    assert not serving_reasons(DEPENDENT, form(), H200)
    assert "sm_90" in "\n".join(serving_reasons(DEPENDENT, form(), named("nvidia-a100")))
    assert "cascade" in "\n".join(serving_reasons(DEPENDENT, form(prefix=True), H200))


@pytest.mark.parametrize(
    "change", [{"BLOCK_N": 64}, {"num_stages": 2}, {"combine": "last"}, {"combine": "await"}]
)
def test_configs_that_mla_does_not_have(change):
    assert serving_reasons(replace(MLA, **change), latent(), H200)


@pytest.mark.parametrize(
    "change",
    [{"BLOCK_N": 128}, {"BLOCK_M": 32}, {"BLOCK_M": 8}, {"num_stages": 1}, {"num_stages": 4}],
)
def test_configs_that_few_rows_do_not_have(change):
    """An SM holds three tiles of keys beside 16 rows, two beside 32."""
    assert not serving_reasons(FEW, latent(), H200)
    assert serving_reasons(replace(FEW, **change), latent(), H200)
    assert not serving_reasons(replace(FEW, BLOCK_M=32, num_stages=2), latent(heads=32), H200)


def test_where_mla_is_tried():
    for name in ("nvidia-a100", "nvidia-b200"):
        assert "sm_90" in "\n".join(serving_reasons(MLA, latent(), named(name)))
    found = [each for each in serving_space(latent(), H200) if each.for_mla]
    assert {each.least for each in found if not each.swap_ab} == {1, 2, 4, 8}
    assert {(each.least, each.num_stages) for each in found if each.swap_ab} == {
        (least, stages) for least in (1, 2) for stages in (2, 3)
    }
    assert found[0] == serving_space(latent(B=1), H200)[0] == replace(FEW, num_stages=2)
    assert not any(each.swap_ab for each in serving_space(latent(heads=64), H200))


def test_all_sms_merge_the_latent_parts_of_one_request():
    one = merge_shape(latent(B=1), MLA, H200)
    assert (one.rows, one.columns, one.grid(132)) == (1, 128, 64)
    assert one.rows * one.row_parts == 16, "rows that there are, not those of the tile"
    few = merge_shape(latent(B=1), FEW, H200)
    assert (few.rows, few.columns, few.parts, few.grid(132)) == (1, 64, 128, 128)
    many = merge_shape(latent(heads=128), MLA, H200)
    assert many.work_tiles == 128 and many.columns == 512
    # More programs than are there at once would make a launch without parts wait for each wave.
    assert many.row_parts * many.turns * many.rows == 64 and many.grid(132) <= 4 * 132
    # More work tiles than programs: each program has the one that it ends in.
    for about in ({"B": 256}, {"total_q": 512}):
        shape = merge_shape(latent(**about), MLA, H200)
        assert (shape.work_tiles, shape.grid(132)) == (0, 132 * shape.row_parts)


def test_chosen_keys_of_mla():
    """Few rows are gathered too, and single keys sifted; one request has tiles of 32 rows."""
    two = replace(FEW, num_stages=2)
    few, units = latent(selection=(2048, 1)), latent(selection=(64, 32))
    assert not serving_reasons(two, few, H200) and serving_reasons(FEW, few, H200)
    for about, many in ((few, True), (units, False), (latent(selection=(2049, 1)), False)):
        for config in (two, MLA):
            assert config.gathers(about) and config.sifts(about) == many
    for heads, B, config in (
        (16, 8, two), (128, 1, replace(two, BLOCK_M=32)), (128, 2, MLA), (24, 8, MLA)
    ):  # fmt: skip
        problem = plan_of(
            B, keys=32768, heads=(heads, 1), D=(576, 512), kv=torch.float8_e4m3fn, page=64,
            shared_kv=True, scaled=True, selection=(2048, 1),
        )  # fmt: skip
        assert next(serving_candidates(problem, H200)) == config
        # Parts of 64 rows of eight bits are float16, so that a merge holds twice as many.
        short = config == MLA
        assert config.short_parts(problem.structure) == short and not config.short_parts(few)
        shape = merge_shape(problem.structure, config, H200)
        assert shape.rows * shape.columns * shape.parts == (16384 if short else 4096)
