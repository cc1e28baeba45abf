"""The common parts of all configs: numbers and their words, tiles and grids, and knobs.

A knob is a field that a search turns and a template reads, with nothing said elsewhere. It changes
neither a config's tiles nor the memory and registers that limits count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, fields, replace
from itertools import islice, product
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from flexattn.errors import ConfigError
from flexattn.problem import Problem, Structure

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


def pieces(head_dim: int, least: int = 16) -> tuple[tuple[int, int, int], ...]:
    """Cut a head dimension into at most two power-of-two tiles: (offset, tile, elements used).

    192 is 128 + 64 and 576 is 512 + 64 exactly; 112 is one tile of 128, padded. least: elements
    of a second tile; a narrower one is padded into the first.
    """
    whole = power_above(head_dim)
    half = whole // 2
    rest = head_dim - half
    if whole == 16 or head_dim == whole:
        return ((0, whole, head_dim),)
    tail = power_above(rest)
    if tail >= half or tail < least:
        return ((0, whole, head_dim),)
    return ((0, half, half), (half, tail, rest))


def padded(head_dim: int, least: int = 16) -> int:
    """Elements of a head dimension as the tiles of `pieces` hold them."""
    return sum(tile for _, tile, _ in pieces(head_dim, least))


class Geometry(NamedTuple):
    """The grid of a launch: programs, row tiles, work tiles, and splits of the keys (1: prefill).

    num_tiles: of one head, or of heads that share their tiles. num_work_tiles: row tiles of all
    heads and batches, of which a program takes one or more.
    """

    programs: int
    num_tiles: int
    num_work_tiles: int
    num_splits: int = 1


def tiles_per_q(structure: Structure, config: Config) -> int:
    """Row tiles of one sparse query block; 1 without a block mask."""
    if structure.sparsity is None:
        return 1
    return -(-structure.sparsity.q_block * structure.packed_heads // config.BLOCK_M)


# Keys of a tile that may lie in two blocks of a mask: it reads the runs of both.
TWO_BLOCKS_KEYS = 96


def walks_runs(structure: Structure, config: Config) -> bool:
    """True if the kernel walks a mask's runs: whole tiles from one end to the other, no lists."""
    sparsity = structure.sparsity
    if sparsity is None or not sparsity.runs:
        return False
    return sparsity.kv_block % config.BLOCK_N == 0 or config.BLOCK_N == TWO_BLOCKS_KEYS


def touched_runs(structure: Structure, config: Config, parts: int) -> int:
    """The number of rows of a mask's blocks that a tile may touch; 0 where lists are walked.

    A tile of several parts that no block's rows divide has a run for each of them.
    """
    sparsity = structure.sparsity
    if sparsity is None or not walks_runs(structure, config):
        return 0
    return 1 if sparsity.q_block % config.BLOCK_M == 0 else parts


def check_power(name: str, size: int) -> None:
    """Raise ConfigError for a tile of kernel_options that is no power of two of at least 16."""
    if size < 16 or size & (size - 1):
        raise ConfigError(
            f"kernel_options[{name!r}]={size}", f"{name} is a power of two of at least 16"
        )


def tile_for(tile: int, block: int) -> int:
    """The widest tile not above this one that divides the block, or else that covers it."""
    dividing = block & -block
    if dividing >= 16:
        return min(tile, dividing)
    return min(tile, power_above(block))


_C = TypeVar("_C", bound=Config)
_Order = TypeVar("_Order", bound=str)


class _Knob(NamedTuple):
    others: tuple[object, ...]
    word: str
    moves: Callable[[Structure], bool]


def knob(
    default: Any,
    *others: Any,
    word: str,
    moves: Callable[[Structure], bool] = lambda structure: True,
) -> Any:
    """A field of a config with its default, and the other values that a search tries.

    word: what `short` says of a config in which it is turned. moves: whether it changes the kernel
    of a structure; a search leaves it alone where not.
    """
    return field(default=default, metadata={"knob": _Knob(others, word, moves)})


def _knobs(kind: type) -> tuple[tuple[str, Any, _Knob], ...]:
    """Name, default and knob of each such field of a config class."""
    metadata = ((each, each.metadata.get("knob")) for each in fields(kind))
    return tuple((each.name, each.default, found) for each, found in metadata if found is not None)


def orders(
    known: tuple[_Order, ...], problem: Problem, rows: int, every: bool
) -> tuple[_Order, ...]:
    """Those of a template's orders of tiles that differ in what they do to a problem.

    rows: of a tile. Heads side by side pay where they share keys, or where a mask makes some tiles
    long.
    """
    if problem.q_len <= rows or problem.Hq == 1:
        return known[:1]
    masked = problem.structure.sparsity is not None
    worth = {
        "last": True,
        "first": every and masked,
        "group": problem.Hq > problem.Hkv,
        "heads": every or masked,
        "sections": masked,
    }
    return tuple(order for order in known if worth[order])


def turned(config: _C, structure: Structure) -> Iterator[_C]:
    """Every setting of the knobs that move something for a structure, the config's own first."""
    moving = [
        (name, found.others) for name, _, found in _knobs(type(config)) if found.moves(structure)
    ]
    names = [name for name, _ in moving]
    yield config
    for setting in islice(
        product(*((getattr(config, n), *tried) for n, tried in moving)), 1, None
    ):
        yield replace(config, **dict(zip(names, setting, strict=True)))


def at_rest(config: _C) -> _C:
    """The config with every knob at its default."""
    resting = {name: default for name, default, _ in _knobs(type(config))}
    return replace(config, **resting) if resting else config


def words(config: Config) -> list[str]:
    """The words of the knobs that are turned, with the value where a knob has several others."""
    return [
        found.word if len(found.others) == 1 else f"{found.word}-{value}"
        for name, default, found in _knobs(type(config))
        if (value := getattr(config, name)) != default
    ]


def values(of: Any) -> dict[str, Any]:
    """All fields of a config, or of another dataclass, by name, for a template's context."""
    return {each.name: getattr(of, each.name) for each in fields(of)}
