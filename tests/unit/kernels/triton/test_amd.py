"""AMD's cards as detected, and what their configs say beside those of others."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from flexattn.catalogue import causal, softcap
from flexattn.device import detect, device as devices, is_rdna, named
from flexattn.kernels.base.amd import AmdHints
from flexattn.kernels.base.config import Config, describe, values
from flexattn.kernels.choose.defaults import default, reasons, space
from flexattn.kernels.choose.registry import short
from flexattn.kernels.triton import limits
from flexattn.kernels.triton.config import (
    AmdDecodeConfig,
    AmdPrefillConfig,
    DecodeConfig,
    PrefillConfig,
)
from flexattn.kernels.triton_backward.config import AmdBackwardConfig, BackwardConfig
from flexattn.problem import Shape, make_problem
from flexattn.problem.facts import TensorFacts
from flexattn.records.codec import decode, encode
from tests.families import render
from tests.problems import problem
from tests.published import CARDS, EVERY, spills

MI300X, MI355X = named("amd-mi300x"), named("amd-mi355x")
RDNA = [named(f"amd-radeon-{name}") for name in ("rx-7900-xtx", "8060s-graphics", "rx-9070-xt")]
PLAIN = AmdPrefillConfig(64, 32, 4, 1)


@pytest.fixture
def seen(monkeypatch):
    """What torch for ROCm says of a card."""

    def card(arch, warp_size, count=48):
        said = SimpleNamespace(
            name="AMD Radeon", gcnArchName=arch, multi_processor_count=count, warp_size=warp_size
        )
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: said)
        devices._detect_gpu.cache_clear()
        return detect(torch.device("cuda", 0))

    yield card
    devices._detect_gpu.cache_clear()


@pytest.mark.parametrize(
    ("arch", "warp_size", "registers"),
    [
        ("gfx1100", 32, 256),
        ("gfx1201", 32, 256),
        ("gfx1102", 32, 256),
        ("gfx942:sramecc+", 64, 512),
        ("gfx90a:sramecc+:xnack-", 64, 512),
    ],
)
def test_a_card_has_the_registers_of_its_kind(seen, arch, warp_size, registers):
    """A card of RDNA was given MI300X's 512, and its loops spilled what it does not have."""
    found = seen(arch, warp_size)
    assert (found.arch, found.max_registers) == (arch.split(":")[0], registers)
    assert is_rdna(found) is (warp_size == 32) and found.shared_memory == 64 * 1024


def test_a_record_without_hints_reads_and_writes_as_before():
    """Those of NVIDIA's devices neither gain a field nor change a byte."""
    plain = PrefillConfig(64, 64, 4, 2), DecodeConfig(16, 64, 4, 2), BackwardConfig(*[64] * 4)
    for config in plain:
        data = encode(config)
        assert not {each.name for each in fields(AmdHints)} & data.keys()
        assert decode(Config, data, "config") == config
        assert type(decode(Config, data, "config")) is type(config)


@pytest.mark.parametrize("cls", [AmdPrefillConfig, AmdDecodeConfig, AmdBackwardConfig])
def test_a_record_keeps_hints(cls):
    tile = (64, 32, 64, 32) if cls is AmdBackwardConfig else (64, 32, 4, 1)
    hints = AmdHints(2, 16, 2, True)
    config = cls(*tile, **values(hints))
    assert decode(Config, encode(config), "config") == config
    assert "waves_per_eu=2" in describe(config) and "waves_per_eu=2" in short(config)


@pytest.mark.parametrize(
    ("hints", "device", "told"),
    [
        ({"waves_per_eu": 2, "matrix_instr_nonkdim": 32}, MI300X, ""),
        ({"matrix_instr_nonkdim": 16}, RDNA[0], ""),
        ({"matrix_instr_nonkdim": 4}, MI300X, "hints"),
        ({"matrix_instr_nonkdim": 32}, RDNA[0], "hints"),
        ({"waves_per_eu": 9}, MI300X, "hints"),
        ({"waves_per_eu": 2}, named("nvidia-h200"), "hints"),
        ({"waves_per_eu": 8}, MI300X, "registers"),
        ({"kpack": 2}, MI300X, ""),
        ({"kpack": 2}, MI355X, "hints"),
        ({"kpack": 3}, MI300X, "hints"),
        ({"buffer_loads": True}, RDNA[0], ""),
        ({"buffer_loads": True}, named("nvidia-h200"), "hints"),
    ],
)
def test_hints_that_mean_nothing_or_leave_no_registers_are_refused(hints, device, told):
    """Triton drops what it does not know without a word, and takes 4 or 64 rows for v_dot2."""
    found = reasons(replace(PLAIN, **hints), problem(D=64).structure, device)
    assert (told in found[0]) if told else not found


