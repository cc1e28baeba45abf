"""What the code of the kernel depends on that stores new keys and values in a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# Of what there is one scale; "tensor" also stands for one of each head: a stride tells them apart.
CacheScales: TypeAlias = Literal["", "tensor", "page", "page_head", "token", "token_head"]
# Who says where a token goes: a slot of its own, or its request's page table.
Slots: TypeAlias = Literal["int64", "int32", "table", "ragged table"]
# What has scales of its own: pages, the tokens (n) of one, heads.
AXES: dict[CacheScales, str] = {
    "": "",
    "tensor": "h",
    "page": "p",
    "page_head": "ph",
    "token": "pn",
    "token_head": "pnh",
}
# What the kernel rounds to, by the cache's dtype: the largest number, bits of the mantissa, and
# the exponent's bias.
EIGHT_BITS = {"float8_e4m3fn": (448.0, 3, 7), "float8_e5m2": (57344.0, 2, 15)}


@dataclass(frozen=True, slots=True)
class RopeForm:
    """dim: columns that are rotated, the first ones. table: dtype of cos and sin, "" of none."""

    dim: int
    interleaved: bool
    table: str


@dataclass(frozen=True, slots=True)
class AppendForm:
    """Everything that decides the kernel's source: no number of tokens, and no stride.

    head_dim_v: 0 where values are columns of the keys, or are not stored. aligned: addresses and
    strides of what is read are multiples of 16 bytes.
    """

    dtype: str
    kv_dtype: str
    head_dim_qk: int
    head_dim_v: int
    heads: int
    page: int
    slots: Slots
    scales: CacheScales = ""
    rope: RopeForm | None = None
    aligned: bool = True

    @property
    def by_table(self) -> bool:
        """Whether tokens are found through their request's page table."""
        return self.slots in ("table", "ragged table")

    @property
    def computed(self) -> bool:
        """Whether the kernel computes and stores the scales."""
        return self.scales in ("token", "token_head")


def search_steps(requests: int) -> int:
    """Halvings after which a search for a token's request, among so many, has one left."""
    return (requests - 1).bit_length()
