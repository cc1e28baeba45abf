"""The Gluon template's configs: rules that break alone, where it serves, what is said of it."""

import re
from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, head_bias
from flexattn.device import KNOWN, named
from flexattn.errors import ConfigError
from flexattn.kernels.base.features import skips_far
from flexattn.kernels.choose.defaults import default, reasons, space, survey
from flexattn.kernels.hopper import space as gluon
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS, HopperPrefillConfig
from flexattn.kernels.hopper.family import PREFILL as HOPPER
from flexattn.kernels.hopper.limits import case_of
from flexattn.kernels.hopper.source import arguments
from flexattn.problem import Layout
from tests.families import (
    fit_to_mask,
    geometry,
    gluon_refused,
    preferences,
    render,
    unpromising,
    violated,
)
from tests.problems import problem

H200, A100, B200 = (named(f"nvidia-{name}") for name in ("h200", "a100", "b200"))
PLAIN = HopperPrefillConfig(2, 128, 2, 240)
WIDE = replace(PLAIN, BLOCK_N=64, num_stages=1, consumer_regs=232, v_parts=2, k_parts=4)
STRIDED = Layout(False, True, True, True)

BREAKS = [
    ("consumers", replace(PLAIN, consumers=0), {}, H200),
    ("consumers", replace(PLAIN, consumers=4, consumer_regs=112), {}, H200),
    ("power of two", replace(PLAIN, BLOCK_N=96), {}, H200),
    ("power of two", replace(PLAIN, BLOCK_N=0), {}, H200),
    ("stages", replace(PLAIN, num_stages=0), {}, H200),
    ("register split", replace(PLAIN, consumer_regs=236), {}, H200),
    ("register split", replace(PLAIN, consumers=3, consumer_regs=168), {}, H200),
    ("ping pong", replace(PLAIN, consumers=1, ping_pong=True), {}, H200),
    ("barriers", replace(PLAIN, num_stages=6), {}, H200),
    ("barriers", replace(PLAIN, num_stages=5, ping_pong=True), {}, H200),
    ("order", replace(PLAIN, order="sideways"), {}, H200),
    ("order", replace(PLAIN, tile_scheduler="never"), {}, H200),
    ("order", replace(PLAIN, l2_swizzle=0), {}, H200),
    ("arch", PLAIN, {}, B200),
    ("prefill", PLAIN, {"kind": "decode"}, H200),
    ("dtype", PLAIN, {"dtype": "float32", "D": 64}, H200),
    ("fp8", PLAIN, {"dtype": "float8_e4m3fn", "D": 64, "Dv": 128}, H200),
    ("fp8", PLAIN, {"dtype": "float8_e4m3fn", "D": 192, "Dv": 128}, H200),
    ("fp8", replace(PLAIN, q_in_regs=64), {"dtype": "float8_e4m3fn"}, H200),
    ("head dimension", replace(PLAIN, BLOCK_N=32), {"D": 80, "Dv": 128}, H200),
    ("head dimension", replace(WIDE, k_parts=1), {"D": 488, "Dv": 512}, H200),
    ("head dimension", replace(WIDE, v_parts=1), {"D": 512, "Dv": 64}, H200),
    ("v_parts", WIDE, {"D": 512, "Dv": 256}, H200),
    ("k_parts", replace(WIDE, k_parts=3), {"D": 512}, H200),
    ("k_parts", replace(PLAIN, k_parts=2), {}, H200),
    ("head dimension", replace(PLAIN, BLOCK_N=32), {"D": 128, "Dv": 192}, H200),
    ("head dimension", replace(PLAIN, v_box=16), {"D": 92, "Dv": 128}, H200),
    ("head dimension", replace(PLAIN, v_box=16), {"D": 128, "Dv": 8}, H200),
    ("v_box", replace(PLAIN, v_box=128), {}, H200),
    ("v_box", replace(PLAIN, v_box=64), {"dtype": "float8_e4m3fn"}, H200),
    ("tma", PLAIN, {"layout": STRIDED}, H200),
    ("q_in_regs", replace(PLAIN, q_in_regs=32), {}, H200),
    ("q_in_regs", replace(PLAIN, q_in_regs=96, BLOCK_N=64), {"D": 192, "Dv": 128}, H200),
    ("q_in_regs", replace(PLAIN, q_in_regs=160, v_box=32), {"D": 152, "Dv": 64}, H200),
    ("q_in_regs", replace(PLAIN, q_in_regs=64, v_box=16), {"D": 80}, H200),
    ("mask block", PLAIN, {"mask_mod": causal, "block": (64, 128)}, H200),
    ("mask block", PLAIN, {"mask_mod": causal, "block": (128, 192)}, H200),
    ("pack_gqa", replace(PLAIN, pack_gqa=True), {"mask_mod": causal, "per_head": True}, H200),
    ("shared memory", replace(PLAIN, num_stages=4), {}, H200),
    ("registers", replace(PLAIN, BLOCK_N=256, num_stages=1), {"D": 64, "Dv": 128}, H200),
]


