"""Whether the static default that a record's winner was raced against is still the one.

A record says that its winner beat the static default of its time, or that nothing did. Of another
config that has become the default since, it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexattn.kernels.base.config import Config, describe
from flexattn.records.codec import encode
from flexattn.records.record import Record

# Fields that say how a config is compiled, as a config is that is told nothing: which assembler a
# default takes depends on what is installed.
TOOLCHAIN_FIELDS = {"ptxas": "", "merge_consumers": True}


def same_tiles(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configs, as `encode` gives them, differ at most in how they are compiled."""
    return all(
        one.get(name) == other.get(name) for name in (one.keys() | other) - TOOLCHAIN_FIELDS.keys()
    )


def recorded_default(record: Record) -> Config:
    """The static default of a record's time."""
    return record.trials[record.decision.default].config


def outdated(record: Record | None, today: Config) -> str:
    """Why a record's winner may be slower than today's static default; "" where it was faster.

    record: None where its trials cannot be read. today: the default of the record's own sizes.
    """
    if record is None:
        return "its trials cannot be read, and so not which static default it was raced against"
    was = encode(recorded_default(record))
    now = encode(today)
    if same_tiles(was, now):
        return ""
    words = was["type"], describe(recorded_default(record)), now["type"], describe(today)
    told = "its default was {} {}, which is no longer the static default: that is {} {}"
    return told.format(*words)
