"""Prefix trees as servers have them, what of them is read once, and the tables of that."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from flexattn.errors import InputError
from flexattn.serving.tree import PrefixTree, ReadCost, SharedRead, TreeTables, choose_reads
from tests.trees import EVERY

COST = ReadCost(key=4096, state=40_000, rows=16, again=0.5, fixed=1_000_000)


@st.composite
def trees(draw, most=7):
    nodes = draw(st.integers(0, most))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(nodes))
    keys = tuple(draw(st.integers(1, 400)) * 16 for _ in range(nodes))
    requests = draw(st.lists(st.integers(-1, nodes - 1), max_size=9))
    return PrefixTree(parents, keys, tuple(requests))


costs = st.builds(
    ReadCost,
    key=st.integers(1, 5000),
    state=st.integers(0, 10**6),
    rows=st.integers(1, 8),
    again=st.floats(0, 1),
    fixed=st.sampled_from([0, 10**5, 10**7]),
)


def bytes_of(tree, cost, once):
    """What reading these nodes once costs, by its definition, and the most reads of a path."""
    ends, below, depth, total = tree.ends(), tree.below(), 0, 0
    for node in once:
        above = [each for each in tree.path(node)[:-1] if each in once]
        first = ends[above[-1]] if above else 0
        total += cost.shared(ends[node] - first, len(below[node]))
    for node in tree.requests:
        if node >= 0:
            above = [each for each in tree.path(node) if each in once]
            depth = max(depth, len(above))
            total += (ends[node] - (ends[above[-1]] if above else 0)) * cost.key
    return total + cost.fixed * bool(once), depth


@settings(max_examples=80)
@given(trees(), costs, st.integers(0, 3))
def test_no_other_choice_reads_less(tree, cost, levels):
    found = choose_reads(tree, cost, levels)
    every = [
        [node for node, taken in enumerate(choice) if taken]
        for choice in product((False, True), repeat=len(tree.parents))
    ]
    sums = [bytes_of(tree, cost, once) for once in every]
    least = min(total for total, depth in sums if depth <= levels)
    assert found.cost == pytest.approx(least)
    assert found.cost <= found.flat == pytest.approx(bytes_of(tree, cost, [])[0])
    assert bytes_of(tree, cost, [each.node for each in found.shared])[0] == pytest.approx(least)


@settings(max_examples=80)
@given(trees(most=12), costs, st.integers(1, 4))
def test_every_key_of_a_path_is_read_once_for_each_request(tree, cost, levels):
    found, ends = choose_reads(tree, cost, levels), tree.ends()
    for request, node in enumerate(tree.requests):
        at = 0
        reads = [each for each in found.shared if request in each.requests]
        assert len(reads) <= levels
        for each in reads:
            assert each.first == at and each.node in tree.path(node)
            at = each.end
        assert found.starts[request] == at <= (ends[node] if node >= 0 else 0)
    # Laminar sets of two requests and more: a plan has places for batch - 1 of them.
    assert len(found.shared) <= max(0, len(tree.requests) - 1)
    assert all(len(each.requests) > 1 for each in found.shared)


def test_a_system_prompt_tools_and_conversations():
    tree = PrefixTree.from_paths(
        [(0, 1), (0, 1), (0, 2), (0, 2), (0,), ()], (-1, 0, 0), (8192, 4096, 16)
    )
    found = choose_reads(tree, COST, 4)
    # 16 keys are not worth a state: who shares them reads them twice.
    assert found.shared == (
        SharedRead(0, 0, 8192, (0, 1, 2, 3, 4)), SharedRead(1, 8192, 12288, (0, 1))
    )  # fmt: skip
    assert found.starts == (12288, 12288, 8192, 8192, 8192, 0)
    assert str(found).splitlines() == [
        "keys 0 to 8191 (node 0) are read once for 5 requests",
        "keys 8192 to 12287 (node 1) are read once for 2 requests",
        "requests that read all of their keys themselves: 1",
        "estimated traffic of the shared keys: 51.74 MB instead of 201.46 MB a layer",
    ]


def test_a_short_root_is_read_with_what_follows_it():
    """Rather than read for all, with a state of each, or by each request alone."""
    tree = PrefixTree((-1, 0, 0), (16, 4096, 4096), (1, 1, 2, 2))
    found = choose_reads(tree, COST, 4)
    assert [(each.first, each.end) for each in found.shared] == [(0, 4112), (0, 4112)]
    assert found.starts == (4112,) * 4


def test_launches_are_a_price_too():
    tree = PrefixTree((-1,), (16,), (0,) * 8)
    assert choose_reads(tree, replace(COST, state=1000), 4).shared == ()
    assert choose_reads(tree, replace(COST, state=1000, fixed=0), 4).shared != ()


@pytest.mark.parametrize("page", [1, 4])
def test_tables_that_begin_alike(page):
    tables = [[7, 8, 9, 1], [7, 8, 9, 2], [7, 8, 3, 4], [5, 6, 0, 0], [7, 8, 9, 2]]
    tree = PrefixTree.from_tables(
        tables, [4 * page, 4 * page, 3 * page + 1, 2 * page, 4 * page - 1], page
    )
    by_request = [[tree.keys[n] for n in tree.path(node)] for node in tree.requests]
    shared = [2 * page, page]
    # The last page of each is its own, where it writes.
    last = shared if page > 1 else [2 * page]
    assert by_request == [shared, shared, [2 * page], [], last]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=7))
def test_a_tree_of_tables_has_what_pairs_share(tables):
    rows = [[(tuple(table[: i + 1])) for i in range(len(table))] for table in tables]
    numbers = {page: i for i, page in enumerate({each for row in rows for each in row})}
    rows = [[numbers[each] for each in row] for row in rows]
    lengths = [4 * len(row) for row in rows]
    tree, ends = PrefixTree.from_tables(rows, lengths, 4), None
    ends = tree.ends()
    for a, row in enumerate(rows):
        shared = 0
        for b, other in enumerate(rows):
            both = zip(row[:-1], other[:-1], strict=False)
            same = next(
                (i for i, (x, y) in enumerate(both) if x != y), min(len(row), len(other)) - 1
            )
            shared = max(shared, same * (a != b))
        assert (ends[tree.requests[a]] if tree.requests[a] >= 0 else 0) == 4 * shared


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: PrefixTree((0,), (16,), ()), "node 0 continues node 0"),
        (lambda: PrefixTree((-1, 2, 0), (16,) * 3, ()), "node 1 continues node 2"),
        (lambda: PrefixTree((-1,), (0,), ()), "node 0 has 0 keys"),
        (lambda: PrefixTree((-1,), (), ()), "1 parents and 0"),
        (lambda: PrefixTree((-1,), (16,), (1,)), "request 0 continues node 1"),
        (lambda: PrefixTree.from_paths([(1,)], (-1, 0), (16, 16)), "path of request 0"),
    ],
)
def test_what_is_no_tree_is_refused(made, said):
    with pytest.raises(InputError, match=said):
        made()


@settings(max_examples=60)
@given(trees(), st.integers(1, 3), st.integers(1, 3))
def test_rows_of_reads_and_of_queries_are_the_same(tree, q_len, levels):
    count = len(tree.requests)
    tables = TreeTables(max(1, count), q_len, levels)
    found = choose_reads(tree, EVERY, levels)
    row = torch.tensor(tables.filled(found))
    at = {name: each.tolist() for name, each in tables.views(row).items()}
    assert all(start.start % 4 == 0 for start in tables.spans().values())
    assert {name: len(each) for name, each in at.items()} == tables.sizes()
    assert at["row_ends"] == sorted(at["row_ends"]) and at["row_ends"][0] == 0
    slots = [at["slots"][i * levels : (i + 1) * levels] for i in range(count * q_len)]
    for i, read in enumerate(found.shared):
        rows = range(at["row_ends"][i], at["row_ends"][i + 1])
        queries = [r * q_len + p for r in read.requests for p in range(q_len)]
        assert at["gather"][rows.start : rows.stop] == queries
        assert (at["begins"][i], at["ends"][i]) == (read.first, read.end)
        for place, query in zip(rows, queries, strict=True):
            assert place in slots[query]
        # As the kernel has it: the last row stands at the last key, or the first one at key 0.
        past = max(read.end - len(rows), 0)
        assert at["before"][i] + past == rows.start
    for query, mine in enumerate(slots):
        taken = [slot for slot in mine if slot >= 0]
        assert mine == taken + [-1] * (levels - len(taken))
        assert len(taken) == sum(query // q_len in read.requests for read in found.shared)
    assert sum(slot >= 0 for each in slots for slot in each) == at["row_ends"][-1]


@pytest.mark.parametrize(("lengths", "page"), [([5, 5], 0), ([5], 2)])
def test_tables_without_pages_or_lengths_are_refused(lengths, page):
    with pytest.raises(InputError, match="a table and a length"):
        PrefixTree.from_tables([[1, 2, 3], [1, 2, 4]], lengths, page)
