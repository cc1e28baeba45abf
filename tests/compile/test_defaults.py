"""The static defaults compile for every arch, on a machine that has none of them."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import alibi, causal, document, relative_bias, softcap
from flexattn.cli.selection import compiled as compiled_for
from flexattn.device import named
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.triton.source import render_combine
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources, spills_too_much
from flexattn.settings import override
from tests.cases import causal_score
from tests.compile.devices import DEVICES
from tests.compile.shares import LONG, share
from tests.families import estimates, render
from tests.problems import problem

CASES = [
    (arch, kind, D, D, dtype)
    for arch in DEVICES
    for kind in ("prefill", "decode")
    for D in (64, 128, 256)
    for dtype in ("bfloat16", "float32")
] + [
    (arch, kind, D, Dv, "bfloat16")
    for arch in DEVICES
    for kind, D, Dv in (("prefill", 192, 128), ("decode", 576, 512))
]
QUICK = {(arch, kind, 128, 128, "bfloat16") for arch in DEVICES for kind in ("prefill", "decode")}


def param(case):
    """Of each device one in make test, under several Tritons; the others in the long matrix."""
    quick = [pytest.mark.oldest, pytest.mark.releases]
    marks = quick if case in QUICK else [LONG]
    return pytest.param(*case, id="-".join(map(str, case)), marks=marks)


def served(wanted, device):
    """What dispatch takes where nothing was tuned: the first that fits and does not spill."""
    with override(mode="off"):
        choice, kernel = compiled_for(wanted, device, NONE)
    return choice.config, kernel


@pytest.mark.parametrize(("arch", "kind", "D", "Dv", "dtype"), [param(case) for case in CASES])
def test_default_config(arch, kind, D, Dv, dtype):
    """It fits in shared memory, spills nothing in a loop, and multiplies tiles by matrix units."""
    device = named(DEVICES[arch])
    wanted = problem(kind, D, Dv, dtype, score_mod=softcap(50.0), mask_mod=causal)
    config, compiled = served(wanted, device)
    taken = resources(compiled, device)
    assert taken.shared <= device.shared_memory, config
    assert taken.registers <= device.max_registers
    assert not taken.starved, (config, taken)
    if dtype != "float32":
        assert taken.matrix_instructions > 0
        code = compiled.asm["amdgcn" if device.backend == "hip" else "ptx"]
        wgmma = device.has_wgmma and kind == "prefill"
        assert {"hip": "v_mfma", "cuda": "wgmma" if wgmma else "mma.sync"}[device.backend] in code


PARTS = [
    (arch, kind, D)
    for arch in DEVICES
    if arch.startswith("sm_")
    for kind in ("prefill", "decode")
    for D in (32, 64, 96, 128)
]


@pytest.mark.parametrize(
    ("arch", "kind", "D"), share(PARTS, lambda case: case in {("sm_90", "prefill", 64)})
)
def test_default_config_of_float32_in_parts(arch, kind, D):
    """Matrix units multiply it; what is estimated of shared memory is enough."""
    device = named(DEVICES[arch])
    wanted = problem(kind, D, dtype="float32", mask_mod=causal, fp32_products="bf16x6")
    config, compiled = served(wanted, device)
    taken = resources(compiled, device)
    assert not spills_too_much(taken.loop_spills, taken.loop_instructions, taken.stack), config
    assert taken.matrix_instructions > 0
    assert taken.shared <= estimates(config, wanted.structure, device)[0]
    wgmma = device.has_wgmma and kind == "prefill"
    assert ("wgmma" if wgmma else "mma.sync") in compiled.asm["ptx"]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_default_config_of_narrower_keys(kind):
    """Tiles of eight bits are converted, and multiplied by matrix units as others are."""
    device = named(DEVICES["sm_90"])
    wanted = problem(kind, mask_mod=causal, runs=True, kv_dtype="float8_e4m3fn")
    config, compiled = served(wanted, device)
    taken = resources(compiled, device)
    assert taken.shared <= device.shared_memory, config
    assert not taken.starved, (config, taken)
    assert taken.matrix_instructions > 0


MODS = {
    "alibi": lambda: alibi(32, "cpu"),
    "relative": lambda: relative_bias(torch.zeros(32, 128), 64),
    "causal_score": lambda: causal_score,
}


@pytest.mark.parametrize("kind", share(["prefill", "decode"], lambda kind: kind == "prefill"))
@pytest.mark.parametrize("name", MODS)
def test_default_config_of_a_rewritten_score(name, kind):
    device = named(DEVICES["sm_90"])
    wanted = problem(kind, score_mod=MODS[name]())
    config, compiled = served(wanted, device)
    taken = resources(compiled, device)
    assert taken.shared <= device.shared_memory, config
    assert not taken.starved, (config, taken)


def test_documents_spill_nothing_and_rows_leave_16_bytes_at_once():
    """Tall tiles of documents have few registers left; two bytes a store took 1,500 more."""
    device = named(DEVICES["sm_90"])
    mask_mod = and_masks(document(torch.zeros(8192, dtype=torch.int32)), causal)
    wanted = problem("prefill", mask_mod=mask_mod, runs=True)
    config = default(wanted, device, "triton")
    assert config.BLOCK_M == 128
    compiled = compile_source(render(wanted.structure, config, device, "documents"), device)
    taken = resources(compiled, device)
    assert not taken.starved, (config, taken)
    assert compiled.asm["ptx"].count("st.global.v4.b32") >= 16


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("arch", DEVICES)
def test_sinks_cost_no_spill(arch, kind):
    device = named(DEVICES[arch])
    wanted = problem(kind, 64, mask_mod=causal, sinks="bfloat16")
    source = render(wanted.structure, default(wanted, device), device, "sinks")
    taken = resources(compile_source(source, device), device)
    assert taken.shared <= device.shared_memory and not taken.starved


@pytest.mark.parametrize("sinks", ["", "bfloat16"])
@pytest.mark.parametrize("arch", DEVICES)
def test_combine(arch, sinks):
    device = named(DEVICES[arch])
    source = render_combine(problem("decode", D=128, sinks=sinks).structure, device)
    taken = resources(compile_source(source, device), device)
    assert taken.spills == 0 and taken.shared <= device.shared_memory
