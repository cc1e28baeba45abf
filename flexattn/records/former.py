"""Names that configs had in older versions, which records are read by and never written by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMER_CLASSES = {"GluonPrefillConfig": "HopperPrefillConfig"}
# By the class's name of today, then by a field's former name.
FORMER_FIELDS: Mapping[str, Mapping[str, str]] = {
    "HopperPrefillConfig": {
        "registers": "consumer_regs",
        "schedule": "tile_scheduler",
        "section": "l2_swizzle",
        "q_registers": "q_in_regs",
        "watched": "lazy_rescale",
        "chained": "cross_tile_pipeline",
        "narrow": "fp8_pv",
        "long_turns": "ping_pong_softmax",
        "packed": "pack_gqa",
    },
    "ServingConfig": {"deal": "split_policy"},
}


def current(name: str, data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A config's class and its fields by today's names.

    What is given by both of its names keeps the former one, which no class has.
    """
    name = FORMER_CLASSES.get(name, name)
    names = FORMER_FIELDS.get(name, {})
    return name, {
        former if names.get(former) in data else names.get(former, former): value
        for former, value in data.items()
    }
