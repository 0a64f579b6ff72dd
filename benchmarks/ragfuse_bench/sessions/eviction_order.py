"""Items in eviction order, maintained while they change: each change costs O(log n).

The order is the one that `ragfuse.plan.evict.ConversationEvictor` sorts by. Not thread-safe: the
owner holds a lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator

from ragfuse.plan.evict import EvictionItem, Rank

_SLACK = 64


class EvictionOrder:
    """Items by name, in the eviction order of a policy.

    Args:
        rank: The policy.

    Attributes:
        nbytes: Bytes of all items.
    """

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
        """Return the item of a name; None where there is none."""
        return self._items.get(name)

    def put(self, item: EvictionItem) -> None:
        """Add an item, or replace the item of the same name."""
        before = self._items.get(item.name)
        self.nbytes += item.nbytes - (before.nbytes if before is not None else 0)
        self._items[item.name] = item
        self._push(item)

    def drop(self, name: Hashable) -> EvictionItem | None:
        """Remove the item of a name and return it; None where there is none."""
        item = self._items.pop(name, None)
        if item is not None:
            self.nbytes -= item.nbytes
            del self._stamps[name]
        return item

    def wait(self, name: Hashable, place: float | None) -> None:
        """Set the queue position of the first job that waits for an item.

        Args:
            name: Its name; the item may be added later.
            place: The position, which grows from the head of the queue to its tail; None: no job
                waits any more.
        """
        if place is None:
            self._places.pop(name, None)
        else:
            self._places[name] = place
        if name in self._items:
            self._push(self._items[name])

    def first(self) -> EvictionItem | None:
        """Return the item to evict next; None where there are no items."""
        while self._heap:
            _, stamp, name = self._heap[0]
            if self._stamps.get(name) == stamp:
                return self._items[name]
            heapq.heappop(self._heap)
        return None

    def pops(self) -> Iterator[EvictionItem]:
        """Remove and yield items in eviction order, one per step of the iteration."""
        while (item := self.first()) is not None:
            self.drop(item.name)
            yield item

    def _push(self, item: EvictionItem) -> None:
        self._stamp += 1
        self._stamps[item.name] = self._stamp
        heapq.heappush(
            self._heap, (self._rank(item, self._places.get(item.name)), self._stamp, item.name)
        )
        if len(self._heap) > 4 * len(self._items) + _SLACK:
            self._heap = [entry for entry in self._heap if self._stamps.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
