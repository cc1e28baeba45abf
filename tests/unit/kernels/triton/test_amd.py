"""AMD's cards as detected, and what their configs say beside those of others."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flexattn.catalogue import causal
from flexattn.device import detect, device as devices, is_rdna, named
from flexattn.kernels.base.config import Config, describe
from flexattn.kernels.choose.defaults import default, reasons, space
from flexattn.kernels.choose.registry import short
from flexattn.kernels.triton.config import (
    AmdDecodeConfig,
    AmdPrefillConfig,
    DecodeConfig,
    PrefillConfig,
)
from flexattn.records.codec import decode, encode
from tests.families import render
from tests.problems import problem

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
    ],
)
def test_a_card_has_the_registers_of_its_kind(seen, arch, warp_size, registers):
    """A card of RDNA was given MI300X's 512, and its loops spilled what it does not have."""
    found = seen(arch, warp_size)
    assert (found.arch, found.max_registers) == (arch.split(":")[0], registers)
    assert is_rdna(found) is (warp_size == 32) and found.shared_memory == 64 * 1024


def test_a_record_without_hints_reads_and_writes_as_before():
    """Those of NVIDIA's devices neither gain a field nor change a byte."""
    for config in (PrefillConfig(64, 64, 4, 2), DecodeConfig(16, 64, 4, 2)):
        data = encode(config)
        assert not {"waves_per_eu", "matrix_instr_nonkdim"} & data.keys()
        assert decode(Config, data, "config") == config
        assert type(decode(Config, data, "config")) is type(config)


@pytest.mark.parametrize("cls", [AmdPrefillConfig, AmdDecodeConfig])
def test_a_record_keeps_hints(cls):
    config = cls(64, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16)
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
    assert {each.waves_per_eu for each in space(wanted, device, "exhaustive")} >= {0, 2}


def test_others_are_offered_no_hints():
    offered = space(problem(mask_mod=causal), named("nvidia-a100"))
    assert not any(isinstance(each, AmdPrefillConfig | AmdDecodeConfig) for each in offered)
