"""An object tier's cache, in memory, of what the object store holds: sizes, uses, pins, and facts from headers.

It also tracks reserved room and the keys that a thread is changing. Threads may share it. It does no I/O and reads no
clock: `objects.py` and `object_pages.py` pass in what headers and listings say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Condition
from typing import NamedTuple

from ragfuse.store.bucket import Object
from ragfuse.store.sizes import within
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


class HeaderFacts(NamedTuple):
    """The facts about an entry that only its header has, not a listing.

    Args:
        sizes: Bytes of each codec level, in the order in which they are stored.
        n_tokens: Tokens of the chunk.
        n_layers: Layers of the model.
    """

    sizes: Mapping[str, int]
    n_tokens: int
    n_layers: int

    def begin_nbytes(self, count: int) -> int:
        """Estimate the bytes of the first `count` pieces (layers, level after level)."""
        wanted = 0
        for nbytes in self.sizes.values():
            wanted += -(-nbytes * max(0, min(count, self.n_layers)) // self.n_layers)
            count -= self.n_layers
        return wanted


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What is known about one object.

    Args:
        nbytes: Size in bytes.
        last_used: When it was last used, in seconds since the epoch.
        hits: Hits by this process.
        facts: Facts from its header; None until it was read.
        recorded_use: Time of the last use that is recorded in the store, where other processes see it.
    """

    nbytes: int
    last_used: float
    hits: int = 0
    facts: HeaderFacts | None = None
    recorded_use: float = 0.0


