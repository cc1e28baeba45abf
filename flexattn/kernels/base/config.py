"""What the config of any family has, and how one is told in words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Literal, Protocol

__all__ = ["Config", "Language", "describe", "padded", "pieces"]

Language = Literal["triton", "gluon"]


class Config(Protocol):
    """One variant of one template, as a frozen dataclass of numbers; its family has the class.

    BLOCK_M, BLOCK_N: query rows of a tile, and keys of one step of its loop. heads: query heads
    that a tile holds apart, each with BLOCK_M rows. language: what its template is written in.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

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


def describe(config: Config) -> str:
    """Names and numbers in one line, for headers and reports; without what holds its default."""
    values = ((field, getattr(config, field.name)) for field in fields(config))
    return " ".join(f"{field.name}={value}" for field, value in values if value != field.default)


def pieces(head_dim: int) -> tuple[tuple[int, int, int], ...]:
    """Cut a head dimension into at most two power-of-two tiles: (offset, tile, elements used).

    192 is 128 + 64 and 576 is 512 + 64 exactly; 112 is one tile of 128, padded.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    half = whole // 2
    rest = head_dim - half
    if whole == 16 or head_dim == whole:
        return ((0, whole, head_dim),)
    tail = max(16, 1 << (rest - 1).bit_length())
    if tail >= half:
        return ((0, whole, head_dim),)
    return ((0, half, half), (half, tail, rest))


def padded(head_dim: int) -> int:
    """Elements of a head dimension as the tiles hold them."""
    return sum(tile for _, tile, _ in pieces(head_dim))