@pytest.mark.parametrize(
    ("name", "config", "about", "device"),
    BREAKS,
    ids=[f"{case[0]}-{i}" for i, case in enumerate(BREAKS)],
)
def test_each_rule_breaks_alone(name, config, about, device):
    structure = problem(**about).structure
    assert [rule.name for rule in violated(config, structure, device)] == [name]
    (said,) = reasons(config, structure, device)
    assert "{" not in said


def test_every_rule_has_a_case():
    rules = {rule.name for rule in (*HOPPER.limits.shape, *HOPPER.limits.fit)}
    # Those of plans: tests/unit/kernels/hopper/test_ragged.py.
    assert {name for name, *_ in BREAKS} == rules - {"serving"}
    one = replace(PLAIN, num_stages=1)
    worth = [rule.name for rule in unpromising(one, problem().structure, H200)]
    assert worth == [rule.name for rule in HOPPER.limits.worth]


@pytest.mark.parametrize(
    ("config", "about", "expected"),
    [
        (PLAIN, {}, (164864, False, 1)),
        (replace(PLAIN, tile_scheduler="dynamic"), {}, (230400, True, 2)),
        # Three persistent consumers, one short stage: the output and a second Q just fit.
        (HopperPrefillConfig(3, 16, 1, 160, tile_scheduler="dynamic"), {"D": 256, "Dv": 64},
         (232448, True, 2)),
        (HopperPrefillConfig(1, 32, 2, 240, tile_scheduler="static"), {"D": 256},
         (148480, True, 2)),
        (HopperPrefillConfig(2, 64, 2, 240, tile_scheduler="static"), {"D": 192, "Dv": 128},
         (132096, False, 1)),
    ],
)  # fmt: skip
def test_the_space_and_the_kernel_count_the_same_shared_memory(config, about, expected):
    """Once both counted, and of the third case they differed by 96 KiB."""
    case = case_of(config, problem(**about).structure, H200)
    assert (case.shared_memory, case.own_output, case.q_slots) == expected


@pytest.mark.parametrize("mask", [None, causal], ids=["full", "causal"])
def test_barriers_stay_clear_of_those_that_the_compiler_takes(mask):
    """It takes one for all warps, one to start partitions, one for each but the first."""
    wanted = problem(D=64, mask_mod=mask, runs=mask is not None)
    found = {
        (each.consumers, each.num_stages, each.ping_pong, each.tile_scheduler): each
        for each in space(wanted, H200, "exhaustive")
        if isinstance(each, HopperPrefillConfig)
    }
    assert found
    for config in found.values():
        text = render(wanted.structure, config, H200, "test").text
        taken = re.findall(r"(?m)^[KVQ]_EMPTY = gl\.constexpr\((\d+)\)", text)
        lowest = min(map(int, taken + re.findall(r"add\.u32 turn, \$1, (\d+);", text)))
        assert lowest >= 2 + config.consumers, config


