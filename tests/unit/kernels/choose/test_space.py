"""Configs: every problem has a default on every known device, and what cannot run says why."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from flexattn.catalogue import causal, softcap
from flexattn.device import KNOWN, named
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import padded, pieces
from flexattn.kernels.choose.defaults import default, reasons, space
from flexattn.kernels.choose.options import Options
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.problem import Layout
from tests.families import fit_to_mask, geometry
from tests.problems import choices, problem

DEVICES = list(KNOWN)
HEAD_DIMS = (16, 24, 64, 80, 96, 112, 128, 192, 256, 320, 512, 576)
STRIDED = Layout(False, False, False, False)
blocks = st.tuples(*[st.one_of(st.integers(1, 512), st.sampled_from([16, 64, 128, 256]))] * 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("name", DEVICES)
def test_every_head_dimension_has_a_default(name, kind, dtype):
    device = named(name)
    for D in HEAD_DIMS:
        for Dv in {D, 128, 512}:
            wanted = problem(kind, D, Dv, dtype, score_mod=softcap(50.0), mask_mod=causal)
            assert reasons(default(wanted, device), wanted.structure, device) == []


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(DEVICES),
    kind=st.sampled_from(["prefill", "decode"]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    D=st.integers(1, 576),
    Dv=st.integers(1, 576),
    block=blocks,
    group=st.integers(1, 128),
    q_len=st.integers(1, 300),
    per_head=st.booleans(),
    layout=st.sampled_from([Layout(True, True, True, True), STRIDED]),
)
def test_defaults_can_run(name, kind, dtype, D, Dv, block, group, q_len, per_head, layout):
    """Any head dimensions, groups, lengths and sparse blocks on any device of the table."""
    wanted = problem(
        kind, D, Dv, dtype, mask_mod=causal, block=block, group=group, q_len=q_len,
        per_head=per_head, layout=layout,
    )  # fmt: skip
    device = named(name)
    config = default(wanted, device)
    assert reasons(config, wanted.structure, device) == []
    assert fit_to_mask(config, wanted.structure) == config
    grid = geometry(wanted, config, device)
    rows = q_len * wanted.structure.packed_heads
    assert grid.num_tiles * config.BLOCK_M >= rows and grid.num_splits >= 1


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["nvidia-a100", "nvidia-h200", "nvidia-rtx-5090", "amd-mi300x"])
def test_the_space_starts_at_the_default_and_repeats_nothing(name, kind):
    device, wanted = named(name), problem(kind, mask_mod=causal, score_mod=softcap(50.0))
    found = list(space(wanted, device))
    assert found[0] == default(wanted, device)
    assert len(found) == len(set(found)) > 4
    assert all(reasons(config, wanted.structure, device) == [] for config in found)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PrefillConfig(48, 64, 4, 2), "BLOCK_M=48 is not a power of two"),
        (PrefillConfig(64, 8, 4, 2), "BLOCK_N=8 is not a power of two of at least 16"),
        (PrefillConfig(64, 64, 3, 2), "num_warps=3"),
        (PrefillConfig(64, 64, 4, 9), "num_stages=9"),
        (PrefillConfig(256, 64, 8, 2), "wider than the mask's block of 128"),
        (PrefillConfig(128, 128, 8, 8), "shared memory: about .* nvidia-rtx-5090 has 101376"),
        (PrefillConfig(128, 128, 1, 1), "registers: about .* sm_120 has 255"),
        (DecodeConfig(16, 256, 4, 2), "BLOCK_N=256 is wider"),
    ],
    ids=str,
)
def test_reasons_name_the_number_and_the_limit(config, words):
    kind = "decode" if isinstance(config, DecodeConfig) else "prefill"
    structure = problem(kind, mask_mod=causal).structure
    found = "; ".join(reasons(config, structure, named("nvidia-rtx-5090")))
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)


def test_reasons_against_tma():
    config = PrefillConfig(128, 64, 4, 2, use_tma=True)
    structure = problem().structure
    assert reasons(config, structure, named("nvidia-h200")) == []
    assert "has no TMA" in reasons(config, structure, named("nvidia-a100"))[0]
    strided = replace(structure, layout=STRIDED)
    assert "inner stride 1" in reasons(config, strided, named("nvidia-h200"))[0]
    wide = problem(D=192, Dv=128).structure
    assert "192 is not one tile" in reasons(config, wide, named("nvidia-h200"))[0]


def test_a_forced_config_that_cannot_run_says_every_reason():
    wanted = problem(mask_mod=causal)
    with pytest.raises(ConfigError, match=r"(?s)BLOCK_N=256.*wider.*shared memory.*start from"):
        next(choices(wanted, named("nvidia-a100"), Options(BLOCK_N=256, num_stages=4)))


def test_a_new_length_asks_for_one_of_few_kernels():
    """Splits are an argument of decode's; prefill has four kernels at most, and for long one."""
    device = named("nvidia-h200")
    of_prefill = (1, 17, 100, 333, 600, 1000, 1500, 4096, 9000, 2**15, 2**20)
    for kind, lengths in (("prefill", of_prefill), ("decode", (1, 2, 4))):
        asked = (problem(kind, mask_mod=causal, q_len=n, kv_len=1 + n * 7) for n in lengths)
        found = [default(each, device) for each in asked]
        kernels = {replace(each, num_splits=0) if kind == "decode" else each for each in found}
        assert len(kernels) <= (4 if kind == "prefill" else 1)
        assert kind == "decode" or len(set(found[-4:])) == 1


@given(st.integers(1, 576))
def test_pieces_cover_a_head_dimension(head_dim):
    found = pieces(head_dim)
    assert 1 <= len(found) <= 2 and found[0][0] == 0
    assert sum(used for _, _, used in found) == head_dim
    assert all(tile & (tile - 1) == 0 and tile >= 16 and used <= tile for _, tile, used in found)
    assert head_dim <= padded(head_dim) < 2 * head_dim + 16
    if len(found) == 2:
        assert found[1][0] == found[0][1] == found[0][2]


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [(64, [64]), (80, [64, 16]), (96, [64, 32]), (112, [128]), (192, [128, 64]), (576, [512, 64])],
)
def test_pieces_that_models_have(head_dim, expected):
    assert [tile for _, tile, _ in pieces(head_dim)] == expected


def test_splits_fill_the_device_and_none_is_without_a_tile():
    device = named("nvidia-h200")
    config = DecodeConfig(16, 128, 4, 3)
    for kv_len, splits in ((131_072, 8), (128, 1), (129, 2), (0, 1)):
        assert geometry(problem("decode", kv_len=kv_len), config, device).num_splits == splits
    forced = replace(config, num_splits=3)
    assert geometry(problem("decode", kv_len=8192), forced, device).num_splits == 3
