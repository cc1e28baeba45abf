"""Each device of docs/support.md gets kernels from the compiler, which spill in no loop."""

from itertools import product

import pytest

from flexattn.catalogue import causal, softcap
from flexattn.cli.selection import compiled
from flexattn.device import KNOWN, named
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.options import NONE
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from flexattn.settings import override
from tests.compile.devices import DEVICES
from tests.compile.shares import share
from tests.families import render
from tests.problems import problem

# Those in DEVICES have tests of their own in make test.
OTHERS = [name for name in KNOWN if name not in DEVICES.values()]


ARCHS = {
    device.arch: device for device in KNOWN.values() if device.arch not in ("sm_110", "sm_121")
}
# Hopper's own kernels walk the runs of a causal mask.
RUNS = {"mask_mod": causal, "runs": True}
MODS = {"dense": {}, "causal": {"mask_mod": causal}, "runs": RUNS}
CASES = [
    case for case in product(ARCHS, ("prefill", "decode", "backward"), (64, 128, 256), MODS)
    if case[3] != ("causal" if case[0] == "sm_90" else "runs")
]  # fmt: skip
# Those that spilled most: 227 words of the forward, 57 and 354 of the backward.
SPILLED = {
    ("gfx1100", "prefill", 64, "causal"), ("gfx1100", "backward", 128, "causal"),
    ("gfx1100", "backward", 256, "dense"),
}  # fmt: skip
# What docs/support.md names: loads and stores of spilled registers inside of loops.
KEPT = {
    ("sm_80", "backward", 64, "dense"): 1,
    ("sm_86", "backward", 64, "dense"): 4,
    ("sm_89", "backward", 64, "dense"): 4,
    ("sm_90", "prefill", 64, "dense"): 8,
    ("sm_90", "backward", 64, "dense"): 1,
    ("sm_90", "backward", 64, "runs"): 2,
    ("sm_90", "backward", 256, "dense"): 19,
    ("sm_120", "backward", 64, "dense"): 6,
}


@pytest.mark.parametrize(
    ("arch", "kind", "D", "mods"),
    share(CASES, lambda case: case in SPILLED),
)
def test_defaults_spill_nothing_in_a_loop(arch, kind, D, mods):
    """RDNA was given MI300X's tiles, for twice the registers that its waves have."""
    device, wanted = ARCHS[arch], problem(kind, D, **MODS[mods])
    config = default(wanted, device)
    kernel = compile_source(render(wanted.structure, config, device, "defaults"), device)
    taken = resources(kernel, device)
    fits = taken.shared <= device.shared_memory and taken.registers <= device.max_registers
    assert fits and taken.matrix_instructions, f"{config}: {taken}"
    assert taken.loop_spills <= KEPT.get((arch, kind, D, mods), 0), f"{config}: {taken}"


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("name", share(OTHERS, lambda name: name == "nvidia-b200"))
def test_a_device_is_compiled_for(name, kind):
    device = named(name)
    wanted = problem(kind, 128, score_mod=softcap(50.0), mask_mod=causal)
    with override(mode="off"):
        choice, kernel = compiled(wanted, device, NONE)
    taken = resources(kernel, device)
    fits = taken.shared <= device.shared_memory and taken.registers <= device.max_registers
    assert fits and taken.matrix_instructions, f"{choice.config}: {taken}"
