"""Blackwell's prefill for sm_100 to sm_110: it compiles, and its loops do not spill."""

import re
from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, softcap
from flexattn.catalogue.cases import CASES as CATALOGUE, Setup
from flexattn.device import named
from flexattn.kernels.blackwell.config import BlackwellPrefillConfig
from flexattn.kernels.hopper.ragged import render_row_tiles
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import _BRANCH, _LABEL, _SPILL, _disassembled
from tests.families import estimates, render, violated
from tests.problems import plan_of, problem

pytestmark = pytest.mark.compile

B200 = named("nvidia-b200")
# Head dimensions, and configs that fit them.
DIMS = {
    (64, 64): [(128, 4, 2), (64, 6, 2), (128, 4, 1), (64, 8, 1)],
    (128, 128): [(128, 2, 2), (64, 4, 2), (128, 2, 1)],
    (192, 128): [(64, 2, 2), (64, 4, 1), (128, 2, 1)],
    (256, 256): [(64, 2, 1), (64, 1, 1)],
}
MODS = {
    "full": {},
    "causal": {"mask_mod": causal, "runs": True},
    "alibi": {"score_mod": alibi(32, "cpu"), "mask_mod": causal, "runs": True},
    "softcap": {"score_mod": softcap(30.0)},
}
SOME = [("causal", (128, 128), 0), ("full", (192, 128), 0)]
# Addresses that ptxas keeps on the stack by choice, read once in a loop of 2,000 instructions.
BY_CHOICE = 10
# Mods of the catalogue whose loops spill more.
SPILLING = {"flamingo": 353, "t5_bias": 23}


def loops_of(cubin):
    """The lines of each partition's loops over keys.

    A partition begins by setting its number of registers: no loop of its own has that in it.
    """
    lines = _disassembled(cubin).splitlines()
    labels, found = {}, []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label.group(1)] = number
        elif (branch := _BRANCH.search(line)) and branch.group(1) in labels:
            inside = lines[labels[branch.group(1)] : number]
            works = any(re.search(r"\b(UTC\w*MMA|LDTM)\b", each) for each in inside)
            if works and not any("USETMAXREG" in each or "EXIT" in each for each in inside):
                found.append(inside)
    return found


def compiles(mods, dims, which, device=B200):
    keys, stages, q_tiles = DIMS[dims][which]
    config = BlackwellPrefillConfig(keys, stages, q_tiles, polynomial=4)
    fits(problem(D=dims[0], Dv=dims[1], **MODS[mods]).structure, config, device)


def fits(form, config, device, most=BY_CHOICE):
    """The kernel's PTX: it takes what its limits estimate, and its loops do not spill."""
    assert not violated(config, form, device)
    compiled = compile_source(render(form, config, device, "test"), device)
    assert compiled.metadata.shared <= estimates(config, form, device)[0]
    assert "tcgen05.mma" in compiled.asm["ptx"]
    loops = loops_of(compiled.asm["cubin"])
    spills = [sum(bool(_SPILL.search(each)) for each in inside) for inside in loops]
    assert spills and max(spills) <= most, spills
    return compiled.asm["ptx"]


@pytest.mark.parametrize(("mods", "dims", "which"), SOME)
def test_its_loops_do_not_spill(mods, dims, which):
    compiles(mods, dims, which)


@pytest.mark.full_matrix
@pytest.mark.parametrize("mods", ["full", "causal", "alibi"])
@pytest.mark.parametrize(
    ("dims", "which"), [(dims, i) for dims in DIMS for i in range(len(DIMS[dims]))]
)
def test_every_config(mods, dims, which):
    compiles(mods, dims, which)


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_every_mod_of_the_catalogue(case):
    built = case.build(Setup(2, 8, 2, 611, 747, "cpu", torch.bfloat16, 0))
    form = problem(D=64, score_mod=built.score_mod, mask_mod=built.mask_mod).structure
    most = SPILLING.get(case.name, BY_CHOICE)
    fits(form, BlackwellPrefillConfig(64, 4, q_tiles=1, polynomial=4), B200, most)


PAGES = {
    "causal": ((128, 128), 16, (128, 2, 2), {"mask": causal}),
    "all keys": ((64, 64), 128, (128, 4, 2), {"lse": True}),
    "softcap, sinks": ((192, 128), 64, (64, 2, 2), {"score": softcap(30.0), "sinks": True}),
    "256 columns": ((256, 256), 32, (64, 2, 1), {"mask": causal}),
}  # fmt: skip
LONG = [pytest.param(name, marks=pytest.mark.long) for name in PAGES if name != "causal"]


@pytest.mark.parametrize("case", ["causal", *LONG])
def test_pages(case):
    """A plan's forward, and the kernel that lists its tiles, which it waits for."""
    dims, page, (keys, stages, q_tiles), asked = PAGES[case]
    form = plan_of(4, total_q=2048, D=dims, page=page, **asked).structure
    config = BlackwellPrefillConfig(keys, stages, q_tiles, polynomial=4, packed_heads=4)
    ptx = fits(form, config, B200)
    assert "griddepcontrol.wait" in ptx[: ptx.index("ld.global")]
    compile_source(render_row_tiles(form, config, B200), B200)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_103", "sm_110"])
def test_other_chips_with_tensor_memory(arch):
    compiles("softcap", (64, 64), 0, replace(B200, arch=arch))
