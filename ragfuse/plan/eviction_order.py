"""What is kept, in the order in which a policy drops it, as it changes: each change costs the logarithm of how many.

The order is `ragfuse.plan.evict`'s, the same that an `Evictor` sorts by; who needs it kept over many small changes has
it here. Not thread-safe: its owner has a lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator

from ragfuse.plan.eviction_item import EvictionItem, Rank

_SLACK = 64


class EvictionOrder:
    """Items by name, and who of them goes first. `nbytes`: of all together."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._items: dict[Hashable, EvictionItem] = {}
        self._places: dict[Hashable, float] = {}
        self._stamps: dict[Hashable, int] = {}
        self._heap: list[tuple[tuple[int, float], int, Hashable]] = []
        self._stamp = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __getitem__(self, name: Hashable) -> EvictionItem:
        return self._items[name]

    def get(self, name: Hashable) -> EvictionItem | None:
        """The item of that name; None if it is not kept."""
        return self._items.get(name)

    def put(self, item: EvictionItem) -> None:
        """Keep this, in place of what had its name."""
        before = self._items.get(item.name)
        self.nbytes += item.nbytes - (before.nbytes if before is not None else 0)
        self._items[item.name] = item
        self._push(item)

    def drop(self, name: Hashable) -> EvictionItem | None:
        """Keep it no longer; what it was, None if it was not kept."""
        item = self._items.pop(name, None)
        if item is not None:
            self.nbytes -= item.nbytes
            del self._stamps[name]
        return item

    def wait(self, name: Hashable, place: float | None) -> None:
        """A job waits for it at this place, a number that grows towards the queue's tail; None: none does any more.

        It may be said of what is not kept, and holds when it comes.
        """
        if place is None:
            self._places.pop(name, None)
        else:
            self._places[name] = place
        if name in self._items:
            self._push(self._items[name])

    def first(self) -> EvictionItem | None:
        """Who goes first; None where nothing is kept."""
        while self._heap:
            _, stamp, name = self._heap[0]
            if self._stamps.get(name) == stamp:
                return self._items[name]
            heapq.heappop(self._heap)
        return None

    def pops(self) -> Iterator[EvictionItem]:
        """Drops one after the other, as far as it is read."""
        while (item := self.first()) is not None:
            self.drop(item.name)
            yield item

    def _push(self, item: EvictionItem) -> None:
        self._stamp += 1
        self._stamps[item.name] = self._stamp
        heapq.heappush(self._heap, (self._rank(item, self._places.get(item.name)), self._stamp, item.name))
        if len(self._heap) > 4 * len(self._items) + _SLACK:
            self._heap = [entry for entry in self._heap if self._stamps.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
