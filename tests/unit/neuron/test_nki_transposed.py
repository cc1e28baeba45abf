"""What is of kernels with keys on the partitions alone, S^T = K Q^T."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, softcap
from flexattn.errors import ConfigError, KernelError
from flexattn.neuron.config import NkiDecodeConfig
from flexattn.neuron.family import target_reasons, target_survey
from flexattn.neuron.run import prepare
from flexattn.problem import Shape
from tests.cases import case
from tests.covering import each_choice, pairwise
from tests.nki import TARGETS, TRANSPOSED, assert_memory_counted, check, problem_of
from tests.support import inputs

SMALL = TRANSPOSED
PREFILL, DECODE = SMALL["prefill"], SMALL["decode"]
each_kind = pytest.mark.parametrize("kind", SMALL)
each_target = pytest.mark.parametrize("target", TARGETS)


@pairwise(
    mods=["causal", "softcap"], statistics=[(False, False), (True, False), (False, True)],
    dtype=[torch.float32, torch.bfloat16, torch.float16], kind=SMALL,
)  # fmt: skip
def test_statistics_decide_what_is_rounded(kind, dtype, statistics, mods):
    """Without max_scores a maximum in bfloat16 serves; with lse P is summed before rounding."""
    masks, scores = {"causal": causal}, {"softcap": softcap(20.0)}
    check(
        1, 4, 2, 141, 429, 64, dtype=dtype, kind=kind, config=SMALL[kind], statistics=statistics,
        mask_mod=masks.get(mods), score_mod=scores.get(mods),
    )  # fmt: skip


@pytest.mark.parametrize("scale", [1e-4, 3.0, -0.3])
@each_kind
def test_scales(kind, scale):
    """Scores that hardly differ, and scores far above what exp can take."""
    check(
        1, 2, 1, 67, 301, dtype=torch.bfloat16, kind=kind, config=SMALL[kind], scale=scale,
        statistics=(True, False),
    )  # fmt: skip


def test_a_row_whose_maximum_grows_from_tile_to_tile_is_rescaled():
    def rising(score, b, h, q_idx, kv_idx):
        return score + kv_idx * 0.7

    for dtype in (torch.float32, torch.bfloat16):
        check(1, 1, 1, 40, 700, dtype=dtype, config=PREFILL, score_mod=rising)


def test_scores_that_a_score_mod_makes_infinite_spread_to_no_other_row():
    """trn1 turns by products, in which minus infinity would become NaN."""

    def masked(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    for target in TARGETS:
        check(1, 1, 1, 200, 200, config=PREFILL, score_mod=masked, target=target)


VARIANTS = [
    replace(PREFILL, BLOCK_M=32, BLOCK_N=128, score_buffers=1, buffers=1),
    replace(PREFILL, BLOCK_N=2048, section=4096, score_buffers=1),
    replace(PREFILL, BLOCK_N=512, value_buffers=2, buffers=3, kv_buffers=2),
    replace(PREFILL, BLOCK_M=64, BLOCK_N=1024, evict="scalar"),
    replace(DECODE, BLOCK_N=2048, num_splits=1, section=4096, score_buffers=1),
    replace(DECODE, num_splits=7, evict="scalar"),
]


@pytest.mark.parametrize("config", VARIANTS)
def test_variants(config):
    kind = "decode" if isinstance(config, NkiDecodeConfig) else "prefill"
    check(1, 4, 2, 14, 700, 64, dtype=torch.bfloat16, kind=kind, config=config, mask_mod=causal)


@each_choice(config=[*SMALL.values(), *VARIANTS], name=["half_precision_bias", "relative_bias"])
def test_memory_is_what_the_interpreter_counts(config, name):
    kind = "decode" if isinstance(config, NkiDecodeConfig) else "prefill"
    built = case(name).make(1, 4, 2, 131, 259, dtype=torch.bfloat16)
    for statistics in ({}, {"lse": True}, {"lse": True, "max_scores": True}):
        assert_memory_counted(kind, [config], built, **statistics)


# By the rule that is broken, and no other: a config, and what mends it.
BROKEN = {
    "range": (replace(PREFILL, mask="range"), {"mask": "select"}),
    "a bank's end": (replace(PREFILL, BLOCK_M=96, BLOCK_N=1024, section=1024), {"BLOCK_M": 64}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_reason_is_confirmed_by_force(name):
    config, mended = BROKEN[name]
    problem, score, mask = problem_of("prefill", Shape(1, 1, 1, 200, 900, 64, 64), mask_mod=causal)
    mods = {"score": score, "mask": mask, "scale": 1.0}
    tensors = inputs(1, 1, 1, 200, 900, 64, 64, dtype=torch.bfloat16)
    assert len(target_reasons(config, problem, "trn2")) == 1
    with pytest.raises(ConfigError, match="form=st"):
        prepare(problem, config, "trn2", **mods)
    with pytest.raises(KernelError):
        prepare(problem, config, "trn2", force=True, **mods).interpret(*tensors, numerics=False)
    prepare(problem, replace(config, **mended), "trn2", **mods).interpret(*tensors, numerics=False)


def test_a_tile_may_cross_banks_on_trn3():
    config = BROKEN["a bank's end"][0]
    check(1, 1, 1, 200, 900, 64, dtype=torch.bfloat16, config=config, target="trn3")


@each_kind
@each_target
def test_the_space_offers_both_forms(kind, target):
    problem, *_ = problem_of(kind, Shape(1, 8, 2, 200, 9000, 128, 128), mask_mod=causal, lse=True)
    for effort in ("quick", "full"):
        found = target_survey(problem, target, effort).configs
        assert {config.form for config in found} == {"s", "st"}
        turned = [config for config in found if config.form == "st"]
        assert all(each.mask != "range" and each.transpose == "tensor" for each in turned)
        assert {each.evict for each in turned} == {"vector", "scalar"}, "P is cast by one of them"


def test_several_tiles_and_sections_with_a_bias_for_each_head():
    for mods in ({"score_mod": alibi(4, "cpu")}, {"mask_mod": causal}):
        check(1, 4, 2, 301, 429, 64, dtype=torch.bfloat16, config=PREFILL, **mods)
