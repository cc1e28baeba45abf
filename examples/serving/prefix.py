"""Prefixes that requests share: names of full pages, and who could be decoded in one cascade."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def page_keys(tokens: Sequence[int], size: int, begin: bytes) -> Iterator[bytes]:
    """A name for each full page of `size` tokens, of its own and all tokens before it.

    begin: the name of what comes before the first one: the page before, or the owner's salt.
    """
    for first in range(0, len(tokens) - size + 1, size):
        text = array("i", tokens[first : first + size]).tobytes()
        begin = hashlib.blake2b(text, digest_size=16, key=begin).digest()
        yield begin


@dataclass(frozen=True)
class Shared:
    """A prefix in pages, and which of the requests that were asked about begin with it."""

    pages: tuple[int, ...]
    members: frozenset[int]


def most_shared(tables: Sequence[Sequence[int]]) -> Shared | None:
    """The prefix whose pages would be read the most times over; None where none is shared.

    tables: full pages of each request, from the first one on. Two requests that hold one page have
    the same tokens up to its end, for it was found by them.
    """
    holders = Counter((depth, page) for pages in tables for depth, page in enumerate(pages))
    best = max(holders, key=lambda at: ((holders[at] - 1) * (at[0] + 1), at), default=None)
    if best is None or holders[best] < 2:
        return None
    depth, page = best
    members = frozenset(i for i, pages in enumerate(tables) if pages[depth : depth + 1] == [page])
    return Shared(tuple(tables[min(members)][: depth + 1]), members)
