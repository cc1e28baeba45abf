"""Warp-private serving kernels: which plans start so, what cannot, and where each word lies."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal
from flexattn.device import KNOWN, named
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.engines import serving_layouts
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.kernels.paged_decode.source import render_serving
from tests.problems import plan_of, serving_candidates, serving_space

H200, BF16 = named("nvidia-h200"), torch.bfloat16
WARPS = ServingConfig(8, 128, 4, 1, combine="await", split_policy="heads")


def form(*about, **options):
    return plan_of(*about, **options).structure


@pytest.mark.parametrize(
    ("about", "warp_private", "split_policy", "rows"),
    [
        ({}, True, "heads", 8),
        ({"B": 1}, True, "round", 8),
        ({"B": 1, "mask": causal}, True, "heads", 8),
        ({"heads": (8, 1)}, True, "heads", 8),
        ({"q_len": 2}, True, "heads", 8),
        ({"q_len": 4}, False, "whole", 64),
        ({"q_len": 4, "page": 8}, True, "heads", 16),
        ({"q_len": 8}, False, "whole", 64),
        ({"q_len": 8, "page": 8}, False, "even", 32),
        ({"total_q": 512}, False, "even", 64),
        ({"kv": torch.float8_e4m3fn}, True, "heads", 8),
        ({"kv": torch.float32, "dtype": torch.float32}, False, "even", 16),
        ({"D": (80, 80)}, False, "even", 16),
        ({"D": (256, 256), "heads": (8, 4)}, True, "heads", 4),
        ({"D": (256, 256), "heads": (8, 4), "q_len": 4}, True, "heads", 8),
        ({"D": (256, 256), "heads": (8, 4), "q_len": 8}, False, "even", 16),
        ({"D": (256, 256), "heads": (8, 4), "B": 1}, True, "round", 4),
        ({"D": (256, 256), "heads": (8, 4), "B": 1, "mask": causal}, True, "heads", 4),
        ({"D": (256, 256), "heads": (16, 2), "B": 1}, False, "even", 16),
        ({"D": (576, 512), "heads": (128, 1), "shared_kv": True}, False, "whole", 64),
        ({"D": (576, 512), "heads": (4, 1), "shared_kv": True}, False, "even", 16),
        ({"D": (576, 512), "heads": (16, 1), "shared_kv": True, "page": 8}, False, "even", 16),
        ({"B": 2048}, False, "even", 16),
        # Of 264 programs 24 would be idle, 64 or 60; of 528 are 8, 28 and 120.
        ({"heads": (40, 40)}, True, "heads", 8),
        ({"heads": (100, 100)}, True, "heads", 8),
        ({"heads": (204, 204)}, False, "even", 16),
    ],
    # A function's name holds its address: two workers would collect different tests.
    ids=range(26),
)
def test_the_default(about, warp_private, split_policy, rows):
    found = next(serving_candidates(form(**about), H200))
    assert (found.warp_private, found.split_policy, found.BLOCK_M) == (
        warp_private,
        split_policy,
        rows,
    )


@pytest.mark.parametrize(("heads", "programs"), [(8, 264), (25, 264), (40, 528), (48, 528)])
def test_heads_that_leave_programs_idle_have_twice_as_many(heads, programs):
    """40 heads leave 24 of 264 idle, and 8 of 528: measured at D 128, 781 and 757 us."""
    found = next(serving_candidates(form(heads=(heads, heads), B=64, D=(64, 64)), H200))
    assert found.programs(H200) == programs
    assert found.num_warps * found.per_sm == 8


@pytest.mark.parametrize(
    ("heads", "B", "page", "keys", "per_sm"),
    [
        ((32, 32), 16, 16, 32, 4),
        ((32, 32), 16, 0, 32, 4),
        ((64, 16), 64, 16, 32, 4),
        ((32, 8), 64, 16, 128, 2),
        ((32, 32), 8, 16, 64, 2),
    ],
)
def test_many_heads_of_many_requests_have_smaller_programs(heads, B, page, keys, per_sm):
    """32 KV heads, 16 x 2k keys: measured, 125.0 us of 127.8. Fewer keep the larger ones."""
    found = next(serving_candidates(form(heads=heads, B=B, page=page), H200))
    assert (found.BLOCK_N, found.per_sm, found.split_policy) == (keys, per_sm, "heads")


@pytest.mark.parametrize(
    ("B", "heads", "D", "keys", "tile", "per_sm"),
    [
        (1, (71, 1), 64, 16384, (16, 128), 1),
        (4, (71, 1), 64, 4160, (16, 128), 2),
        (16, (71, 1), 64, 4160, (64, 64), 2),  # 16 rows read 85 MB of keys, five times
        (4, (48, 1), 128, 4160, (16, 64), 1),
        (4, (48, 1), 128, 16384, (64, 64), 2),
        (16, (128, 8), 128, 16384, (16, 64), 2),  # one tile of rows reads them once
    ],
)
def test_many_rows_take_short_tiles_while_l2_holds_their_keys(B, heads, D, keys, tile, per_sm):
    """Measured, 16 rows and 64: 15.7 us of 20.0, 25.2 of 23.7, 19.8 of 27.7, 37.3 of 33.6.

    Of 128 columns that is so where pages are too small for copies of boxes.
    """
    page = 16 if D == 64 else 8
    about = plan_of(B, heads=heads, D=D, keys=keys, page=page)
    found = next(serving_candidates(about, H200))
    assert ((found.BLOCK_M, found.BLOCK_N), found.per_sm) == (tile, per_sm)
    assert found.warp_private is (tile[0] == 16)
    masked = plan_of(B, heads=heads, D=D, keys=keys, page=page, mask=causal)
    assert not next(serving_candidates(masked, H200)).warp_private, "nobody timed it"


@pytest.mark.parametrize("name", KNOWN)
def test_devices(name):
    """An A100 may; nothing but Hopper, where it was measured, starts so."""
    device = KNOWN[name]
    found = [each for each in serving_space(form(), device) if each.warp_private]
    assert bool(found) is (80 <= device.capability <= 90)
    first = next(serving_candidates(form(), device))
    assert (first.warp_private) is (device.capability == 90)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"BLOCK_M": 32}, "8 or 16"),
        ({"BLOCK_N": 32}, "each warp has 8"),
        ({"BLOCK_N": 256, "per_sm": 2}, "registers"),
        ({"num_warps": 8, "per_sm": 2}, "registers"),
        ({"split_policy": "round"}, "one request"),
        ({"combine": "last"}, "parts are awaited"),
        ({"combine": "launch"}, "parts are awaited"),
        ({"num_stages": 2}, "num_stages"),
        ({"split_policy": "warp"}, "is heads or round"),
        ({"BLOCK_M": 16, "num_warps": 2, "BLOCK_N": 64}, "to merge 16 rows"),
    ],
    ids=str,
)
def test_what_cannot_run_says_why(change, word):
    found = serving_reasons(replace(WARPS, **change), form(), H200)
    assert found and any(word in each for each in found)
    assert not serving_reasons(WARPS, form(), H200)


def test_what_each_split_policy_takes():
    program = ServingConfig(16, 64, 4, 3)
    for change in ({"split_policy": "round"}, {"split_policy": "heads"}, {"combine": "await"}):
        assert serving_reasons(replace(program, **change), form(1), H200)
    assert not serving_reasons(replace(program, combine="launch"), form(1), H200)
    for split_policy in ("heads", "round"):
        assert not serving_reasons(replace(WARPS, split_policy=split_policy), form(1), H200)
        assert serving_reasons(
            replace(WARPS, split_policy=split_policy, combine="last"), form(1), H200
        )
    many = form(heads=(300, 300))
    assert any("300 KV heads" in each for each in serving_reasons(WARPS, many, H200))
    assert not serving_reasons(replace(WARPS, BLOCK_N=64, per_sm=3), many, H200)


def test_the_tuner_is_offered_the_neighbours():
    """BLOCK_N, warps and programs of an SM; what no registers hold is left out."""
    sizes = lambda about: {  # noqa: E731
        (each.BLOCK_N, each.num_warps, each.per_sm, each.split_policy)
        for each in serving_space(about, H200)
        if each.warp_private
    }
    near = [(128, 4, 2), (64, 4, 3), (64, 4, 2), (64, 2, 4), (32, 1, 8), (256, 8, 1), (128, 8, 1)]
    assert sizes(form()) >= {(*each, "heads") for each in near}
    assert not sizes(form()) & {(64, 4, 4, "heads"), (128, 2, 4, "heads")}
    assert sizes(form(1)) >= {
        (*each, split_policy) for each in near for split_policy in ("heads", "round")
    }
    assert {split_policy for *_, split_policy in sizes(form())} == {"heads"}


@pytest.mark.parametrize("page", [0, 1, 3, 16, 24, 256])
@pytest.mark.parametrize("D", [(64, 128), (128, 64)])
@pytest.mark.parametrize(
    ("warps", "own", "rows"),
    [(1, 64, 8), (4, 32, 8), (8, 16, 16), (4, 8, 4), (2, 16, 4), (8, 8, 8)],
)
def test_each_word_has_one_place(warps, own, rows, D, page):
    """The bases of a layout are all bits of its shape, each once; lanes may read alike."""
    D = (2 * D[0], 2 * D[1]) if own == 8 or rows == 4 else D
    config = ServingConfig(rows, warps * own, warps, 1, 1, 1, "await", "heads")
    layouts = dict(serving_layouts(form(D=D, page=page), config)["layouts"])
    about = {"tl": _Recorder()}
    names = ("K_LOAD", "V_LOAD", "Q_LOAD", "K_PAGES", "V_PAGES", "SCORES")
    for name in names[: 5 + (max(D) > 128)]:
        registers, lanes, warp, _, shape = eval(layouts[name], about)
        bases = [tuple(each) for each in (*registers, *lanes, *warp) if any(each)]
        wanted = [
            tuple(1 << bit if axis == at else 0 for axis in range(3))
            for at, size in enumerate(shape)
            for bit in range(size.bit_length() - 1)
        ]
        assert sorted(bases) == sorted(wanted), name
        assert len(lanes) == 5


class _Recorder:
    @staticmethod
    def DistributedLinearLayout(*about):
        return about


def test_older_kernels_are_what_they_were():
    """A plan whose warps share their tiles names nothing of the warp-private kernel."""
    config = ServingConfig(16, 64, 4, 3)
    text = render_serving(form(), config, H200, "").text
    assert "gluon" not in text and "KEYS_PER_WARP" not in text and "split_policy=even" in text
