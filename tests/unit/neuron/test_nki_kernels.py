"""The NKI kernels in the strict interpreter, held to the float64 oracle by the gate."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from examples import stable_diffusion_neuron as example
from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from tests.cases import CASES, case
from tests.covering import each_choice, pairwise
from tests.nki import TARGETS, assert_memory_counted, check

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = {"prefill": NkiPrefillConfig(128, 128, 256), "decode": NkiDecodeConfig(128, 128, 3, 48)}
each_kind = pytest.mark.parametrize("kind", SMALL)


@each_choice(turn=list(zip(cycle(TARGETS), CASES, strict=False)), kind=SMALL)
def test_the_catalogue(turn, kind):
    """Targets and kinds take turns over the cases, and fp32 and bf16 over the targets."""
    target, entry = turn
    config = SMALL[kind]
    if target == "trn1":
        config = replace(config, mask="affine")
    dtype = torch.bfloat16 if (kind == "prefill") == (target == "trn2") else torch.float32
    built = entry.make(2, 3, 1, 37, 53, dtype=dtype)
    check(
        2, 3, 1, 37, 53, dtype=dtype, kind=kind, target=target, config=config,
        score_mod=built.score_mod, mask_mod=built.mask_mod, block=16,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mods", ["noop", "causal", "softcap", "alibi"])
def test_several_tiles_and_sections(mods, dtype):
    masks = {"causal": causal}
    scores = {"softcap": softcap(30.0), "alibi": alibi(4, "cpu")}
    check(
        1, 4, 2, 301, 429, 64, dtype=DTYPES[dtype], config=NkiPrefillConfig(64, 256, 256),
        mask_mod=masks.get(mods), score_mod=scores.get(mods),
    )  # fmt: skip


@pairwise(
    dims=[(64, 64), (128, 128), (192, 192), (192, 128), (40, 576)], target=TARGETS, kind=SMALL
)
def test_head_dimensions(kind, target, dims):
    dtype = torch.bfloat16 if target == "trn2" else torch.float32
    check(1, 2, 1, 131, 259, *dims, dtype=dtype, kind=kind, target=target)


@each_kind
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 2), (3, 3)])
def test_query_heads_share_key_heads(kind, heads):
    Hq, Hkv = heads
    check(2, Hq, Hkv, 5, 133, dtype=torch.bfloat16, kind=kind, mask_mod=causal)


BLOCKS = (16, (96, 40), (160, 257), (64, 512), (1, 1), 128)


@each_kind
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_that_no_tile_divides(kind, block):
    check(1, 2, 1, 77, 301, kind=kind, mask_mod=sliding_window(40), block=block)


@each_kind
@pytest.mark.parametrize("lengths", [(1, 1), (1, 129), (129, 1), (128, 128), (200, 3)])
def test_lengths(kind, lengths):
    check(1, 2, 2, *lengths, kind=kind)


MASKED = [NkiPrefillConfig(128, 256, mask=mask) for mask in ("range", "affine", "select")]


@pytest.mark.parametrize("config", MASKED, ids=lambda config: config.mask)
@pytest.mark.parametrize("name", ["causal", "sliding_window", "alibi_causal_document", "padding"])
def test_forms_of_a_mask(name, config):
    built = case(name).make(1, 2, 2, 141, 173)
    check(
        1, 2, 2, 141, 173, config=config, block=64,
        score_mod=built.score_mod, mask_mod=built.mask_mod,
    )  # fmt: skip


VARIANTS = [
    NkiPrefillConfig(32, 128, 128, 1, buffers=1),
    NkiPrefillConfig(128, 2048, 4096, 1),
    NkiPrefillConfig(128, 512, 256, value_buffers=2, buffers=3, kv_buffers=2),
]


@pytest.mark.parametrize("config", VARIANTS)
def test_variants_of_prefill(config):
    check(1, 2, 1, 141, 600, 64, dtype=torch.bfloat16, config=config, mask_mod=causal)


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("section", [128, 4096])
def test_splits_of_decode(splits, section):
    config = NkiDecodeConfig(64, 256, splits, section)
    check(2, 8, 2, 3, 700, 64, dtype=torch.bfloat16, kind="decode", config=config, mask_mod=causal)


@each_kind
@pytest.mark.parametrize("scale", [-0.3, 2.0])
def test_scales(kind, scale):
    check(1, 1, 1, 37, 131, kind=kind, scale=scale, mask_mod=causal)


@each_kind
def test_keys_that_all_batches_share(kind):
    check(3, 2, 1, 9, 131, Bkv=1, kind=kind)


def test_rows_without_keys_are_zero_and_minus_infinity():
    got = check(
        1, 1, 1, 200, 130, block=64,
        mask_mod=lambda b, h, q, k: (k < 3) & (q > 150),
    )  # fmt: skip
    assert got.out[0, 0, :151].eq(0).all() and got.lse[0, 0, :151].isneginf().all()
    assert got.out[0, 0, 151:].ne(0).all()


def test_captured_values_are_read_when_the_call_is_prepared():
    bias = torch.zeros(64)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    before = check(1, 1, 1, 9, 64, score_mod=score_mod)
    bias[::2] = 3.0
    assert not check(1, 1, 1, 9, 64, score_mod=score_mod).out.equal(before.out)


@each_kind
@pytest.mark.parametrize("name", ["noop", "natten_2d", "half_precision_bias", "relative_bias"])
def test_memory_is_what_the_interpreter_counts(kind, name):
    built = case(name).make(1, 4, 2, 131, 259, dtype=torch.bfloat16)
    configs = SMALL[kind], *(VARIANTS if kind == "prefill" else ())
    assert_memory_counted(kind, configs, built)


@pairwise(
    mods=["causal", "softcap"], statistics=[(False, False), (True, False), (False, True)],
    dtype=[torch.float32, torch.bfloat16, torch.float16], kind=SMALL,
)  # fmt: skip
def test_statistics(kind, dtype, statistics, mods):
    masks, scores = {"causal": causal}, {"softcap": softcap(20.0)}
    check(
        1, 4, 2, 141, 429, 64, dtype=dtype, kind=kind, config=SMALL[kind], statistics=statistics,
        mask_mod=masks.get(mods), score_mod=scores.get(mods),
    )  # fmt: skip


def test_a_row_whose_maximum_grows_from_tile_to_tile_is_rescaled():
    def rising(score, b, h, q_idx, kv_idx):
        return score + kv_idx * 0.7

    for dtype in (torch.float32, torch.bfloat16):
        check(1, 1, 1, 40, 700, dtype=dtype, config=SMALL["prefill"], score_mod=rising)


def test_scores_that_a_score_mod_makes_infinite_spread_to_no_other_row():
    """trn1 turns by products, in which minus infinity would become NaN."""

    def masked(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    for target in TARGETS:
        check(1, 1, 1, 200, 200, config=SMALL["prefill"], score_mod=masked, target=target)


def test_several_tiles_and_sections_with_a_bias_for_each_head():
    for mods in ({"score_mod": alibi(4, "cpu")}, {"mask_mod": causal}):
        check(1, 4, 2, 301, 429, 64, dtype=torch.bfloat16, config=SMALL["prefill"], **mods)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [NkiPrefillConfig(128, 128), NkiPrefillConfig(128, 2048, 4096, 1, mixed=True)]
)
def test_the_tutorials_case_interprets_in_ten_seconds_and_passes_the_gate(config):
    """128 x 128 issues the most instructions; seconds are of this process's one thread."""
    task = example.task_of("trn2", "float32" if config.mixed else "bfloat16", False)
    verdict, seconds = example.gated(task, config, "trn2")
    assert verdict.passed, verdict.message()
    assert seconds < 10
