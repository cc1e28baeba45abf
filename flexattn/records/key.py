"""Key: a Problem as the cache names it, its sizes rounded by the one function that rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from flexattn.problem import Captures, Problem, rounded as rounded

# The fields that are rounded: two keys that differ in these alone are neighbours.
SIZES = ("B", "q_len", "kv_len")


class Sizes(NamedTuple):
    """The sizes of a problem, as measured or rounded; `str` is a record's file name."""

    B: int
    q_len: int
    kv_len: int

    def __str__(self) -> str:
        return f"b{self.B}-q{self.q_len}-k{self.kv_len}"

    def rounded(self) -> Sizes:
        """Each size as the cache sees it."""
        return Sizes(rounded(self.B), rounded(self.q_len), rounded(self.kv_len))


@dataclass(frozen=True, slots=True)
class Key:
    """What a record is filed under: everything that decides the best config, rounded.

    score, mask: fingerprints of the simplified mods with what their code depends on; "" without
    one. blocks: "128x128 full" for a BlockMask of such blocks that lists full ones apart.
    mask_class: density, imbalance and contiguity of the BlockMask, "unknown", or "" without one.
    Of the kind "serving", blocks is the cache's page and mask_class how lengths are spread.
    """

    kind: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    Hq: int
    Hkv: int
    B: int
    q_len: int
    kv_len: int
    score: str
    mask: str
    blocks: str
    mask_class: str
    layout: str
    precision: str
    sinks: bool = False

    def digest(self) -> str:
        """24 hexadecimal digits of a sha256 over every field, equal in every process.

        A field that has a default counts where it differs, so older records keep their names.
        """
        return _digest(self, _FIELDS, _values)

    def family(self) -> str:
        """The digest of all that is not a size: the keys of one family are neighbours."""
        return _family(self)

    @property
    def sizes(self) -> Sizes:
        """B, q_len and kv_len, rounded."""
        return Sizes(self.B, self.q_len, self.kv_len)


@lru_cache(maxsize=1024)
def _family(key: Key) -> str:
    return _digest(key, _OF_A_FAMILY, _family_values)


_FIELDS = tuple(field.name for field in fields(Key))
_OF_A_FAMILY = tuple(name for name in _FIELDS if name not in SIZES)
_DEFAULTS = {field.name: field.default for field in fields(Key) if field.default is not MISSING}
_values, _family_values = attrgetter(*_FIELDS), attrgetter(*_OF_A_FAMILY)


def _digest(key: Key, names: tuple[str, ...], values: Callable[[Key], tuple[object, ...]]) -> str:
    parts = [
        f"{name}={value!r}"
        for name, value in zip(names, values(key), strict=True)
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def sizes_of(problem: Problem) -> Sizes:
    """The sizes of a problem as they are."""
    return Sizes(problem.B, problem.q_len, problem.kv_len)


def key_of(problem: Problem) -> Key:
    """The key of a problem. Statistics that are also written do not change it."""
    s, sizes = problem.structure, sizes_of(problem).rounded()
    return Key(
        kind=s.kind,
        dtype=s.dtype,
        head_dim_qk=s.head_dim_qk,
        head_dim_v=s.head_dim_v,
        Hq=problem.Hq,
        Hkv=problem.Hkv,
        B=sizes.B,
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        score=mod_name(s.score),
        mask=mod_name(s.mask),
        blocks=problem.blocks(),
        mask_class=problem.mask_class,
        layout=problem.layout(),
        precision=problem.precision(),
        sinks=s.sinks != "",
    )


def mod_name(captures: Captures | None) -> str:
    """A mod as a key has it: its fingerprint, and which of its tensors are contiguous."""
    if captures is None:
        return ""
    flags = "".join("c" if each else "s" for each in captures.contiguous)
    return captures.mod.fingerprint[:32] + (f":{flags}" if flags else "")
