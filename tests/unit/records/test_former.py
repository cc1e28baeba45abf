"""Records of older versions: their names are read as those of today, and not written again."""

import json
from dataclasses import fields

import pytest

from flexattn.errors import CacheError
from flexattn.kernels.choose.registry import config_class, config_names
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.records.codec import decode, encode
from flexattn.records.former import FORMER_CLASSES, FORMER_FIELDS

HOPPER = HopperPrefillConfig(
    2, 64, 3, 232, ping_pong=True, tile_scheduler="static", order="sections", l2_swizzle=16,
    q_in_regs=128, lazy_rescale=True, cross_tile_pipeline=False, fp8_pv=True,
    ping_pong_softmax=True, pack_gqa=True,
)  # fmt: skip
OLD_HOPPER = (
    '{"type": "GluonPrefillConfig", "consumers": 2, "BLOCK_N": 64, "num_stages": 3, '
    '"registers": 232, "ping_pong": true, "schedule": "static", "order": "sections", '
    '"section": 16, "q_registers": 128, "watched": true, "chained": false, "narrow": true, '
    '"long_turns": true, "packed": true}'
)
SERVING = ServingConfig(8, 128, 4, 1, 2, 1, "await", "heads")
OLD_SERVING = (
    '{"type": "ServingConfig", "BLOCK_M": 8, "BLOCK_N": 128, "num_warps": 4, "num_stages": 1, '
    '"per_sm": 2, "least": 1, "combine": "await", "deal": "heads"}'
)
each = pytest.mark.parametrize(
    ("old", "config"), [(OLD_HOPPER, HOPPER), (OLD_SERVING, SERVING)], ids=["hopper", "serving"]
)


@each
def test_a_config_of_an_older_version_is_the_same_config(old, config):
    """Users' records would all have been refused when Hopper's fields took the field's names."""
    assert decode(type(config), json.loads(old), "config") == config


@each
def test_former_names_are_never_written(old, config):
    written = encode(decode(type(config), json.loads(old), "config"))
    assert written == encode(config) and written["type"] == type(config).__name__
    assert not FORMER_FIELDS[type(config).__name__].keys() & written.keys()


def test_a_field_has_one_name_at_a_time():
    both = {**json.loads(OLD_SERVING), "split_policy": "even"}
    with pytest.raises(CacheError, match="other fields"):
        decode(ServingConfig, both, "config")


def test_the_table_names_what_there_is():
    assert set(FORMER_CLASSES.values()) <= set(config_names())
    assert not FORMER_CLASSES.keys() & set(config_names())
    for name, names in FORMER_FIELDS.items():
        found = {field.name for field in fields(config_class(name))}
        assert set(names.values()) <= found and not names.keys() & found, name
