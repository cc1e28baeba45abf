"""What sizes change of defaults compiles without many spills; random shapes compile."""

from dataclasses import replace

import pytest

from bench.random_draw import SEEDS, drawn
from bench.random_shapes import task_of_case
from bench.serving_rows import ServingRow
from flexattn.catalogue import causal, softcap
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.hopper import space
from flexattn.kernels.hopper.space import alternatives
from flexattn.kernels.paged_decode.source import render_serving
from flexattn.kernels.triton.family import PREFILL
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.families import render
from tests.problems import H200, problem, serving_candidates

CAUSAL = {"mask_mod": causal, "runs": True}
# Head dimensions, then mods: the rules' first config is compiled too, and what sizes make of it.
DENSE = (64, 64, {})
REST = (
    (64, 64, CAUSAL), (128, 128, {}), (128, 128, CAUSAL), (192, 128, CAUSAL), (256, 256, CAUSAL),
    (256, 256, {**CAUSAL, "score_mod": softcap(50.0)}),
)  # fmt: skip
CASES = {case.name: case for seed in SEEDS for case in drawn(seed)}
long = pytest.mark.long


@pytest.mark.parametrize(
    ("D", "Dv", "mods"), [DENSE, *(pytest.param(*each, marks=long) for each in REST)]
)
def test_what_sizes_change_keeps_to_its_registers(D, Dv, mods):
    wanted = problem("prefill", D, Dv, lse=False, **mods)
    rules = list(space.preferences(wanted.structure))
    for config in (rules[0], *alternatives(wanted, rules)):
        source = render(wanted.structure, config, H200, "sized")
        found = resources(compile_source(source, H200), H200)
        assert found.spills <= 16, (config, found)


@pytest.mark.parametrize(
    "D", [40, 64, pytest.param(72, marks=long), pytest.param(128, marks=long)]
)
@pytest.mark.parametrize("mods", [{}, CAUSAL], ids=["full", "causal"])
def test_tiles_of_short_prompts_keep_to_their_registers(D, mods):
    wanted = problem("prefill", D, lse=False, **mods)
    for config in PREFILL.at_other_sizes(wanted, H200):
        source = render(wanted.structure, config, H200, "short")
        found = resources(compile_source(source, H200), H200)
        assert not found.starved and found.loop_spills <= 4, (config, found)


@pytest.mark.parametrize("name", [pytest.param(name, marks=long) for name in CASES])
def test_random_shapes_compile(name):
    case = CASES[name]
    problem_ = task_of_case(case, H200, "cpu").problem
    if isinstance(case.row, ServingRow):
        config = next(serving_candidates(problem_, H200))
        source = render_serving(problem_.structure, config, H200, name)
    else:
        config = default(problem_, H200)
        source = render(problem_.structure, config, H200, name)
    assert compile_source(source, H200)


def test_a_decode_with_another_number_of_splits_is_the_same_kernel():
    wanted = replace(problem("decode", 128, kv_len=16384), B=10)
    config = default(wanted, H200)
    plain = replace(config, num_splits=0)
    assert config != plain
    texts = {render(wanted.structure, each, H200, "splits").text for each in (config, plain)}
    assert len({text[text.index("import triton") :] for text in texts}) == 1
