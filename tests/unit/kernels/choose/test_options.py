"""kernel_options: torch's keys, what each does here, and what is handed back to torch."""

import enum
import logging

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flexattn
from flexattn import FlexKernelOptions
from flexattn.errors import ConfigError, InputError
from flexattn.kernels.choose.options import NONE, Options, for_torch, parse
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.mods.rules import REWRITES


class Size(int, enum.Enum):
    ROWS = 64


# What torch's lowering takes from kernel_options without naming it in FlexKernelOptions.
UNDOCUMENTED = {
    "PARTITION_SIZE": 128, "SKIP_MASK_SCORE": True, "num_consumer_groups": 2,
    "num_buffers_warp_spec": 3, "IS_DIVISIBLE": False, "SAFE_N_BOUNDARY": False,
    "SPARSE_Q_BLOCK_SIZE": 128, "SPARSE_KV_BLOCK_SIZE": 128, "GQA_SHARED_HEADS": 1,
    "HAS_FULL_BLOCKS": True, "QK_HEAD_DIM": 64, "V_HEAD_DIM_ROUNDED": 64, "SAFE_HEAD_DIM": True,
}  # fmt: skip


def test_the_type_of_options_is_torchs():
    assert flexattn.FlexKernelOptions is torch_flex.FlexKernelOptions
    assert "FlexKernelOptions" in flexattn.__all__


def test_nothing_is_nothing():
    assert parse(None) == parse({}) == NONE
    assert not NONE.overrides and NONE.kind is None


def test_every_key_of_torch_is_accepted():
    """With a value of its type, bare and with either prefix."""
    values = {"int": 16, "bool": True, "Backend": "TRITON"}
    for key, hint in FlexKernelOptions.__annotations__.items():
        text = str(hint)
        value = next((v for name, v in values.items() if name in text), 16)
        if "Literal" in text and "TRITON" in text:
            value = "TRITON"
        for prefix in ("", "fwd_", "bwd_"):
            bare = key.removeprefix("fwd_").removeprefix("bwd_")
            parse({prefix + bare: value})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"BLOCK_M": 64, "BLOCK_N": 32}, Options(BLOCK_M=64, BLOCK_N=32)),
        ({"num_warps": 8, "num_stages": 1}, Options(num_warps=8, num_stages=1)),
        ({"SPLIT_KV": 3}, Options(num_splits=3)),
        ({"USE_TMA": False}, Options(use_tma=False)),
        ({"RULES_OFF": "row_slope, row"}, Options(rules_off=("row", "row_slope"))),
        ({"RULES_OFF": "all"}, Options(rules_off=tuple(sorted(REWRITES)))),
        ({"TANH": "exact"}, Options(tanh="exact")),
        ({"MERGE_CONSUMERS": False}, Options(merge_consumers=False)),
        ({"PTXAS": "ptxas", "BACKEND": "TRITON"}, Options("prefill", "triton", ptxas="ptxas")),
        ({"TANH": "auto", "RULES_OFF": ""}, NONE),
        ({"BACKEND": "AUTO"}, NONE),
        ({"BACKEND": "TRITON"}, Options(kind="prefill", language="triton")),
        ({"BACKEND": "GLUON"}, Options(kind="prefill", language="gluon")),
        ({"BACKEND": "TRITON_DECODE"}, Options(kind="decode")),
        ({"FORCE_USE_FLEX_ATTENTION": True}, Options(kind="prefill", language="triton")),
        ({"fwd_BLOCK_M": 32}, Options(BLOCK_M=32)),
        ({"fwd_BLOCK_M": 32, "BLOCK_M": 64}, Options(BLOCK_M=32)),
        ({"BLOCK_M": 64, "fwd_BLOCK_M": 32}, Options(BLOCK_M=32)),
        ({"bwd_BLOCK_M": 32}, NONE),
        (
            {"bwd_num_warps": 2, "num_warps": 4, "BLOCK_M1": 64, "bwd_BLOCK_N2": 32},
            Options(num_warps=4, backward=(("BLOCK_M1", 64), ("BLOCK_N2", 32), ("num_warps", 2))),
        ),
        ({"DETERMINISTIC": True}, Options(deterministic=True)),
        ({"BACKEND": "FLASH"}, NONE),
        ({"BACKEND": "FLASH", "BLOCK_M": 64}, Options(BLOCK_M=64)),
        ({"FLOAT32_PRECISION": "'ieee'"}, Options(fp32="ieee")),
        ({"fwd_FLOAT32_PRECISION": "tf32"}, Options(fp32="tf32")),
        ({"FLOAT32_PRECISION": "'tf32x3'"}, Options(fp32="bf16x6")),
        ({"FLOAT32_PRECISION": "bf16x6"}, Options(fp32="bf16x6")),
        ({"FP8_WEIGHTS": "e4m3"}, Options(fp8_weights="e4m3")),
        ({"FP8_WEIGHTS": "exact"}, NONE),
        ({"bwd_WRITE_DQ": False, "WRITE_DQ": False}, NONE),
        (UNDOCUMENTED, NONE),
        ({f"fwd_{key}": value for key, value in UNDOCUMENTED.items()}, NONE),
        ({f"bwd_{key}": value for key, value in UNDOCUMENTED.items()}, NONE),
    ],
    ids=str,
)
def test_parsed(given, expected):
    assert parse(given) == expected


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"BLOCKM": 64}, ConfigError, "BLOCKM.*did you mean 'BLOCK_M'"),
        ({"fwd_NUM_STAGE": 2}, ConfigError, "fwd_NUM_STAGE.*the keys are"),
        ({"num_consumer_group": 2}, ConfigError, "did you mean 'num_consumer_groups'"),
        ({"completely": 2}, ConfigError, "correct its spelling"),
        ({"SM_SCALE": 0.5}, ConfigError, "pass scale="),
        ({"OUTPUT_LOGSUMEXP": True}, ConfigError, "AuxRequest.lse=True"),
        ({"fwd_OUTPUT_MAX": True}, ConfigError, "AuxRequest.max_scores=True"),
        ({"FLOAT32_PRECISION": "bf16"}, ConfigError, "ieee"),
        ({"FP8_WEIGHTS": "e5m2"}, ConfigError, "exact.*e4m3"),
        ({3: 64}, InputError, r"the key 3 \(int\).*strings.*pass a dict"),
        ([("BLOCK_M", 64)], InputError, "list.*mapping"),
        ("BLOCK_M", InputError, "str.*mapping"),
        (0, InputError, "int.*mapping"),
        ({"BLOCK_M": np.float64(64)}, InputError, "positive integer"),
        ({"BLOCK_M": np.bool_(True)}, InputError, "positive integer"),
        ({"BLOCK_M": torch.tensor(64)}, InputError, "positive integer"),
        ({"BLOCK_M": "64"}, InputError, "positive integer"),
        ({"RULES_OFF": ["row_slope"]}, ConfigError, "separated by commas"),
        ({"BACKEND": 3}, ConfigError, "AUTO"),
        ({"fwd_fwd_BLOCK_M": 64}, ConfigError, "fwd_fwd_BLOCK_M"),
        ({"num_warps": 0}, InputError, "positive integer"),
        ({"num_warps": True}, InputError, "positive integer"),
        ({"BLOCK_M": 64.0}, InputError, "positive integer"),
        ({"USE_TMA": 1}, InputError, "True or False"),
        ({"RULES_OFF": "row_slope, skew"}, ConfigError, "row_slope, skew.*distribute"),
        ({"RULES_OFF": 3}, ConfigError, "mask"),
        ({"TANH": "slow"}, ConfigError, "exact"),
        ({"MERGE_CONSUMERS": 1}, InputError, "True or False"),
        ({"PTXAS": "/usr/bin/ptxas"}, ConfigError, "ptxas-blackwell"),
        ({"BACKEND": "CUTLASS"}, ConfigError, "AUTO"),
        ({"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}, ConfigError, "BACKEND"),
    ],
    ids=str,
)
def test_refused(given, error, words):
    with pytest.raises(error, match=f"(?s){words}"):
        parse(given)


