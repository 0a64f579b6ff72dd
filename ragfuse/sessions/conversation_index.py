"""The conversation index: which conversation each KV entry belongs to, and when it is read next
(AttentionStore 3.3).

Eviction and prefetching use it. It is kept in memory, so that a tier that makes room reads no file.
`plan` has the eviction orders and windows, `session_store.py` the sessions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from math import inf
from types import MappingProxyType

from ragfuse.plan.evict import ConversationEvictor, Evictor, lru, rank_named
from ragfuse.settings import Settings
from ragfuse.types.keys import ChunkKey

Name = tuple[str, str]
"""A conversation: its tenant's digest, and the name of its session."""


class ConversationIndex:
    """The conversations that keys belong to, and the place of each one's next request in the queue.

    Engines whose requests wait in one queue share an index. Thread-safe. A tier may look up a key
    while it holds its own lock: it never waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[Name, tuple[ChunkKey, ...]] = {}
        self._owners: dict[ChunkKey, tuple[Name, ...]] = {}  # the one with the latest turn last
        # by tenant, the place of each session in the queue
        self._waiting: dict[str, dict[str, float]] = {}
        self._places: Mapping[Name, float] = MappingProxyType({})

    # what is known

    def note(self, name: Name, keys: Sequence[ChunkKey]) -> None:
        """Set a conversation's keys; without any it is forgotten."""
        with self._lock:
            for key in self._keys.pop(name, ()):
                others = tuple(owner for owner in self._owners.pop(key, ()) if owner != name)
                if others:
                    self._owners[key] = others
            for key in keys:
                self._owners[key] = (*self._owners.get(key, ()), name)
            if keys:
                self._keys[name] = tuple(keys)

    def keys(self, name: Name) -> tuple[ChunkKey, ...]:
        """Return the keys of a conversation's KV, in order; () where none are known."""
        return self._keys.get(name, ())

    def expect(self, digest: str, waiting: Mapping[str, float]) -> None:
        """Set where a tenant's conversations wait in the queue (session name to place; the next one
        has the lowest).
        """
        with self._lock:
            self._waiting[digest] = dict(waiting)
            self._places = {
                (tenant, name): at
                for tenant, ids in self._waiting.items()
                for name, at in ids.items()
            }

    # what tiers ask

    def evict(self, settings: Settings) -> Evictor:
        """Return the eviction policy that the settings name; it looks up conversations and places
        in this index.
        """
        if settings.evict == "lru":
            return lru
        ttl_s = inf if settings.ttl_s is None else settings.ttl_s
        rank = rank_named(settings.evict)
        return ConversationEvictor(rank, self.conversation_of, self.places, ttl_s, time.time)

    def conversation_of(self, key: ChunkKey) -> Hashable:
        """Return the conversation that a key belongs to; None where none is known.

        Of several that share it, this is the one whose request comes first in the queue, else the
        one with the latest turn.
        """
        owners, places = self._owners.get(key, ()), self._places
        waiting = [name for name in owners if name in places]
        return min(waiting, key=places.__getitem__) if waiting else owners[-1] if owners else None

    def places(self) -> Mapping[Hashable, float]:
        """Return the place in the queue of each waiting conversation."""
        return self._places  # type: ignore[return-value]  # a name is a Hashable
