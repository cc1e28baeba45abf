"""Each device that docs/support.md names gets a prefill and a decode from the compiler."""

import pytest

from flexattn.catalogue import causal, softcap
from flexattn.cli.offline import compiled
from flexattn.device import KNOWN, named
from flexattn.kernels.choose.options import NONE
from flexattn.runtime.resources import resources
from flexattn.settings import override
from tests.compile.devices import DEVICES
from tests.compile.shares import share
from tests.problems import problem

# Those in DEVICES have tests of their own in make test.
OTHERS = [name for name in KNOWN if name not in DEVICES.values()]


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