def test_hints_are_of_the_kernel_that_is_compiled():
    wanted = problem(mask_mod=causal)
    plain, told = (
        render(wanted.structure, replace(PLAIN, waves_per_eu=waves), MI300X, "hints")
        for waves in (0, 2)
    )
    assert not plain.hints and told.hints
    assert told.hints == (("waves_per_eu", 2),) and told.hash != plain.hash
    body = "import triton"
    assert told.text.partition(body)[2] == plain.text.partition(body)[2]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("device", [MI300X, MI355X, *RDNA], ids=lambda device: device.arch)
def test_what_the_tuner_is_offered(device, kind):
    wanted = problem(kind, 64, mask_mod=causal)
    offered = space(wanted, device)
    assert offered[0] == default(wanted, device) and len(set(offered)) == len(offered)
    assert all(isinstance(each, AmdPrefillConfig | AmdDecodeConfig) for each in offered)
    hints = {(each.waves_per_eu, each.matrix_instr_nonkdim) for each in offered}
    if is_rdna(device):
        assert 2 in {each.num_warps for each in offered} and hints == {(0, 0)}
        assert 16 in {each.BLOCK_N for each in offered}
        assert kind == "decode" or 32 in {each.BLOCK_M for each in offered}
    else:
        assert {(0, 0), (0, 16), (2, 16)} <= hints
    every = space(wanted, device, "exhaustive")
    assert {each.waves_per_eu for each in every} >= {0, 2}
    assert {each.buffer_loads for each in every} == {False, True}
    assert {each.kpack for each in every} == ({1, 2} if device is MI300X else {1})


@pytest.mark.parametrize("each", [x for x in EVERY if not spills(x)], ids=str)
def test_what_others_publish_is_in_the_space(each):
    """AITER's own tile of 64 columns was refused. One wave has all registers, as with no hint."""
    structure = problem(each.kind, each.D).structure
    wanted = replace(problem(each.kind, each.D), structure=replace(
        structure, dropout="dropout" in each.source))  # fmt: skip
    alike = {"buffer_loads": False} | ({"order": "last"} if each.kind == "prefill" else {})
    found = {replace(c, **alike) for c in space(wanted, named(CARDS[each.arch]))}
    hints = {"waves_per_eu": 0} if each.config.waves_per_eu == 1 else {}
    assert replace(each.config, **hints) in found


def test_tiles_that_the_compiler_counted(monkeypatch):
    """Their estimates refuse them, and where the count is not of, they are what counts."""
    config = AmdPrefillConfig(64, 128, 4, 1, buffer_loads=True)
    plain = problem(D=256).structure
    assert not reasons(config, plain, MI300X)
    for other in (replace(config, buffer_loads=False), replace(config, kpack=2)):
        assert "registers" in reasons(other, plain, MI300X)[0]
    assert (
        "registers"
        in reasons(config, problem(D=256, score_mod=softcap(20.0)).structure, MI300X)[0]
    )
    monkeypatch.setattr(limits, "release", lambda: (3, 6))
    assert "registers" in reasons(config, plain, MI300X)[0]


def test_a_tensor_of_2_gib_has_offsets_of_64_bits():
    """Buffer instructions add 32 bits to an address: beyond that they read other memory."""
    wanted = problem(D=64)
    config = default(wanted, MI300X)
    assert config.buffer_loads
    near = render(wanted.structure, config, MI300X, "near")
    layout = replace(wanted.structure.layout, near=False)
    far = render(replace(wanted.structure, layout=layout), config, MI300X, "far")
    named_near = {each.name for each in near.arguments if each.near}
    assert named_near == {"Q", "K", "V", "OUT", "LSE"}
    assert not any(each.near for each in far.arguments) and far.hash != near.hash


@pytest.mark.parametrize(
    ("shape", "strides", "near"),
    [
        ((1, 1, 2**23, 128), None, False),
        ((1, 1, 2**23 - 1, 128), None, True),
        ((1, 2, 16, 128), (0, 2**30, 128, 1), False),
        ((64, 1, 16, 128), (0, 2048, 128, 1), True),
        ((1, 1, 0, 128), None, True),
    ],
)
def test_how_far_a_tensor_reaches(shape, strides, near):
    strides = strides or (0, 0, shape[3], 1)
    facts = TensorFacts(torch.Tensor, torch.Size(shape), strides, torch.bfloat16, -1, 0, False)
    assert facts.near is near


def test_sizes_alone_make_a_problem_far():
    """The outputs and gradients of a call are dense, whatever its inputs are."""
    asked = Shape(2, 32, 8, 2**18, 2**18, 128, 128)
    far = make_problem("prefill", "bfloat16", asked, None, None, None)
    assert not far.structure.layout.near
    near = make_problem(
        "prefill", "bfloat16", replace(asked, q_len=4096, kv_len=4096), None, None, None
    )
    assert near.structure.layout.near and not near.at(64, 2**16, 2**16).structure.layout.near


def test_others_are_offered_no_hints():
    offered = space(problem(mask_mod=causal), named("nvidia-a100"))
    assert not any(isinstance(each, AmdPrefillConfig | AmdDecodeConfig) for each in offered)
