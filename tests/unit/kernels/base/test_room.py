"""The largest numbers of a config: by symbols as by trying, and as explain prints them."""

from dataclasses import replace

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, relative_bias, softcap
from flexattn.device import named
from flexattn.kernels.base.limits import VARIED, rooms
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper.config import HopperPrefillConfig
from tests.problems import H200, problem

MODS = {
    "plain": {},
    "causal": {"mask_mod": causal, "runs": True, "score_mod": softcap(30.0)},
    "relative": {"score_mod": relative_bias(torch.zeros(32, 64), 32)},
    "lists": {"mask_mod": causal, "block": (64, 96)},
}


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("kind", ["prefill", "decode", "backward"])
@pytest.mark.parametrize("device", ["nvidia-h200", "nvidia-a100", "amd-radeon-rx-7900-xtx"])
def test_a_symbol_goes_as_far_as_numbers_that_are_tried(device, kind, D, mods):
    device, structure = named(device), problem(kind, D=D, **MODS[mods]).structure
    config = default(problem(kind, D=D, **MODS[mods]), device)
    limits = family_of(config).limits
    found = rooms(limits, config, structure, device)
    assert found
    for room in found:
        tried = [replace(config, **{room.name: value}) for value in VARIED[room.name]]
        able = [each for each in tried if not limits.violated(each, structure, device)]
        assert room.largest == max(getattr(each, room.name) for each in able)
        for each in able[:1] if room.value == getattr(able[0], room.name) else ():
            taken = eval(room.formula, {room.name: room.value})
            assert taken == limits.resources(each, structure, device)[0]


def test_what_a_stage_takes_is_a_formula():
    config = HopperPrefillConfig(2, 128, 2, 240)
    stages, keys = rooms(family_of(config).limits, config, problem().structure, H200)
    assert str(stages) == (
        "num_stages=2, 3 at most: 65536*num_stages + 33792 of 232448 bytes of shared memory"
    )
    assert (keys.largest, keys.formula) == (128, "1024*BLOCK_N + 33792")


def test_explain_tells_it(monkeypatch):
    monkeypatch.setenv("FLEXATTN_INTERPRET", "1")
    q = torch.zeros(1, 1, 64, 32)
    found = flexattn.explain(q, q, q)
    if found.route == "interpreter":
        assert found.room and "num_stages=" in str(found)
    else:
        assert not found.room
