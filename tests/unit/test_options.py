"""kernel_options: torch's keys, what each does here, and what is handed back to torch."""

import logging

import pytest
from torch.nn.attention.flex_attention import FlexKernelOptions

from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.mods.rules import RULES
from flexattn.options import NONE, Options, for_torch, parse
from flexattn.settings import say_once
from flexattn.space.config import DecodeConfig, PrefillConfig


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
        ({"RULES_OFF": "tilt, row"}, Options(rules_off=("row", "tilt"))),
        ({"RULES_OFF": "all"}, Options(rules_off=tuple(sorted(RULES)))),
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
        ({"bwd_num_warps": 2, "num_warps": 4}, Options(num_warps=4)),
    ],
    ids=str,
)
def test_parsed(given, expected):
    assert parse(given) == expected


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"BLOCKM": 64}, ConfigError, "BLOCKM.*BLOCK_M"),
        ({"fwd_fwd_BLOCK_M": 64}, ConfigError, "fwd_fwd_BLOCK_M"),
        ({"num_warps": 0}, InputError, "positive integer"),
        ({"num_warps": True}, InputError, "positive integer"),
        ({"BLOCK_M": 64.0}, InputError, "positive integer"),
        ({"USE_TMA": 1}, InputError, "True or False"),
        ({"RULES_OFF": "tilt, skew"}, ConfigError, "tilt, skew.*distribute"),
        ({"RULES_OFF": 3}, ConfigError, "mask"),
        ({"TANH": "slow"}, ConfigError, "exact"),
        ({"MERGE_CONSUMERS": 1}, InputError, "True or False"),
        ({"PTXAS": "/usr/bin/ptxas"}, ConfigError, "ptxas-blackwell"),
        ({"BACKEND": "CUTLASS"}, ConfigError, "AUTO"),
        ({"BACKEND": "FLASH"}, UnsupportedError, "torch"),
        ({"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}, ConfigError, "BACKEND"),
    ],
    ids=str,
)
def test_refused(given, error, words):
    with pytest.raises(error, match=f"(?s){words}"):
        parse(given)


def test_what_has_no_effect_is_logged_once_and_warns_of_nothing(caplog):
    """Code written for torch passes such keys on purpose: a warning asked it to mend nothing."""
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, "flexattn"):
        for _ in range(3):
            parse({"PRESCALE_QK": True, "bwd_BLOCK_M": 64, "num_warps": 4})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and {record.levelname for record in caplog.records} == {"INFO"}
    assert any("PRESCALE_QK" in line for line in said)
    assert any("bwd_BLOCK_M" in line for line in said)


def test_torch_gets_no_key_that_it_does_not_have():
    given = {"SPLIT_KV": 3, "fwd_SPLIT_KV": 4, "BLOCK_M": 64, "PRESCALE_QK": True}
    given |= {"RULES_OFF": "all", "TANH": "fast"}
    assert for_torch(given) == {"BLOCK_M": 64, "PRESCALE_QK": True}
    assert for_torch(None) is None


def test_numbers_go_into_the_config_that_has_them():
    options = Options(BLOCK_N=32, num_splits=3, use_tma=True)
    assert options.overrides
    assert options.apply(PrefillConfig(64, 64, 4, 2)) == PrefillConfig(64, 32, 4, 2, True)
    assert options.apply(DecodeConfig(16, 64, 4, 2)) == DecodeConfig(16, 32, 4, 2, 3)
    assert not Options(kind="decode").overrides
