"""What AMD's compiler makes of the defaults and of hints, for cards that are not here."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal, softcap
from flexattn.device import named
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.defaults import default, space
from flexattn.kernels.triton.config import AmdPrefillConfig
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.families import render
from tests.problems import problem
from tests.published import CARDS as PUBLISHED_CARDS, EVERY, spills

CARDS = {"gfx1100": "amd-radeon-rx-7900-xtx", "gfx1201": "amd-radeon-rx-9070-xt"}


def compiled(wanted, config, device):
    source = render(wanted.structure, config, device, "amd")
    kernel = compile_source(source, device)
    return kernel, resources(kernel, device)


def sound(taken, device):
    fits = taken.shared <= device.shared_memory and taken.registers <= device.max_registers
    return fits and not taken.starved and taken.matrix_instructions > 0


@pytest.mark.full_matrix
@pytest.mark.parametrize("mods", [{}, {"score_mod": softcap(50.0), "mask_mod": causal}], ids=len)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_what_the_tuner_is_offered_for_rdna(arch, kind, D, mods):
    device = named(CARDS[arch])
    wanted = problem(kind, D, **mods)
    alike = {"num_splits": 0} if kind == "decode" else {"order": "last"}
    wrong = []
    for config in dict.fromkeys(replace(each, **alike) for each in space(wanted, device)):
        _, taken = compiled(wanted, config, device)
        if not sound(taken, device):
            wrong.append(f"{describe(config)}: {taken}")
    assert not wrong, "offered, but they spill or do not fit:\n" + "\n".join(wrong)


@pytest.mark.parametrize("near", [True, False])
def test_buffer_instructions_are_of_tensors_below_2_gib(near):
    """No kernel of ours had any; with 64-bit offsets they would read other memory."""
    device, wanted = named("amd-mi300x"), problem("decode", D=64)
    config = default(wanted, device)
    layout = replace(wanted.structure.layout, near=near)
    wanted = replace(wanted, structure=replace(wanted.structure, layout=layout))
    kernel, _ = compiled(wanted, config, device)
    text = kernel.asm["amdgcn"]
    assert config.buffer_loads
    assert ("buffer_load" in text, "global_load" in text) == (near, not near)


@pytest.mark.full_matrix
@pytest.mark.parametrize("each", EVERY, ids=str)
def test_what_others_publish_spills_as_it_says(each):
    """Which of them our space must have follows from this: those that spill nothing in a loop."""
    device, wanted = named(PUBLISHED_CARDS[each.arch]), problem(each.kind, each.D, mask_mod=causal)
    _, taken = compiled(wanted, replace(each.config, buffer_loads=True), device)
    assert (taken.loop_spills > 0) is (spills(each) > 0), taken


def test_hints_reach_the_compiler():
    """And products are fused with sums whatever the environment says to the user's kernels."""
    device, wanted = named("amd-mi300x"), problem(D=64)
    hints = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    kernel, _ = compiled(wanted, AmdPrefillConfig(32, 32, 2, 1, **hints), device)
    assert "v_mfma_f32_16x16x" in kernel.asm["amdgcn"]
    assert "v_mfma_f32_32x32x" not in kernel.asm["amdgcn"]
    assert "amdgpu-waves-per-eu" in kernel.asm["llir"]
    assert kernel.metadata.enable_fp_fusion
