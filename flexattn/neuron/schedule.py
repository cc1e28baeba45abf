"""Which keys each tile of query rows visits, as tuples that a kernel is specialised on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from flexattn.neuron.config import (
    CHUNK,
    NkiConfig,
    row_tiles,
    shape_of,
)
from flexattn.problem import Problem
from flexattn.runtime.launch import Lists

Part = tuple[tuple[object, ...], ...]  # sections, one after the other
Schedule = tuple[Part, ...]  # a part for each physical core
Run = tuple[int, int, bool]  # first key, last key + 1, whether the mask is needed
_Part = tuple[int, int, int]  # place in the tile, keys, chunk of the section
Tile = tuple[int, int, bool, tuple[_Part, ...]]  # first key, keys, masked, parts


@dataclass(frozen=True, slots=True)
class RowTile:
    """One tile of query rows of a head, with the runs of keys that it attends."""

    h: int
    first: int
    count: int
    runs: tuple[Run, ...]


def schedule_of(
    problem: Problem, config: NkiConfig, lists: Lists | None, cores: int = 1
) -> Schedule:
    """Sections of (b, key head, slot, first key, chunks, visits): see prefill.py.jinja.

    Of a decode each split of the keys has its own, and ends each of them: see decode.py.jinja.
    Each core has neighbouring tiles of query rows, of about as many keys as another's.
    """
    block = problem.structure.sparsity.kv_block if problem.structure.sparsity else CHUNK
    blocks = -(-problem.kv_len // block)
    step = -(-blocks // config.num_splits) * block
    tiles, costs = [], []
    for b, g, rows in units(problem, config, lists):
        for split in range(config.num_splits):
            first = min(split * step, problem.kv_len)
            last = min(first + step, problem.kv_len)
            tiles += [((b, g, split, (first, last)), row) for row in rows]
            costs += [_cost(row, first, last) for row in rows]
    parts: list[list[tuple[object, ...]]] = [[] for _ in range(cores)]
    core_of = _shared(costs, cores)
    for (core, (b, g, split, keys)), mine in groupby(
        zip(core_of, tiles, strict=True), lambda each: (each[0], each[1][0])
    ):
        waiting, found = [row for _, (_, row) in mine], parts[core]
        made = _sections(problem, config, b, g, waiting, keys, len(found))
        found += [(*section, split) for section in made] if config.kind == "decode" else made
    return tuple(map(tuple, parts))


def _cost(row: RowTile, first: int, last: int) -> int:
    """The keys of [first, last) that a tile visits, and a chunk for its own loads and results."""
    return CHUNK + sum(max(0, min(end, last) - max(begin, first)) for begin, end, _ in row.runs)


def _shared(costs: list[int], cores: int) -> Iterator[int]:
    """The core of each tile in turn: the one in whose share of the sum its middle lies."""
    total, before = sum(costs), 0
    for cost in costs:
        yield cores * (2 * before + cost) // (2 * total)
        before += cost


def units(
    problem: Problem, config: NkiConfig, lists: Lists | None
) -> Iterator[tuple[int, int, list[RowTile]]]:
    """The tiles of query rows of each batch and key head.

    A head is a query head, or all that are packed into the rows of one tile.
    """
    packed = problem.structure.packed_heads
    heads = problem.Hq // problem.Hkv // packed
    tiles = row_tiles(problem.structure, problem.q_len, config.BLOCK_M)
    known = _Blocks(problem, lists)
    for b in range(problem.B):
        for g in range(problem.Hkv):
            rows = []
            for head in range(g * heads, (g + 1) * heads):
                for first, count in tiles:
                    position = (head * packed + first // problem.q_len, first % problem.q_len)
                    rows.append(RowTile(head, first, count, known.runs(b, *position)))
            yield b, g, rows


def _sections(
    problem: Problem,
    config: NkiConfig,
    b: int,
    g: int,
    rows: list[RowTile],
    keys: tuple[int, int],
    done: int,
) -> Iterator[tuple[object, ...]]:
    """The sections of keys [first, last) for these rows, which wait for the next one in states.

    done: sections before these, whose SBUF buffers alternate.
    """
    shape = shape_of(problem, config)
    block = problem.structure.sparsity.kv_block if problem.structure.sparsity else CHUNK
    starts = list(range(keys[0], keys[1], shape.section)) or [keys[0]]
    single = len(starts) == 1
    step = max(len(rows), 1) if single else shape.states
    for begin in range(0, len(rows), step):
        waiting = rows[begin : begin + step]
        cut = [_chunks(start, min(start + shape.section, keys[1]), block) for start in starts]
        tiles = [[_tiles(each.runs, chunks, config.BLOCK_N) for each in waiting] for chunks in cut]
        for place, start in enumerate(starts):
            visits, used = [], set[int]()
            for state, each in enumerate(waiting):
                mine = tiles[place][state]
                before = any(tiles[other][state] for other in range(place))
                after = any(tiles[other][state] for other in range(place + 1, len(starts)))
                ends = not after and (bool(mine) or (not before and place == len(starts) - 1))
                used |= {part[2] for tile in mine for part in tile[3]}
                if mine or ends:
                    kept = state % 2 if single else state
                    visits.append((each.h, each.first, each.count, kept, not before, ends, mine))
            if visits:
                loads = tuple((*cut[place][chunk], chunk) for chunk in sorted(used))
                yield (b, g, done % config.kv_buffers, start, loads, tuple(visits))
                done += 1


def _chunks(first: int, last: int, block: int) -> list[tuple[int, int]]:
    """(first key, keys): at most 128, and none in two blocks of a mask."""
    found = []
    for start in range(first, last, block):
        end = min(start + block, last)
        found += [(at, min(CHUNK, end - at)) for at in range(start, end, CHUNK)]
    return found


def _tiles(runs: Sequence[Run], chunks: list[tuple[int, int]], width: int) -> tuple[Tile, ...]:
    """The runs inside a section's chunks as tiles of at most `width` keys."""
    tiles: list[Tile] = []
    for begin, end, masked in runs:
        batch: list[int] = []
        for index, (first, count) in enumerate(chunks):
            if not begin <= first < end:
                continue
            if batch and first + count - chunks[batch[0]][0] > width:
                tiles.append(_tile(batch, chunks, masked))
                batch = []
            batch.append(index)
        if batch:
            tiles.append(_tile(batch, chunks, masked))
    return tuple(tiles)


