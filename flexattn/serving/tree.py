"""Prefix trees: what requests share, which of it is read once, and the tables of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from flexattn.errors import InputError


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Keys that requests have in common: a system prompt, below it tools, conversations, branches.

    parents: of each node the node that it continues, of a lower number; -1 where it begins at
    position 0. keys: of each node alone, which need not be whole pages. requests: the node whose
    last key each request continues with keys of its own; -1 where it shares nothing. Raises
    InputError for what is no tree.
    """

    parents: tuple[int, ...]
    keys: tuple[int, ...]
    requests: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.keys):
            raise InputError(
                f"{len(self.parents)} parents and {len(self.keys)} numbers of keys",
                "each node has a parent and a number of keys",
            )
        for node, (parent, keys) in enumerate(zip(self.parents, self.keys, strict=True)):
            if not -1 <= parent < node:
                raise InputError(
                    f"node {node} continues node {parent}",
                    "a parent has a lower number than its node, or is -1",
                    "number the nodes from the root down",
                )
            if keys < 1:
                raise InputError(f"node {node} has {keys} keys", "a node has at least 1")
        for request, node in enumerate(self.requests):
            if not -1 <= node < len(self.parents):
                raise InputError(
                    f"request {request} continues node {node}",
                    f"nodes are 0 to {len(self.parents) - 1}, or -1 for none",
                )

    @classmethod
    def from_paths(
        cls, paths: Sequence[Sequence[int]], parents: Sequence[int], keys: Sequence[int]
    ) -> PrefixTree:
        """A tree of each request's nodes from the root down; an empty path shares nothing."""
        tree = cls(tuple(parents), tuple(keys), tuple(path[-1] if path else -1 for path in paths))
        for request, path in enumerate(paths):
            wanted = tuple(tree.path(tree.requests[request]))
            if tuple(path) != wanted:
                raise InputError(
                    f"the path of request {request} is {list(path)}",
                    f"parents lead to its last node by {list(wanted)}",
                )
        return tree

    @classmethod
    def from_tables(
        cls, tables: Sequence[Sequence[int]], lengths: Sequence[int], page: int
    ) -> PrefixTree:
        """A tree of block tables on the host: requests share the pages with which their rows
        begin.

        lengths: keys of each request. Its last page is its own: that is where it writes.
        """
        if page < 1 or len(tables) != len(lengths):
            raise InputError(
                f"{len(tables)} tables, {len(lengths)} lengths, page={page}",
                "each request has a table and a length, and a page at least one key",
            )
        rows = [
            tuple(int(each) for each in table[: max(0, length - 1) // page])
            for table, length in zip(tables, lengths, strict=True)
        ]
        parents: list[int] = []
        keys: list[int] = []
        requests = [-1] * len(rows)

        groups = [(list(range(len(rows))), 0, -1)]
        while groups:
            group, depth, parent = groups.pop()
            by_page: dict[int, list[int]] = {}
            for request in group:
                if len(rows[request]) > depth:
                    by_page.setdefault(rows[request][depth], []).append(request)
            for below in by_page.values():
                if len(below) == 1:
                    continue
                first, last = rows[below[0]], min(len(rows[each]) for each in below)
                end = depth + 1
                while end < last and all(rows[each][end] == first[end] for each in below):
                    end += 1
                node = len(parents)
                parents.append(parent)
                keys.append((end - depth) * page)
                for request in below:
                    requests[request] = node
                groups.append((below, end, node))
        return cls(tuple(parents), tuple(keys), tuple(requests))

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to a node; of -1 none."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def ends(self) -> list[int]:
        """The position behind the last key of each node."""
        found: list[int] = []
        for parent, keys in zip(self.parents, self.keys, strict=True):
            found.append(keys + (found[parent] if parent >= 0 else 0))
        return found

    def below(self) -> list[tuple[int, ...]]:
        """The requests whose paths hold each node, in their order."""
        found: list[list[int]] = [[] for _ in self.parents]
        for request, node in enumerate(self.requests):
            for each in self.path(node):
                found[each].append(request)
        return [tuple(each) for each in found]


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The cost of reads, in bytes of device memory's traffic.

    key: of K and V of one key. state: of one request's state over keys that are read once: its
    queries are gathered, its outputs are written, and read where states are merged. rows: of
    requests that one tile of queries holds. again: the share of a key's bytes that each further
    tile of queries takes, which mostly finds it in the L2 cache. fixed: of the launches that
    gather and merge, as the bytes that memory moves meanwhile.
    """

    key: int
    state: int
    rows: int
    again: float
    fixed: int

    def shared(self, keys: int, requests: int) -> float:
        """The cost of keys that requests read together."""
        tiles = -(-requests // self.rows)
        return keys * self.key * (1 + self.again * (tiles - 1)) + requests * self.state


class SharedRead(NamedTuple):
    """Keys [first, end) on the path to a node, read once for the requests below it."""

    node: int
    first: int
    end: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeReads:
    """The keys that are read once, and the key from which on each request reads alone.

    shared: in the order of the nodes, so a request's are in the order of their keys. starts: of
    each request the first key that it reads itself. cost, flat: bytes by a ReadCost, of this and
    of reading nothing together; keys behind the tree are in neither.
    """

    shared: tuple[SharedRead, ...]
    starts: tuple[int, ...]
    cost: float
    flat: float

    def __str__(self) -> str:
        lines = [
            f"keys {each.first} to {each.end - 1} (node {each.node}) are read once for "
            f"{len(each.requests)} requests"
            for each in self.shared
        ]
        alone = sum(start == 0 for start in self.starts)
        if alone:
            lines.append(f"requests that read all of their keys themselves: {alone}")
        said = f"{self.cost / 1e6:.2f} MB instead of {self.flat / 1e6:.2f} MB a layer"
        return "\n".join([*lines, f"estimated traffic of the shared keys: {said}"])


def choose_reads(tree: PrefixTree, cost: ReadCost, levels: int) -> TreeReads:
    """The cheapest way to read a tree, by a cost; levels: the most shared reads of one request.

    A node's keys are read once for the requests below it, together with the nodes above it that
    are not; or they are left to its children, and in the end to its requests. That leaves each
    request one run of keys. Exact: for each node, the end of the last shared read above it, and
    the reads that are left, the best of both ways (a dynamic program over the tree).
    """
    below, ends = tree.below(), tree.ends()
    nodes = range(len(ends))
    # Of each node: where the keys that it may read begin, by the last shared read above it.
    begins = [[0, *(ends[each] for each in tree.path(node)[:-1])] for node in nodes]
    children: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        if tree.parents[node] >= 0:
            children[tree.parents[node]].append(node)
    here = [sum(each == node for each in tree.requests) for node in nodes]
    # The least bytes of what is at and below a node, and whether its keys are read once.
    best: dict[tuple[int, int, int], tuple[float, bool]] = {}

    def rest(node: int, first: int, left: int) -> float:
        alone = here[node] * (ends[node] - first) * cost.key
        return alone + sum(best[child, first, left][0] for child in children[node])

    for node in reversed(nodes):
        for first in begins[node]:
            for left in range(levels + 1):
                apart, once = rest(node, first, left), math.inf
                if left and len(below[node]) > 1:
                    once = cost.shared(ends[node] - first, len(below[node]))
                    once += rest(node, ends[node], left - 1)
                best[node, first, left] = min(apart, once), once < apart

    flat = float(sum(ends[node] for node in tree.requests if node >= 0) * cost.key)
    roots = [node for node in nodes if tree.parents[node] < 0]
    together = cost.fixed + sum(best[root, 0, levels][0] for root in roots)
    starts = [0] * len(tree.requests)
    if together >= flat:
        return TreeReads((), tuple(starts), flat, flat)
    shared = []
    above: list[tuple[int, int]] = []
    for node, parent in enumerate(tree.parents):
        first, left = above[parent] if parent >= 0 else (0, levels)
        if best[node, first, left][1]:
            shared.append(SharedRead(node, first, ends[node], below[node]))
            first, left = ends[node], left - 1
        above.append((first, left))
    for request, node in enumerate(tree.requests):
        starts[request] = above[node][0] if node >= 0 else 0
    return TreeReads(tuple(shared), tuple(starts), together, flat)


# Numbers of a table are rounded up to so many: 16 bytes.
_ALIGNED = 4


class TreeTables(NamedTuple):
    """The tables of any tree that a plan serves, by the plan's m.

    A shared read is a request of the first launch, whose rows are those of all requests below it,
    one request after the other. starts [batch]: the first key that a request reads itself. begins,
    ends [reads]: keys of a shared read. before [reads]: the row of its first query less the
    position at which the kernel places it. row_ends [reads + 1]: its rows, as cu_seqlens_q. gather
    [rows]: of each row, the query's place among requests x query positions. slots [batch x q_len,
    levels]: of each query its rows, in the order of their keys, -1 where there are fewer.
    """

    batch: int
    q_len: int
    levels: int

    @property
    def reads(self) -> int:
        """The most shared reads: their requests are nested sets of at least two."""
        return max(1, self.batch - 1)

    @property
    def rows(self) -> int:
        """The most rows of all shared reads."""
        return self.levels * self.batch * self.q_len

    def sizes(self) -> dict[str, int]:
        """Numbers of each table, by its name."""
        reads = self.reads
        return {
            "starts": self.batch,
            "begins": reads,
            "ends": reads,
            "before": reads,
            "row_ends": reads + 1,
            "gather": self.rows,
            "slots": self.rows,
        }

    def spans(self) -> dict[str, slice]:
        """The place of each table in the row."""
        sizes = self.sizes()
        ends = accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values())
        starts = [0, *ends]
        return {
            name: slice(start, start + size)
            for (name, size), start in zip(sizes.items(), starts, strict=False)
        }

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """The tables in a tensor that holds the row."""
        return {name: row[span] for name, span in self.spans().items()}

    def filled(self, found: TreeReads) -> list[int]:
        """The row for what was chosen; what a tree leaves empty has no rows and no keys."""
        spans = self.spans()
        row = [0] * spans["slots"].stop
        slots = [[-1] * self.levels for _ in range(self.batch * self.q_len)]
        taken = [0] * self.batch
        begins, ends, before, row_ends, gather = [], [], [], [0], []  # type: ignore[var-annotated]
        for read in found.shared:
            rows = len(read.requests) * self.q_len
            begins.append(read.first)
            ends.append(read.end)
            # The last of a launch's rows stands at its last key, or the first one at key 0.
            before.append(len(gather) - max(read.end - rows, 0))
            for request in read.requests:
                for place in range(request * self.q_len, (request + 1) * self.q_len):
                    slots[place][taken[request]] = len(gather)
                    gather.append(place)
                taken[request] += 1
            row_ends.append(len(gather))
        row_ends += [len(gather)] * (self.reads + 1 - len(row_ends))
        tables = {
            "starts": found.starts, "begins": begins, "ends": ends, "before": before,
            "row_ends": row_ends, "gather": gather,
            "slots": [slot for each in slots for slot in each],
        }  # fmt: skip
        for name, numbers in tables.items():
            start = spans[name].start
            row[start : start + len(numbers)] = numbers
        return row


_Mod = Callable[..., Any]


def from_first(first: Tensor, mask_mod: _Mod | None) -> _Mod:
    """A mask of the keys from first[b] on, which bounds the loop over a request's keys."""
    if mask_mod is None:
        return lambda b, h, q_idx, kv_idx: kv_idx >= first[b]
    return lambda b, h, q_idx, kv_idx: (kv_idx >= first[b]) & mask_mod(b, h, q_idx, kv_idx)


@dataclass(frozen=True, slots=True)
class Places:
    """The query of each row of the launch over shared keys, where `b` is a shared read.

    gather, before: of TreeTables. lens int32 [batch]: keys of each request. q_len: query positions
    of each, of which the last one stands at its last key.
    """

    gather: Tensor
    before: Tensor
    lens: Tensor
    q_len: int

    def __call__(self, b: Any, q_idx: Any) -> tuple[Any, Any]:
        """The request of a row, and the position of its query there."""
        query = self.gather[self.before[b] + q_idx]
        request = query // self.q_len
        return request, (self.lens[request] - self.q_len).clamp(min=0) + query % self.q_len


def placed_score(places: Places, score_mod: _Mod) -> _Mod:
    """A score_mod of requests and positions, for that launch."""

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        request, position = places(b, q_idx)
        return score_mod(score, request, h, position, kv_idx)

    return score


def placed_mask(places: Places, mask_mod: _Mod) -> _Mod:
    """A mask_mod of requests and positions, for that launch."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        request, position = places(b, q_idx)
        return mask_mod(request, h, position, kv_idx)

    return mask
