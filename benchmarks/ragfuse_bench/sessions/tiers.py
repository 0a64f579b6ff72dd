"""Memory and disk as a simulated store has them: conversations by bytes, kept by ragfuse's own
policies.

Who goes is `ragfuse.plan.evict`'s order, held by an `EvictionOrder`; what is fetched is
`ragfuse.plan.controller`'s. A conversation is in one tier: it goes from memory to disk, and from
disk out of the system.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Literal

from ragfuse_bench.sessions.eviction_order import EvictionOrder
from ragfuse_bench.sessions.windows import buffer_excess, taken_until

from ragfuse.plan.controller import to_prefetch
from ragfuse.plan.evict import EvictionItem, Rank

Where = Literal["ram", "disk"]


class Tiers:
    """Conversations in memory and on disk. free_share: of memory, which eviction keeps free."""

    def __init__(self, rank: Rank, memory_bytes: int, disk_bytes: int, free_share: float) -> None:
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self._free_share = free_share
        self.memory, self.disk = EvictionOrder(rank), EvictionOrder(rank)

    @property
    def mean_bytes(self) -> float:
        """S_kv: of a conversation on average; 0 where none is kept."""
        kept = len(self.memory) + len(self.disk)
        return (self.memory.nbytes + self.disk.nbytes) / kept if kept else 0.0

    def find(self, name: Hashable) -> Where | None:
        """Where it is; None: nowhere."""
        tier = self.memory if name in self.memory else self.disk
        return None if name not in tier else "ram" if tier is self.memory else "disk"

    def use(self, name: Hashable, now_s: float) -> None:
        """It is used where it is."""
        for tier in (self.memory, self.disk):
            item = tier.get(name)
            if item is not None:
                tier.put(EvictionItem(name, (), item.nbytes, now_s, item.arrived))

    def save(self, name: Hashable, nbytes: int, now_s: float) -> None:
        """Its KV comes from the GPU to memory, in place of what was kept of it."""
        before = self.memory.drop(name) or self.disk.drop(name)
        self.memory.put(
            EvictionItem(name, (), nbytes, now_s, before.arrived if before is not None else now_s)
        )
        self._make_room()

    def fetch(self, name: Hashable) -> None:
        """What was read ahead is in memory now; nothing where it is on disk no longer."""
        item = self.disk.drop(name)
        if item is not None:
            self.memory.put(item)
            self._make_room()

    def wait(self, name: Hashable, place: float | None) -> None:
        """A job waits for it at this place; None: none does any more."""
        self.memory.wait(name, place)
        self.disk.wait(name, place)

    def wanted(self, waiting: Iterable[Hashable]) -> Iterator[Hashable]:
        """What to fetch for those that wait, in their order."""
        room = int(self.memory_bytes * (1 - self._free_share))
        found = (
            (name, self.memory.get(name) or self.disk.get(name)) for name in dict.fromkeys(waiting)
        )
        sized = ((name, item.nbytes) for name, item in found if item is not None)
        return (name for name in to_prefetch(sized, room) if name not in self.memory)

    def _make_room(self) -> None:
        """From memory to disk until its buffer is free, and from disk away until all fits."""
        _clear(
            self.memory,
            buffer_excess(self.memory.nbytes, self.memory_bytes, self._free_share),
            self.disk.put,
        )
        _clear(self.disk, buffer_excess(self.disk.nbytes, self.disk_bytes, 0.0), lambda item: None)


def _clear(tier: EvictionOrder, excess: int, then: Callable[[EvictionItem], None]) -> None:
    for item in taken_until(tier.pops(), excess) if excess else ():
        then(item)