def _tile(batch: list[int], chunks: list[tuple[int, int]], masked: bool) -> Tile:
    start = chunks[batch[0]][0]
    last, count = chunks[batch[-1]]
    parts = tuple((chunks[index][0] - start, chunks[index][1], index) for index in batch)
    return start, last + count - start, masked, parts


class _Blocks:
    """A BlockMask's lists as runs of keys, looked up once for each row of blocks."""

    def __init__(self, problem: Problem, lists: Lists | None) -> None:
        self.problem, self.lists = problem, lists
        self.known: dict[tuple[int, int, int], tuple[Run, ...]] = {}

    def runs(self, b: int, h: int, row: int) -> tuple[Run, ...]:
        """The runs of keys that a query row attends; without lists all of them, by the mask."""
        structure, kv_len = self.problem.structure, self.problem.kv_len
        sparsity = structure.sparsity
        if sparsity is None or self.lists is None:
            return ((0, kv_len, structure.mask is not None),) if kv_len else ()
        lists = self.lists
        key = (b % lists.kv_num.shape[0], h % lists.kv_num.shape[1], row // sparsity.q_block)
        if key not in self.known:
            kinds: dict[int, bool] = {}
            if lists.full_num is not None and lists.full_idx is not None:
                kinds |= dict.fromkeys(_listed(lists.full_num, lists.full_idx, key), False)
            kinds |= dict.fromkeys(_listed(lists.kv_num, lists.kv_idx, key), True)
            self.known[key] = _merged(kinds, sparsity.kv_block, kv_len)
        return self.known[key]


def _listed(counts: object, indices: object, key: Sequence[int]) -> list[int]:
    b, h, row = key
    count = int(counts[b, h, row])  # type: ignore[index]
    return list(indices[b, h, row, :count].tolist())  # type: ignore[index]


def _merged(kinds: dict[int, bool], block: int, kv_len: int) -> tuple[Run, ...]:
    """Neighbouring blocks of one kind as one run."""
    runs: list[Run] = []
    for place in sorted(kinds):
        first, last, masked = place * block, min((place + 1) * block, kv_len), kinds[place]
        if first >= kv_len:
            continue
        if runs and runs[-1][1] == first and runs[-1][2] == masked:
            runs[-1] = (runs[-1][0], last, masked)
        else:
            runs.append((first, last, masked))
    return tuple(runs)
