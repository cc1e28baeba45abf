"""Pages of the example server: none is lost, and none is given to two that did not ask for it."""

import pytest
from hypothesis import given, settings, strategies as st

from examples.serving.pages import Pages
from examples.serving.prefix import most_shared, page_keys

MOVES = st.lists(
    st.tuples(st.sampled_from(["admit", "publish", "end"]), st.integers(0, 5), st.integers(0, 9)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(MOVES)
def test_every_page_is_free_cached_or_held_by_those_who_were_given_it(moves):
    """Requests whose pages have the names of a prompt's beginning are admitted, fill them, end."""
    pages, held = Pages(9), []
    for move, which, amount in moves:
        if move == "admit":
            keys = [bytes([which % 3, depth]) for depth in range(amount // 2)]
            found = pages.match(keys)
            needed = 1 + amount % 3
            if not pages.can_take(needed, found):
                continue
            pages.hold(found)
            held.append((keys, found + pages.take(needed)))
        elif held and move == "publish":
            keys, each = held[which % len(held)]
            for page, key in zip(each, keys, strict=False):
                pages.publish(page, key)
        elif held:
            pages.give(held.pop(which % len(held))[1])
        users = {p: sum(p in each for _, each in held) for p in range(1, 9)}
        assert {p for p, count in users.items() if count} == set(pages._holders)
        assert all(pages._holders[p] == count for p, count in users.items() if count)
        rest = [*pages._free, *pages._cached]
        assert sorted([*rest, *pages._holders]) == list(range(1, 9))
        assert pages.available + pages.used == pages.usable
        assert {p for p in users if pages.shared(p)} == {p for p in users if users[p] > 1}
        assert set(pages._cached) <= set(pages._key_of)
        assert {page: key for key, page in pages._page_of.items()} == pages._key_of
    for _, each in held:
        pages.give(each)
    assert pages.available == pages.usable and not pages.used


def test_what_nobody_has_cannot_be_taken_or_given_back():
    pages = Pages(3)
    mine = pages.take(2)
    with pytest.raises(ValueError, match="1 pages are asked for, 0 are available"):
        pages.take(1)
    pages.give(mine)
    with pytest.raises(ValueError, match="nobody holds it"):
        pages.give(mine[:1])


def test_cached_pages_go_last_and_the_one_used_longest_ago_first():
    pages = Pages(5)
    first, second = pages.take(1), pages.take(1)
    pages.publish(first[0], b"first")
    pages.publish(second[0], b"second")
    pages.give(second)
    pages.give(first)
    assert pages.cached == 2 and pages.available == 4
    assert not set(pages.take(2)) & {*first, *second}
    assert pages.take(1) == second
    assert pages.match([b"second"]) == [] and pages.match([b"first", b"second"]) == first
    # A page that is about to be held can no longer be taken.
    assert pages.can_take(1) and not pages.can_take(1, first)


def test_of_two_pages_with_one_name_the_first_is_found():
    pages = Pages(4)
    one, other = pages.take(2)
    pages.publish(one, b"key")
    pages.publish(other, b"key")
    assert pages.match([b"key"]) == [one]
    pages.give([one, other])
    assert pages.cached == 1 and pages.available == 3


def test_a_page_is_named_by_all_tokens_up_to_its_end():
    names = list(page_keys(range(11), 4, b""))
    assert len(names) == 2 and len(set(names)) == 2
    assert list(page_keys([*range(8), 99], 4, b"")) == names
    changed = list(page_keys([9, *range(1, 8)], 4, b""))
    assert not set(changed) & set(names)
    assert not set(page_keys(range(11), 4, b"salt")) & set(names)
    # Names go on from the one before.
    assert list(page_keys(range(4, 8), 4, names[0])) == names[1:]


def test_the_prefix_that_saves_most_reads_is_the_one_of_a_cascade():
    tables = [[1, 2, 3], [1, 2, 9], [1, 4], [5], [1, 2, 3]]
    found = most_shared(tables)
    assert found.pages == (1, 2, 3) or found.pages == (1, 2)
    assert found.members == {0, 1, 4} and found.pages == (1, 2)
    assert most_shared([[1], [2], []]) is None and most_shared([]) is None
