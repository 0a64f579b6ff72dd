"""What an object tier knows of its objects, in memory: sizes, uses, pins, room taken, who is being changed, headers.

Threads share it. No I/O and no clock: what a listing or a header says is told here by `objects.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Condition
from typing import NamedTuple

from ragfuse.process.fork import at_fork
from ragfuse.store.bucket import Object
from ragfuse.store.sizes import within
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


class HeaderFacts(NamedTuple):
    """What only an object's header tells."""

    sizes: Mapping[str, int]
    n_tokens: int
    n_layers: int

    def begin_nbytes(self, count: int) -> int:
        """About how many bytes the first `count` pieces take."""
        wanted = 0
        for nbytes in self.sizes.values():
            wanted += -(-nbytes * max(0, min(count, self.n_layers)) // self.n_layers)
            count -= self.n_layers
        return wanted


@dataclass(frozen=True, slots=True)
class ObjectState:
    """One object: its bytes, last use, hits here, facts once its header was read, and the last use that others know."""

    nbytes: int
    last_used: float
    hits: int = 0
    facts: HeaderFacts | None = None
    told: float = 0.0


class ObjectIndex:
    """Objects by key. A listing takes time, so what is claimed while one is read is believed and the listing is not.

    `nbytes` counts objects and room taken for those being written.
    """

    def __init__(self) -> None:
        self._held: dict[ChunkKey, ObjectState] = {}
        self._pinned: set[ChunkKey] = set()
        self._latest = float("-inf")  # no use is later
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Nothing is claimed or watched, and no room taken for what is being written."""
        self._turn = Condition()
        self._busy: set[ChunkKey] = set()
        self._watches: dict[int, set[ChunkKey]] = {}
        self._strange: dict[ChunkKey, int] = {}  # objects that are not ours though they are called so, and their bytes
        self._nbytes = sum(held.nbytes for held in self._held.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all objects and of what is being written."""
        return self._nbytes

    def get(self, key: ChunkKey) -> ObjectState | None:
        """What is known of one object, None if nothing is."""
        return self._held.get(key)

    def entry(self, key: ChunkKey, tier: str) -> Entry | None:
        """The entry of an object whose facts are known."""
        with self._turn:
            held = self._held.get(key)
            if held is None or held.facts is None:
                return None
            encoded, n_tokens, n_layers = held.facts
            sizes = within(encoded, held.nbytes)
            return Entry(key, tier, n_tokens, n_layers, sizes, held.last_used, held.hits, key in self._pinned)

    def oldest(self) -> list[ChunkKey]:
        """All keys, least recently used first."""
        with self._turn:
            known = list(self._held.items())
        known.sort(key=lambda item: item[1].last_used)
        return [key for key, _ in known]

    def settle_uses(self, now: float) -> None:
        """Take uses beyond now for uses now: a clock ran ahead, here or where an object was written."""
        if now >= self._latest:
            return
        with self._turn:
            self._latest = now
            ahead = [(key, held) for key, held in self._held.items() if held.last_used > now]
            self._held |= {key: replace(held, last_used=now) for key, held in ahead}

    def keys(self) -> set[ChunkKey]:
        """All keys."""
        with self._turn:
            return set(self._held)

    def is_busy(self, key: ChunkKey) -> bool:
        """Whether somebody has claimed it."""
        return key in self._busy

    def is_pinned(self, key: ChunkKey) -> bool:
        """Whether it is protected."""
        return key in self._pinned

    # changing

    @contextmanager
    def claim(
        self, keys: Iterable[ChunkKey], *, wait: bool = True, unless: Set[ChunkKey] = frozenset()
    ) -> Iterator[set[ChunkKey]]:
        """Those of `keys` that this thread alone may change in the block; not those in `unless`.

        Without `wait`, those that another has claimed are left out.
        """
        wanted = set(keys)
        with self._turn:
            if wait:
                self._turn.wait_for(lambda: self._busy.isdisjoint(wanted - unless))
            mine = wanted - self._busy - unless
            self._busy |= mine
            for changed in self._watches.values():
                changed |= mine
        try:
            yield mine
        finally:
            with self._turn:
                self._busy -= mine
                self._turn.notify_all()

    @contextmanager
    def watch(self) -> Iterator[Set[ChunkKey]]:
        """The keys that are claimed at any time in the block: what is read of them outside may be old."""
        with self._turn:
            changed = set(self._busy)
            self._watches[id(changed)] = changed
        try:
            yield changed
        finally:
            with self._turn:
                del self._watches[id(changed)]

    def reserve(self, nbytes: int, capacity: int) -> int:
        """Take room; how many bytes too few there are, and nothing is taken, if there is not enough."""
        with self._turn:
            excess = self._nbytes + nbytes - capacity
            if excess <= 0:
                self._nbytes += nbytes
            return max(0, excess)

    def release(self, nbytes: int) -> None:
        """Give room back."""
        with self._turn:
            self._nbytes -= nbytes

    def put(self, key: ChunkKey, held: ObjectState) -> None:
        """A claimed key was written, in the room taken for it. Hits of an earlier object stay."""
        with self._turn:
            self._strange.pop(key, None)
            old = self._held.pop(key, None)
            self._nbytes -= old.nbytes if old else 0
            self._held[key] = replace(held, hits=old.hits if old else 0)
            self._latest = max(self._latest, held.last_used)

    def forget(self, keys: Iterable[ChunkKey], unless: Set[ChunkKey] = frozenset()) -> int:
        """These objects are gone, with their pins; how many were known."""
        with self._turn:
            known = [key for key in set(keys) - unless if key in self._held]
            for key in known:
                self._nbytes -= self._held.pop(key).nbytes
                self._pinned.discard(key)
            return len(known)

    def leave(self, key: ChunkKey) -> None:
        """This object is somebody else's: as long as it has as many bytes, a listing tells of nothing here."""
        with self._turn:
            held = self._held.pop(key, None)
            if held is not None:
                self._nbytes -= held.nbytes
                self._strange[key] = held.nbytes

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect objects, or stop doing so."""
        with self._turn:
            self._pinned = self._pinned | set(keys) if pinned else self._pinned - set(keys)

    # learning

    def use(self, key: ChunkKey, when: float, *, hit: bool) -> None:
        """An object was read."""
        with self._turn:
            held = self._held.get(key)
            if held is not None:
                self._held[key] = replace(held, last_used=when, hits=held.hits + hit)
                self._latest = max(self._latest, when)

    def tell(self, key: ChunkKey, when: float, every_s: float) -> bool:
        """Whether others are to hear of this use, who heard of none for so long; from now on they have."""
        with self._turn:
            held = self._held.get(key)
            if held is None or 0 <= when - held.told < every_s:
                return False
            self._held[key] = replace(held, told=when)
            return True

    def describe(self, key: ChunkKey, nbytes: int, facts: HeaderFacts, when: float, changed: Set[ChunkKey]) -> None:
        """A header was read: `when` counts as the last use of an object that nothing was known of."""
        with self._turn:
            if key in changed:
                return
            held = self._held.get(key) or ObjectState(0, when)
            self._latest = max(self._latest, held.last_used)
            self._nbytes += nbytes - held.nbytes
            self._held[key] = replace(held, nbytes=nbytes, facts=facts)

    def merge(self, found: Mapping[ChunkKey, Object], used: Mapping[ChunkKey, Object], changed: Set[ChunkKey]) -> None:
        """A page of a listing was read, while `changed` were claimed; others have `used` entries at these times."""
        with self._turn:
            for key, (nbytes, modified) in found.items():
                held, when = self._held.get(key), used[key].modified if key in used else 0.0
                if key in changed or self._strange.get(key) == nbytes:
                    continue
                self._latest = max(self._latest, modified, when)
                if held is None or held.nbytes != nbytes:
                    self._nbytes += nbytes - (held.nbytes if held else 0)
                    when = max(modified, when)
                    self._held[key] = ObjectState(nbytes, when, held.hits if held else 0, told=when)
                elif when > held.told:
                    self._held[key] = replace(held, last_used=max(held.last_used, when), told=when)

    def settle(self, missing: Set[ChunkKey], pinned: Set[ChunkKey], changed: Set[ChunkKey]) -> None:
        """A listing was read to its end, without `missing`, while `changed` were claimed."""
        with self._turn:
            for key in missing - changed:
                held = self._held.pop(key, None)
                self._nbytes -= held.nbytes if held else 0
            self._pinned = {key for key in (pinned - changed) | (self._pinned & changed) if key in self._held}
