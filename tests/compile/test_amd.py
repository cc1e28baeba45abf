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

CARDS = {
    "gfx942": "amd-mi300x",
    "gfx950": "amd-mi355x",
    "gfx1100": "amd-radeon-rx-7900-xtx",
    "gfx1151": "amd-radeon-8060s-graphics",
    "gfx1201": "amd-radeon-rx-9070-xt",
}
MODS = {"dense": {}, "causal": {"mask_mod": causal}}
# The one of these that spilled most: 227 words.
QUICK = ("gfx1100", "prefill", 64, "causal")
CASES = [
    (arch, kind, D, mods)
    for arch in CARDS
    for kind in ("prefill", "decode")
    for D in (64, 128)
    for mods in MODS
]


def compiled(wanted, config, device):
    source = render(wanted.structure, config, device, "amd")
    kernel = compile_source(source, device)
    return kernel, resources(kernel, device)


def sound(taken, device):
    fits = taken.shared <= device.shared_memory and taken.registers <= device.max_registers
    return fits and not taken.starved and taken.matrix_instructions > 0


@pytest.mark.parametrize(
    ("arch", "kind", "D", "mods"),
    [
        pytest.param(*case, marks=[] if case == QUICK else [pytest.mark.full_matrix])
        for case in CASES
    ],
)
def test_defaults_spill_nothing_in_a_loop(arch, kind, D, mods):
    """RDNA was given MI300X's tiles, for twice the registers that its waves have."""
    device = named(CARDS[arch])
    for dtype in ("bfloat16",) if (arch, kind, D, mods) == QUICK else ("bfloat16", "float16"):
        wanted = problem(kind, D, dtype=dtype, **MODS[mods])
        config = default(wanted, device)
        _, taken = compiled(wanted, config, device)
        assert sound(taken, device) and taken.loop_spills == 0, (describe(config), taken)


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


def test_hints_reach_the_compiler():
    """And products are fused with sums whatever the environment says to the user's kernels."""
    device, wanted = named("amd-mi300x"), problem(D=64)
    hints = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    kernel, _ = compiled(wanted, AmdPrefillConfig(32, 32, 2, 1, **hints), device)
    assert "v_mfma_f32_16x16x" in kernel.asm["amdgcn"]
    assert "v_mfma_f32_32x32x" not in kernel.asm["amdgcn"]
    assert "amdgpu-waves-per-eu" in kernel.asm["llir"]
    assert kernel.metadata.enable_fp_fusion
