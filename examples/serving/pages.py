"""Pages of the key-value cache: who holds each, and which hold keys that others can use.

A page is free, held by one or more requests, or cached: full of keys that nobody needs now. Cached
pages are found by the hash of all tokens up to their end, and are the last to be given out anew,
the one that was used longest ago first.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence


class Pages:
    """Pages 1 to count - 1; page 0 is where rows that nobody needs are written."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(1, count))
        self._holders: Counter[int] = Counter()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def usable(self) -> int:
        """All pages that requests can ever hold."""
        return self.count - 1

    @property
    def available(self) -> int:
        """Pages that `take` can give now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and whose keys can still be found."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Pages that some request holds."""
        return len(self._holders)

    def shared(self, page: int) -> bool:
        """Whether several requests hold a page."""
        return self._holders[page] > 1

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of known keys, from the first one on."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def can_take(self, count: int, beside: Sequence[int] = ()) -> bool:
        """Whether `count` pages are left once those `beside` are held."""
        return count <= self.available - sum(page in self._cached for page in beside)

    def hold(self, pages: Iterable[int]) -> None:
        """One holder more of pages that `match` found."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def take(self, count: int) -> list[int]:
        """Pages that nobody else holds. Raises ValueError where there are fewer."""
        if count > self.available:
            raise ValueError(f"{count} pages are asked for, {self.available} are available")
        taken = []
        for _ in range(count):
            page = self._free.popleft() if self._free else self._evicted()
            self._holders[page] = 1
            taken.append(page)
        return taken

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a held page that is full; of two pages with one key the first stays."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def give(self, pages: Iterable[int]) -> None:
        """One holder less of each. Raises ValueError for a page that nobody holds."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is given back, and nobody holds it")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def _evicted(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