def test_what_has_no_effect_is_a_line_for_whoever_debugs(caplog):
    given = {"PRESCALE_QK": True, "bwd_BLOCK_M": 64, "num_warps": 4, "PARTITION_SIZE": 128}
    with caplog.at_level(logging.DEBUG, "flexattn"):
        parse(given)
    said = [(record.levelno, record.args) for record in caplog.records]
    assert said == [(logging.DEBUG, (key,)) for key in given if key != "num_warps"]


def test_flash_is_served_and_said_once(caplog):
    """It was refused, though torch documents it and whoever asks for it wants speed."""
    with caplog.at_level(logging.INFO, "flexattn"):
        for _ in range(3):
            parse({"BACKEND": "FLASH"})
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "FLASH" in record.getMessage()
    q = torch.randn(1, 1, 8, 16)
    options = {"BACKEND": "FLASH"}
    assert flexattn.flex_attention(q, q, q, kernel_options=options).shape == q.shape
    assert "FLASH" in str(flexattn.explain(q, q, q, kernel_options=options))
    assert "FLASH" not in str(flexattn.explain(q, q, q))


@pytest.mark.parametrize("number", [Size.ROWS, np.int64(64), np.uint8(64)], ids=repr)
@pytest.mark.parametrize("key", ["BLOCK_M", "fwd_num_warps", "SPLIT_KV"])
def test_numbers_of_classes_of_their_own_are_ints(number, key):
    """What they print went into a kernel's file, and that broke calls with the plain number."""
    (found,) = (x for x in vars_of(parse({key: number})) if x is not None)
    assert found == 64 and type(found) is int
    (handed,) = for_torch({"BLOCK_M1": number}).values()
    assert type(handed) is int


def vars_of(options):
    return [getattr(options, name) for name in ("BLOCK_M", "num_warps", "num_splits")]


def test_torch_gets_no_key_that_it_does_not_have():
    given = {"SPLIT_KV": 3, "fwd_SPLIT_KV": 4, "BLOCK_M": 64, "PRESCALE_QK": True}
    given |= {"RULES_OFF": "all", "TANH": "fast"}
    assert for_torch(given) == {"BLOCK_M": 64, "PRESCALE_QK": True}
    assert for_torch(None) is None


@pytest.mark.parametrize("precision", ["ieee", "'ieee'"])
def test_torch_gets_a_precision_in_quotes(precision):
    """It writes the text into a kernel as it stands, where a bare word is an unknown name."""
    assert for_torch({"fwd_FLOAT32_PRECISION": precision}) == {"fwd_FLOAT32_PRECISION": "'ieee'"}


def test_numbers_go_into_the_config_that_has_them():
    options = Options(BLOCK_N=32, num_splits=3, use_tma=True)
    assert options.overrides
    assert options.apply(PrefillConfig(64, 64, 4, 2)) == PrefillConfig(64, 32, 4, 2, True)
    assert options.apply(DecodeConfig(16, 64, 4, 2)) == DecodeConfig(16, 32, 4, 2, 3)
    assert not Options(kind="decode").overrides