@pytest.mark.parametrize("mask", [None, causal], ids=["full", "causal"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_each_size_has_a_config_to_start_from(D, Dv, mask):
    wanted = problem(D=D, Dv=Dv, mask_mod=mask)
    config = default(wanted, H200, "gluon")
    assert config.language == "gluon" and not gluon_refused(wanted, H200)
    assert not reasons(config, wanted.structure, H200)
    assert config == next(preferences(wanted, H200, "gluon"))


@pytest.mark.parametrize(("q_len", "tiles"), [(1, 1), (64, 1), (65, 2)])
def test_heads_of_a_group_share_tiles(q_len, tiles):
    """Of two consumers each has 64 rows of a head, where 64 are all that there are."""
    wanted = problem(q_len=q_len, group=6)
    found = geometry(wanted, replace(PLAIN, pack_gqa=True), H200)
    assert (found.programs, found.num_tiles) == (2 * 48 // 2 * tiles, tiles)
    packed = {each.consumers for each in space(wanted, H200) if getattr(each, "pack_gqa", False)}
    assert packed == {2}


def test_heads_of_other_groups_share_no_tile():
    wanted = problem(group=3)
    with pytest.raises(ConfigError, match="pack_gqa: 2 heads in a tile of groups of 3"):
        geometry(wanted, replace(PLAIN, pack_gqa=True), H200)
    packed = [x for x in space(wanted, H200, "exhaustive") if getattr(x, "pack_gqa", False)]
    assert {each.consumers for each in packed} == {3}


def test_far_keys_are_kept_where_heads_need_others():
    wanted = problem(score_mod=alibi(32, "cpu"), mask_mod=causal, runs=True)
    assert skips_far(wanted.structure, PLAIN)
    assert not skips_far(wanted.structure, replace(PLAIN, pack_gqa=True))


@pytest.mark.parametrize("config", [PLAIN, replace(PLAIN, pack_gqa=True)], ids=["own", "pack_gqa"])
@pytest.mark.parametrize("runs", [False, True])
def test_a_kernel_has_a_decay_window_where_a_launch_binds_one(runs, config):
    """Packed ones took them and were given none: every launch of ALiBi had one value too few."""
    mods = {"score_mod": alibi(32, "cpu")} | ({"mask_mod": causal, "runs": True} if runs else {})
    wanted = problem(**mods)
    names = [each.name for each in arguments(wanted.structure, config)]
    assert (
        ("DECAY_WINDOW" in names) == skips_far(wanted.structure, config) == (not config.pack_gqa)
    )


def test_blocks_of_a_heads_64_rows_suit_heads_that_share_a_tile():
    """They were cut to one consumer first, which is the kernel of one head once more."""
    wanted = problem(mask_mod=causal, block=(64, 128), q_len=64, group=4)
    packed = [each for each in space(wanted, H200) if getattr(each, "pack_gqa", False)]
    assert packed and {each.consumers for each in packed} == {2}
    assert len({replace(each, pack_gqa=False) for each in packed}) == len(packed)


def test_no_other_device_ever_sees_it():
    for device in KNOWN.values():
        for kind in ("prefill", "decode"):
            offered = space(problem(kind), device, "exhaustive")
            found = {config.language for config in offered}
            assert ("gluon" in found) is (device.arch == "sm_90" and kind == "prefill")
    with pytest.raises(ConfigError, match="no wgmma"):
        default(problem(), A100, "gluon")


@pytest.mark.parametrize("effort", ["quick", "full", "exhaustive"])
def test_every_effort_tries_both_languages(effort):
    found = survey(problem(mask_mod=causal), H200, effort).configs
    gluon_ones = [each for each in found if each.language == "gluon"]
    assert gluon_ones and len(gluon_ones) < len(found)


def test_tiles_are_cut_to_a_masks_blocks():
    three = HopperPrefillConfig(3, 128, 2, 160)
    for block, rows, width in (((128, 128), 128, 128), ((192, 64), 192, 64), ((64, 96), 64, 32)):
        found = fit_to_mask(three, problem(mask_mod=causal, block=block).structure)
        assert (found.BLOCK_M, found.BLOCK_N) == (rows, width)
        assert found.consumer_regs == CONSUMER_REGISTERS[found.consumers]
    assert fit_to_mask(three, problem(mask_mod=causal, block=(100, 128)).structure).consumers == 3


def test_a_static_schedule_has_a_block_for_each_sm_at_most():
    long, short_one = problem(), problem(q_len=100)
    for wanted, programs in ((long, 132), (short_one, 64)):
        grid = geometry(wanted, replace(PLAIN, tile_scheduler="static"), H200)
        assert grid.programs == programs
    assert geometry(long, PLAIN, H200).programs == 64 * 32


SEARCHED = (
    "consumers", "BLOCK_N", "num_stages", "order", "lazy_rescale", "pack_gqa", "merge_consumers",
    "ptxas",
)  # fmt: skip


@pytest.mark.parametrize("effort", ["full", "exhaustive"])
@pytest.mark.parametrize("D", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("mask", [None, causal], ids=["full", "causal"])
def test_a_search_varies_eight_fields(mask, D, effort):
    """The rest follows from them; of 256 columns a second preference has no Q in registers."""
    wanted = problem(D=D, mask_mod=mask, runs=mask is not None)
    ours = [c for c in space(wanted, H200, effort) if isinstance(c, HopperPrefillConfig)]
    names = (*SEARCHED, *("q_in_regs",) * (D == 256))
    assert len({tuple(getattr(c, name) for name in names) for c in ours}) == len(ours) > 12
    assert all(
        name in HopperPrefillConfig.__doc__.split("The rest follows")[0] for name in SEARCHED
    )


def test_what_is_read_by_key_is_asked_for_before_the_products_of_the_scores():
    keys = torch.zeros(8192)

    def early(score_mod):
        wanted = problem(score_mod=score_mod)
        config = next(gluon.preferences(wanted.structure))
        text = render(wanted.structure, config, H200, "").text
        consumed = text[text.index("def consume_tile") :]
        return consumed.index("gl.load(") < consumed.index("multiply_qk(")

    assert early(lambda score, b, h, q_idx, kv_idx: score + keys[kv_idx])
    # A value for every score would take registers before the scores are there.
    assert not early(head_bias(torch.zeros(2, 32, 64, 64)))


def test_a_triton_without_gluon_is_offered_none(monkeypatch):
    """Its release alone once decided: 3.9 was offered none, whatever it makes of a kernel."""
    monkeypatch.setattr("flexattn.kernels.hopper.family.offered", lambda: False)
    wanted = problem(mask_mod=causal)
    assert {each.language for each in survey(wanted, H200, "full").configs} == {"triton"}
    assert "no Gluon" in gluon_refused(wanted, H200)
    forced = default(wanted, H200, "gluon")
    assert forced.language == "gluon" and not reasons(forced, wanted.structure, H200)


def test_two_blocks_of_one_consumer_share_an_sm():
    """Tiles of blocks of 64 rows have one consumer, beside which another block's may multiply.

    On an H200 that is 1.35 to 1.4 times as fast, so it comes first.
    """
    wanted = problem(mask_mod=causal, block=(64, 64), q_len=32768)
    device = named("nvidia-h200")
    both, alone = [each for each in HOPPER.defaults(wanted, device) if each.num_stages == 2][:2]
    assert both == replace(alone, consumer_regs=200, ptxas=both.ptxas)
    assert (alone.per_sm, both.per_sm) == (1, 2) and both in space(wanted, device)
    assert [HOPPER.grid(wanted, each, device).programs for each in (alone, both)] == [132, 264]
    sources = (HOPPER.render(wanted.structure, each, device, "") for each in (alone, both))
    assert [each.registers for each in sources] == [0, 120]
    # Registers of both, and what the driver keeps of each block's memory.
    assert 2 * 256 * 120 <= device.registers
    taken = case_of(both, wanted.structure, device).shared_memory
    assert 2 * (taken + 1024) <= device.shared_memory + 1024