class ObjectIndex:
    """The cached state of all objects, by key.

    A thread claims a key while it writes or deletes the object (`claim`). A listing or a header read takes time, so its
    result may be outdated for a key that was claimed meanwhile. `watch` collects these keys as `changed`, and the
    methods that take `changed` or `unless` keep the cached state for them.
    """

    def __init__(self) -> None:
        self._held: dict[ChunkKey, ObjectState] = {}
        self._pinned: set[ChunkKey] = set()
        self._latest = float("-inf")  # upper bound of all `last_used`
        self._condition = Condition()
        self._busy: set[ChunkKey] = set()
        self._watches: dict[int, set[ChunkKey]] = {}
        self._ignored: dict[ChunkKey, int] = {}  # bytes of objects that are no entries despite their names
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all objects, and of the room reserved for those being written."""
        return self._nbytes

    def get(self, key: ChunkKey) -> ObjectState | None:
        """Return the state of one object, None if it is not known."""
        return self._held.get(key)

    def entry(self, key: ChunkKey, tier: str) -> Entry | None:
        """Return an object as an `Entry` of the tier of this name, None unless its header was read."""
        with self._condition:
            held = self._held.get(key)
            if held is None or held.facts is None:
                return None
            encoded, n_tokens, n_layers = held.facts
            sizes = within(encoded, held.nbytes)
            return Entry(key, tier, n_tokens, n_layers, sizes, held.last_used, held.hits, key in self._pinned)

    def oldest(self) -> list[ChunkKey]:
        """Return all keys, least recently used first."""
        with self._condition:
            known = list(self._held.items())
        known.sort(key=lambda item: item[1].last_used)
        return [key for key, _ in known]

    def settle_uses(self, now: float) -> None:
        """Set uses that lie in the future to now: the clock of this or of another machine ran ahead."""
        if now >= self._latest:
            return
        with self._condition:
            self._latest = now
            ahead = [(key, held) for key, held in self._held.items() if held.last_used > now]
            self._held |= {key: replace(held, last_used=now) for key, held in ahead}

    def keys(self) -> set[ChunkKey]:
        """Return all keys."""
        with self._condition:
            return set(self._held)

    def is_busy(self, key: ChunkKey) -> bool:
        """Return whether a thread has claimed this key."""
        return key in self._busy

    def is_pinned(self, key: ChunkKey) -> bool:
        """Return whether this key is protected from eviction."""
        return key in self._pinned

    # changing

    @contextmanager
    def claim(
        self, keys: Iterable[ChunkKey], *, wait: bool = True, unless: Set[ChunkKey] = frozenset()
    ) -> Iterator[set[ChunkKey]]:
        """Claim keys, so that no other thread changes their objects within the `with` block.

        Args:
            keys: The keys.
            wait: Whether to wait for keys that another thread has claimed. If False, they are left out.
            unless: Keys to leave out.

        Yields:
            The keys that were claimed.
        """
        wanted = set(keys)
        with self._condition:
            if wait:
                self._condition.wait_for(lambda: self._busy.isdisjoint(wanted - unless))
            claimed = wanted - self._busy - unless
            self._busy |= claimed
            for changed in self._watches.values():
                changed |= claimed
        try:
            yield claimed
        finally:
            with self._condition:
                self._busy -= claimed
                self._condition.notify_all()

    @contextmanager
    def watch(self) -> Iterator[Set[ChunkKey]]:
        """Collect the keys that are claimed at any time within the `with` block.

        Yields:
            The set of these keys, which grows. What is read from the store about them in the block may be outdated.
        """
        with self._condition:
            changed = set(self._busy)
            self._watches[id(changed)] = changed
        try:
            yield changed
        finally:
            with self._condition:
                del self._watches[id(changed)]

    def reserve(self, nbytes: int, capacity: int) -> int:
        """Reserve room and return 0, or, if that would exceed `capacity`, only return the excess in bytes."""
        with self._condition:
            excess = self._nbytes + nbytes - capacity
            if excess <= 0:
                self._nbytes += nbytes
            return max(0, excess)

    def release(self, nbytes: int) -> None:
        """Release reserved room after a failed write."""
        with self._condition:
            self._nbytes -= nbytes

    def put(self, key: ChunkKey, held: ObjectState) -> None:
        """Note that an object was written into the room reserved for it; hits of an earlier one are kept.

        The caller must have claimed `key`.
        """
        with self._condition:
            self._ignored.pop(key, None)
            old = self._held.pop(key, None)
            self._nbytes -= old.nbytes if old else 0
            self._held[key] = replace(held, hits=old.hits if old else 0)
            self._latest = max(self._latest, held.last_used)

    def forget(self, keys: Iterable[ChunkKey], unless: Set[ChunkKey] = frozenset()) -> int:
        """Forget objects that were deleted, and their pins, except for keys in `unless`; return how many were known."""
        with self._condition:
            known = [key for key in set(keys) - unless if key in self._held]
            for key in known:
                self._nbytes -= self._held.pop(key).nbytes
                self._pinned.discard(key)
            return len(known)

    def ignore(self, key: ChunkKey) -> None:
        """Remove an object that turned out to be no entry. Listings skip it until its size changes."""
        with self._condition:
            held = self._held.pop(key, None)
            if held is not None:
                self._nbytes -= held.nbytes
                self._ignored[key] = held.nbytes

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect objects from eviction, or stop protecting them."""
        with self._condition:
            self._pinned = self._pinned | set(keys) if pinned else self._pinned - set(keys)

    # learning

    def use(self, key: ChunkKey, when: float, *, hit: bool) -> None:
        """Note a use of an object at time `when`, and a hit if `hit` is true."""
        with self._condition:
            held = self._held.get(key)
            if held is not None:
                self._held[key] = replace(held, last_used=when, hits=held.hits + hit)
                self._latest = max(self._latest, when)

    def should_record(self, key: ChunkKey, when: float, every_s: float) -> bool:
        """Return whether to record this use in the store, for other processes to see.

        This is so if the last recorded use is at least `every_s` seconds old. The use then counts as recorded.
        """
        with self._condition:
            held = self._held.get(key)
            if held is None or 0 <= when - held.recorded_use < every_s:
                return False
            self._held[key] = replace(held, recorded_use=when)
            return True

    def describe(self, key: ChunkKey, nbytes: int, facts: HeaderFacts, when: float, changed: Set[ChunkKey]) -> None:
        """Note the facts of a header that was read. A new object counts as last used at time `when`."""
        with self._condition:
            if key in changed:
                return
            held = self._held.get(key) or ObjectState(0, when)
            self._latest = max(self._latest, held.last_used)
            self._nbytes += nbytes - held.nbytes
            self._held[key] = replace(held, nbytes=nbytes, facts=facts)

    def merge(self, found: Mapping[ChunkKey, Object], used: Mapping[ChunkKey, Object], changed: Set[ChunkKey]) -> None:
        """Update the cache with one page of a listing.

        An object of another size than expected was rewritten, so its facts are forgotten.

        Args:
            found: The objects of the page.
            used: The objects that record the latest use of each entry, by any process.
            changed: Keys that were claimed since the listing began; they are skipped.
        """
        with self._condition:
            for key, (nbytes, modified) in found.items():
                held, when = self._held.get(key), used[key].modified if key in used else 0.0
                if key in changed or self._ignored.get(key) == nbytes:
                    continue
                self._latest = max(self._latest, modified, when)
                if held is None or held.nbytes != nbytes:
                    self._nbytes += nbytes - (held.nbytes if held else 0)
                    when = max(modified, when)
                    self._held[key] = ObjectState(nbytes, when, held.hits if held else 0, recorded_use=when)
                elif when > held.recorded_use:
                    self._held[key] = replace(held, last_used=max(held.last_used, when), recorded_use=when)

    def settle(self, missing: Set[ChunkKey], pinned: Set[ChunkKey], changed: Set[ChunkKey]) -> None:
        """Update the cache at the end of a listing.

        Args:
            missing: Keys that were known when the listing of entries began, and that it did not contain.
            pinned: Keys that have a pin in the store.
            changed: Keys that were claimed since the listing began; their state and pins are kept.
        """
        with self._condition:
            for key in missing - changed:
                held = self._held.pop(key, None)
                self._nbytes -= held.nbytes if held else 0
            self._pinned = {key for key in (pinned - changed) | (self._pinned & changed) if key in self._held}
