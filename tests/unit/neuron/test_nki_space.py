"""The NKI space: what it offers fits, and each reason is one that the interpreter confirms."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from flexattn.catalogue import causal, head_bias, sliding_window
from flexattn.device.neuroncore import CORES
from flexattn.errors import ConfigError, KernelError, UnsupportedError
from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from flexattn.neuron.family import broken_rules, default_config, target_reasons, target_survey
from flexattn.neuron.interpreter.interpret import interpret
from flexattn.neuron.run import lint, prepare
from flexattn.neuron.source import render_nki
from flexattn.presets import files
from flexattn.problem import Shape, kind_for
from flexattn.tuning.tasks import mods_of
from flexattn.tuning.workload import read
from tests.nki import TARGETS, problem_of
from tests.support import inputs

WIDE = Shape(1, 1, 1, 200, 9000, 128, 128)
# By the rule that is broken, and no other: a config, a target, and the problem's changes.
BROKEN = {
    "rows": (NkiPrefillConfig(160, 128, 256, 1), "trn2", {}),
    "keys": (NkiPrefillConfig(128, 64, 256, 1), "trn2", {}),
    "sbuf": (NkiPrefillConfig(128, 512, 32768, 1, kv_buffers=2), "trn1", {"kv_len": 40000}),
    "psum": (NkiPrefillConfig(128, 2048, 4096, 2), "trn3", {}),
    "range_select": (NkiPrefillConfig(128, 512, 4096), "trn1", {"mask_mod": causal}),
    "at least one": (NkiPrefillConfig(128, 512, 4096, 0), "trn2", {}),
    "at least one of decode": (NkiDecodeConfig(128, 512, 1, buffers=0), "trn2", {}),
}  # fmt: skip


def broken(name):
    config, target, changes = BROKEN[name]
    kind = "decode" if isinstance(config, NkiDecodeConfig) else "prefill"
    shape = Shape(1, 1, 1, 200, changes.get("kv_len", 9000), 128, 128)
    problem, score, mask = problem_of(kind, shape, mask_mod=changes.get("mask_mod"))
    return config, target, problem, {"score": score, "mask": mask, "scale": 1.0}


@pytest.mark.parametrize("name", BROKEN)
def test_a_reason_is_confirmed_by_force(name):
    config, target, problem, mods = broken(name)
    found = broken_rules(config, problem, target)
    assert [rule.name for rule in found] == [name.split(" of ")[0]]
    (said,) = target_reasons(config, problem, target)
    with pytest.raises(ConfigError, match=r"(?s)" + said[:12].replace("(", r"\(")):
        prepare(problem, config, target, **mods)
    p = problem
    tensors = inputs(p.B, p.Hq, p.Hkv, p.q_len, p.kv_len, 128, 128, dtype=torch.bfloat16)
    with pytest.raises(KernelError):
        forced = prepare(problem, config, target, force=True, **mods)
        forced.interpret(*tensors)


@pytest.mark.parametrize("name", [n for n in BROKEN if n not in ("rows", "keys")])
def test_what_stands_beside_the_limit_runs(name):
    """The same config with the one thing mended passes all rules, and the interpreter."""
    config, target, problem, mods = broken(name)
    mended = {
        "sbuf": {"section": 4096}, "psum": {"score_buffers": 1},
        "range_select": {"mask": "affine"},
        "at least one": {"score_buffers": 1, "buffers": 1},
    }[name.split(" of ")[0]]  # fmt: skip
    known = {key: value for key, value in mended.items() if key in config.__slots__}
    config = replace(config, **known)
    assert target_reasons(config, problem, target) == []
    short = replace(problem, q_len=130, kv_len=300)
    tensors = inputs(1, 1, 1, 130, 300, 128, 128, dtype=torch.bfloat16)
    prepare(short, config, target, **mods).interpret(*tensors)


def test_a_mod_that_cannot_be_expressed_is_a_reason():
    def score_mod(score, b, h, q, k):
        return torch.sin(score)

    problem, *_ = problem_of("prefill", WIDE, score_mod=score_mod)
    assert "sin" in target_reasons(NkiPrefillConfig(128, 512), problem, "trn2")[0]
    for ask in (default_config, target_survey):
        with pytest.raises(UnsupportedError, match=r"(?s)sin of float32.*trn2"):
            ask(problem, "trn2")


@pytest.mark.parametrize("target", TARGETS)
def test_every_config_is_offered_once_or_counted(target):
    problem, *_ = problem_of("prefill", WIDE, mask_mod=sliding_window(100))
    found = target_survey(problem, target)
    assert len(set(found.configs)) == len(found.configs)
    assert found.configs[0] == default_config(problem, target)
    assert ("range_select" in dict(found.rejected)) == (target == "trn1")
    assert {config.BLOCK_N for config in found.configs} == {128, 256, 512, 1024, 2048}


def test_short_keys_offer_no_tile_wider_than_they_are():
    problem, *_ = problem_of("prefill", Shape(1, 1, 1, 64, 200, 64, 64))
    assert {config.BLOCK_N for config in target_survey(problem, "trn2").configs} == {128, 256}


def test_head_dimensions_that_leave_room_for_small_tiles_alone():
    table = head_bias(torch.zeros(1, 1, 8, 8))
    problem, *_ = problem_of("prefill", Shape(1, 1, 1, 8, 8, 2048, 2048), torch.float32, table)
    assert target_reasons(default_config(problem, "trn1"), problem, "trn1") == []


def preset_problems():
    """One problem for each kernel of the presets, the one with the longest keys."""
    found = {}
    for path in files().values():
        for row in read(path).rows:
            # Captured tensors may be small: only their kinds matter to a kernel's source.
            row = replace(row, shape=replace(row.shape, B=min(row.shape.B, 2)))
            s = row.shape
            kind = row.kind or kind_for(s, 8)[0]
            if kind == "backward":  # which Trainium has no template for
                continue
            dtype = getattr(torch, row.dtype)
            problem, *_ = problem_of(kind, s, dtype, *mods_of(row), row.block_size)
            known = found.setdefault(problem.structure, problem)
            if known.kv_len < problem.kv_len:
                found[problem.structure] = problem
    return list(found.values())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "effort", ["quick", pytest.param("full", marks=pytest.mark.full_autotune)]
)
def test_every_config_offered_for_the_presets_passes_lint_and_capacity(effort):
    """By an empty schedule: a kernel takes all its memory at its start.

    Of the quick spaces each sixteenth, by which every target has its share.
    """
    problems = preset_problems()
    assert len(problems) > 10 and len(TARGETS) % 2
    linted, seen = set(), set()
    spaces = list(product(problems, TARGETS))
    for problem, target in spaces[:: 16 if effort == "quick" else 1]:
        s = problem.structure
        tensors = [torch.zeros(1, 1, 1, dim, dtype=getattr(torch, s.dtype)) for dim in
                   (s.head_dim_qk, s.head_dim_qk, s.head_dim_v)]  # fmt: skip
        for config in target_survey(problem, target, effort).configs:
            source = render_nki(problem, config, target, "preset")
            if source.hash not in linted:
                lint(source.text)
                linted.add(source.hash)
            allocations = tuple(line for line in source.text.splitlines() if "buffer=" in line)
            if (target, s.dtype, allocations) not in seen:
                seen.add((target, s.dtype, allocations))
                extra = [torch.zeros(1, 1, 1)] * (len(source.arguments) - 5)
                given = (*tensors, 1.0, (), *extra)
                interpret(source.text, given, CORES[target])
