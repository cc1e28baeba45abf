"""Prefix trees: which keys a batch's requests share, and which of them are read once for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        """Of each request its nodes from the root down; an empty path shares nothing."""
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
        """Of block tables on the host: requests share the pages with which their rows begin.

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
        """Of each node the position behind its last key."""
        found: list[int] = []
        for parent, keys in zip(self.parents, self.keys, strict=True):
            found.append(keys + (found[parent] if parent >= 0 else 0))
        return found

    def below(self) -> list[tuple[int, ...]]:
        """Of each node the requests whose paths hold it, in their order."""
        found: list[list[int]] = [[] for _ in self.parents]
        for request, node in enumerate(self.requests):
            for each in self.path(node):
                found[each].append(request)
        return [tuple(each) for each in found]


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What reading costs, in bytes of device memory's traffic.

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
        """Of keys that requests read together."""
        tiles = -(-requests // self.rows)
        return keys * self.key * (1 + self.again * (tiles - 1)) + requests * self.state


@dataclass(frozen=True, slots=True)
class SharedRead:
    """Keys [first, end) on the path to a node, read once for the requests below it."""

    node: int
    first: int
    end: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeReads:
    """What is read once, and from which key on each request reads alone.

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
