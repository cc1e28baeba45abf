"""The warp-specialised template: what it serves, and how its parts are merged."""

from dataclasses import replace

import pytest
import torch

from flexattn.device import named
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.merge_shape import merge_shape
from flexattn.kernels.paged_decode.space import (
    serving_candidates,
    serving_reasons,
    serving_space,
)
from flexattn.serving.request import Maxima, form_of

H200 = named("nvidia-h200")
# Two warpgroups, and one.
PAIR = ServingConfig(64, 64, 8, 4, 1, combine="launch", split_policy="whole")
ONE = replace(PAIR, num_warps=4)
DEPENDENT = ServingConfig(64, 64, 4, 3, combine="dependent")


def form(heads=(48, 1), B=16, page=16, q_len=1, D=(128, 128), total_q=0, **options):
    dtypes = (options.pop("dtype", torch.bfloat16), options.pop("kv", torch.bfloat16))
    maxima = Maxima(B, q_len, total_q, 8192, *heads, *D, *dtypes, page, "NHD")
    return form_of(maxima, None, None, **options)


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


def test_where_it_is_tried():
    """No static default is one before it is measured; a search tries it for more than 8 rows."""
    found = [each for each in serving_space(form(), H200) if each.warp_specialized]
    assert {(each.num_warps, each.num_stages) for each in found if each.per_sm == 1} == {
        (8, 2), (8, 4), (8, 6), (4, 2), (4, 3), (4, 4), (4, 5), (4, 6),
    }  # fmt: skip
    assert not any(each.warp_specialized for each in serving_candidates(form(), H200))
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
