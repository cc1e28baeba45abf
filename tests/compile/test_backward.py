"""The Triton backward's defaults compile where they are offered, and spill little in a loop."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal, relative_bias, softcap
from flexattn.cli.selection import compiled as compiled_for
from flexattn.device import KNOWN, named
from flexattn.kernels.choose.defaults import candidates
from flexattn.kernels.choose.options import Options
from flexattn.kernels.triton_backward.source import render, render_delta
from flexattn.mods.derivative import loaded_floats
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import _serialised, resources
from flexattn.settings import override
from tests.compile.devices import DEVICES
from tests.problems import problem

CASES = [("sm_90", 128), ("sm_80", 128), ("gfx942", 128)]


def served(wanted, device):
    """What dispatch takes where nothing was tuned: the first that fits and does not spill."""
    with override(mode="off"):
        choice, kernel = compiled_for(wanted, device, Options(language="triton"))
    return choice, kernel


@pytest.mark.compile
@pytest.mark.parametrize(
    ("arch", "D"),
    [pytest.param(*case, marks=[pytest.mark.oldest] * (case == ("sm_90", 128))) for case in CASES],
)
def test_defaults(arch, D):
    device = named(DEVICES[arch])
    choice, compiled = served(problem("backward", D, mask_mod=causal, runs=True), device)
    taken = resources(compiled, device)
    assert len(choice.attempts) == 1, choice.attempts
    assert taken.shared <= device.shared_memory and not taken.starved, (choice.config, taken)
    assert taken.matrix_instructions > 0
    code = compiled.asm["amdgcn" if device.backend == "hip" else "ptx"]
    words = {"sm_90": ("wgmma", "cp.async.bulk"), "sm_80": ("mma.sync",), "gfx942": ("v_mfma",)}
    assert all(word in code for word in words[arch])


@pytest.mark.compile
@pytest.mark.parametrize(("arch", "D"), [("sm_90", 64), ("sm_90", 128), ("gfx942", 64)])
def test_gradients_of_captured_tensors(arch, D):
    """Added up by atomic additions, beside a soft cap and with lists in place of runs.

    The first default for a relative bias took 327,736 bytes of shared memory at D 64, for sums
    along diagonals that no rule counted, and spilled 169 words in a loop at D 128.
    """
    device = named(DEVICES[arch])
    bias, cap = relative_bias(torch.zeros(32, 128), 64), softcap(50.0)

    def both(score, b, h, q, k):
        return cap(bias(score, b, h, q, k), b, h, q, k)

    wanted = problem("backward", D, score_mod=both, mask_mod=causal)
    slots = loaded_floats(wanted.structure.score.mod)
    wanted = replace(wanted, structure=replace(wanted.structure, grads=slots))
    choice, compiled = served(wanted, device)
    assert len(choice.attempts) == 1, choice.attempts
    code = compiled.asm["amdgcn" if device.backend == "hip" else "ptx"]
    assert ("global_atomic_add_f32" if device.backend == "hip" else ".add.f32") in code
    assert [each.name for each in choice.source.arguments][-1 - 4 * choice.config.use_tma] == (
        "score_buf0_grad"
    )


BIAS = relative_bias(torch.zeros(32, 128, dtype=torch.bfloat16), 64)


@pytest.mark.oldest
@pytest.mark.compile
@pytest.mark.parametrize(("D", "bias"), [(128, BIAS), (256, None)])
def test_guarded_loops_serialise_no_product(D, bias):
    """Of a learned bias by distance, and of 256 columns, ptxas let each wgmma wait for the one
    before it: where a loop has no turn its sums are zeros, and what writes those stood beside
    products under way."""
    device = named(DEVICES["sm_90"])
    structure = problem("backward", D, score_mod=bias, mask_mod=causal, runs=True).structure
    if structure.score is not None:
        structure = replace(structure, grads=loaded_floats(structure.score.mod))
    given = replace(problem("backward", D), structure=structure)
    config = next(candidates(given, device, "triton"))
    assert config.guarded
    compiled = compile_source(render(structure, config, device, ""), device)
    assert not _serialised(compiled.asm["ptx"], device)
    assert not resources(compiled, device).starved


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_delta(arch):
    structure = problem("backward", 192, 128).structure
    for through_lse in (False, True):
        compile_source(
            render_delta(structure, named(DEVICES[arch]), through_lse), named(DEVICES[arch])
        )


@pytest.mark.parametrize("name", KNOWN)
def test_every_device_has_a_default(name):
    device = named(name)
    for dtype, widest in (("bfloat16", 576), ("float32", 256)):
        for D in (16, 64, 128, 256, widest):
            wanted = problem("backward", D, dtype=dtype, mask_mod=causal, block=(24, 40))
            assert next(candidates(wanted, device)).BLOCK_N1 <= 64
