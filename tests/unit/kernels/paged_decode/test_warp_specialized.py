"""The warp-specialised template: what it serves, and how its parts are merged."""

from dataclasses import replace

import pytest
import torch

from flexattn.device import named
from flexattn.kernels.paged_decode.config import ServingConfig, merge_shape
from flexattn.kernels.paged_decode.limits import serving_reasons
from tests.problems import H200, of_form, served, serving_candidates, serving_space
from tests.serving import PAIR

# Two warpgroups, and one.
ONE = replace(PAIR, num_warps=4)
DEPENDENT = ServingConfig(64, 64, 4, 3, combine="dependent")


def form(heads=(48, 1), B=16, page=16, q_len=1, D=(128, 128), total_q=0, **options):
    dtypes = (options.pop("dtype", torch.bfloat16), options.pop("kv", torch.bfloat16))
    sizes = (B, q_len, total_q, 8192, *heads, *D, *dtypes, page, "NHD")
    return served(*sizes, None, None, **options).structure


@pytest.mark.parametrize(
    ("about", "word"),
    [
        ({"page": 8}, "page"),
        ({"page": 48}, "page"),
        ({"D": (96, 96)}, "64, 128 or 256"),
        ({"D": (128, 64)}, "64, 128 or 256"),
        ({"shared_kv": True}, "apart"),
        ({"kv": torch.float8_e4m3fn}, "16 bits"),
        ({"dtype": torch.float32, "kv": torch.float32}, "16 bits"),
        ({"prefix": True}, "prefix"),
        ({"B": 513}, "512 requests"),
    ],
)
def test_what_it_does_not_serve_it_names(about, word):
    assert not serving_reasons(PAIR, form(), H200)
    assert word in "\n".join(serving_reasons(PAIR, form(**about), H200))
    assert not any(each.warp_specialized for each in serving_space(form(**about), H200))


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
    assert "registers" in "\n".join(
        serving_reasons(replace(PAIR, per_sm=2), form(D=(64, 64)), H200)
    )


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
        ({"heads": (71, 1), "D": (64, 64), "B": 64}, TWO),
        # Work tiles for two programs of each SM.
        ({"heads": (64, 8), "q_len": 4, "B": 32}, ONE_PROGRAM),
        ({"heads": (64, 8), "q_len": 4, "B": 64}, TWO),
        ({"B": 512}, TWO),
        # Where it cannot run, nobody timed it, or few keys lie in the L2 cache.
        ({"B": 513}, EVEN),
        ({"page": 8}, EVEN),
        ({"kv": torch.float8_e4m3fn}, EVEN),
        ({"D": (64, 64)}, EVEN),
        ({"heads": (71, 1), "D": (64, 64), "B": 4}, EVEN),
        ({"offset": True}, EVEN),
        ({"total_q": 512}, replace(EVEN, combine="launch")),
        ({"prefix": True}, replace(EVEN, combine="launch", per_sm=1)),
        ({"D": (256, 256), "heads": (32, 2)}, ServingConfig(16, 64, 8, 3, 1)),
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
    few = replace(of_form(form(heads=(71, 1), D=(64, 64), B=64)), kv_len=64)
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
