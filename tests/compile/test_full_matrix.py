"""Every config that the space offers compiles, fits and spills nothing, for every arch."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal, softcap
from flexattn.device import named
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.defaults import space
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import DecodeConfig
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.compile.devices import DEVICES
from tests.compile.shares import part
from tests.families import render
from tests.problems import problem

pytestmark = [pytest.mark.full_matrix, pytest.mark.oldest]

MODS = {"noop": {}, "causal_softcap": {"score_mod": softcap(50.0), "mask_mod": causal}}


def tile_of(config):
    """The order of tiles and the number of splits change neither registers nor shared memory."""
    if isinstance(config, DecodeConfig):
        return replace(config, num_splits=0)
    return replace(config, order="last")


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("arch", DEVICES)
def test_every_config_offered(arch, kind, D, mods, pytestconfig):
    device = named(DEVICES[arch])
    wanted = problem(kind, D, **MODS[mods])
    wrong = []
    # The Gluon template's configs have a test of their own.
    configs = [c for c in space(wanted, device) if not isinstance(c, HopperPrefillConfig)]
    for config in part(pytestconfig, map(tile_of, configs), 2, turn=mods == "noop"):
        compiled = compile_source(render(wanted.structure, config, device, "matrix"), device)
        taken = resources(compiled, device)
        fits = taken.shared <= device.shared_memory and taken.registers <= device.max_registers
        if not fits or taken.starved or taken.serialised or not taken.matrix_instructions:
            wrong.append(f"{describe(config)}: {taken}")
    assert not wrong, "offered, but they spill or do not fit:\n" + "\n".join(wrong)
