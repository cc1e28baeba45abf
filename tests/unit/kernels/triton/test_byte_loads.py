"""K and V of eight bits whose rows have no alignment."""

import pytest

from flexattn.device import named
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.problem import Layout
from tests.problems import problem

UNALIGNED = Layout(True, True, True, False)
CONFIGS = {"prefill": PrefillConfig(128, 64, 8, 2), "decode": DecodeConfig(16, 64, 4, 2)}


def loads_of_keys(kind, kv_dtype, layout, D=94):
    config = CONFIGS[kind]
    structure = problem(kind, D, dtype="float16", kv_dtype=kv_dtype, layout=layout).structure
    text = family_of(config).render(structure, config, named("nvidia-h200"), "test").text
    parts = [part.split("\n        )")[0] for part in text.split("tl.load(")[1:]]
    return [part for part in parts if "k_ptr" in part or "v_ptr" in part]


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_byte_has_a_predicate(kind):
    """With one for each byte, ptxas 12.8 made a kernel of D 94 that read keys of other rows."""
    loads = loads_of_keys(kind, "float8_e4m3fn", UNALIGNED)
    assert len(loads) == 4 and not any("mask=" in load for load in loads)
    wide = loads_of_keys(kind, "", UNALIGNED) + loads_of_keys(
        kind, "float8_e4m3fn", Layout(True, True, True, True), 96
    )
    assert wide and all("mask=" in load for load in wide)
