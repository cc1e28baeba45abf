"""What the config of any family has, and how one is told in words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Literal, Protocol

Language = Literal["triton", "gluon"]


class Fields(Protocol):
    """Any dataclass: a config of a plug-in's has fewer numbers in common with the others."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Config(Fields, Protocol):
    """One variant of one template, as a frozen dataclass of numbers; its family has the class.

    BLOCK_M, BLOCK_N: query rows of a tile, and keys of one step of its loop. heads: query heads
    that a tile holds apart, each with BLOCK_M rows. language: what its template is written in.
    """

    def __hash__(self) -> int: ...

    @property
    def BLOCK_M(self) -> int: ...
    @property
    def BLOCK_N(self) -> int: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def language(self) -> Language: ...


def describe(config: Fields) -> str:
    """Names and numbers in one line, for headers and reports; without what holds its default."""
    values = ((field, getattr(config, field.name)) for field in fields(config))
    return " ".join(f"{field.name}={value}" for field, value in values if value != field.default)


def power_above(size: int) -> int:
    """The narrowest tile that covers so many elements: a power of two of at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def pieces(head_dim: int) -> tuple[tuple[int, int, int], ...]:
    """Cut a head dimension into at most two power-of-two tiles: (offset, tile, elements used).

    192 is 128 + 64 and 576 is 512 + 64 exactly; 112 is one tile of 128, padded.
    """
    whole = power_above(head_dim)
    half = whole // 2
    rest = head_dim - half
    if whole == 16 or head_dim == whole:
        return ((0, whole, head_dim),)
    tail = power_above(rest)
    if tail >= half:
        return ((0, whole, head_dim),)
    return ((0, half, half), (half, tail, rest))


def padded(head_dim: int) -> int:
    """Elements of a head dimension as the tiles hold them."""
    return sum(tile for _, tile, _ in pieces(head_dim))
