"""Whose KV is whose, and who reads it next: what an engine's own tiers go by when they drop something, and what is
brought to memory for requests that wait (AttentionStore 3.3).

Known by heart, so that a tier that makes room asks no file. Orders and windows are `plan`'s; sessions are
`sessions.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType

from ragfuse.plan.evict import Evict, evictor, lru
from ragfuse.process.fork import ForkLock
from ragfuse.sessions.session import Session
from ragfuse.settings import Settings
from ragfuse.types.keys import ChunkKey

Name = tuple[str, str]
"""A conversation: its tenant's digest, and the name of its session."""
Known = Iterable[tuple[Name, ChunkKey]]


class ConversationIndex:
    """The conversations that keys belong to, and where in the queue each one's next request waits.

    One for all engines whose requests wait in one queue. Thread-safe; what a tier asks under its own lock waits for
    none but, once, the catalog's.
    """

    def __init__(self) -> None:
        self._lock = ForkLock(self._start_over)
        self._recalled: list[Callable[[], Known | None]] = []
        self._start_over()

    def _start_over(self) -> None:
        """Know nothing but whom to ask."""
        self._keys: dict[Name, tuple[ChunkKey, ...]] = {}
        self._owners: dict[ChunkKey, tuple[Name, ...]] = {}  # the one that had the last turn at the end
        self._told: dict[str, dict[str, float]] = {}
        self._places: Mapping[Name, float] = MappingProxyType({})
        self._unread = list(self._recalled)

    # what is known

    def note(self, name: Name, session: Session) -> None:
        """The KV of a conversation as it is now: of all that a prompt of it still has."""
        self._note(name, tuple(dict.fromkeys(each.key for each in session.stretches if each.n_kept)))

    def forget(self, name: Name) -> None:
        """There is no such conversation any more."""
        self._note(name, ())

    def recall(self, known: Callable[[], Known | None]) -> None:
        """What was noted in earlier processes, asked for when it is first needed; None: it cannot be said now."""
        with self._lock:
            self._recalled.append(known)
            self._unread.append(known)

    def keys(self, name: Name) -> tuple[ChunkKey, ...]:
        """Of a conversation's KV, in its order; () where none is known."""
        return self._keys.get(name, ())

    def expect(self, digest: str, waiting: Mapping[str, float]) -> None:
        """Where this tenant's conversations wait, in place of what was told before; the first has the least number."""
        with self._lock:
            self._told[digest] = dict(waiting)
            self._places = {(whose, name): at for whose, told in self._told.items() for name, at in told.items()}

    # what tiers ask

    def evict(self, settings: Settings) -> Evict:
        """The policy that the settings name, by what is known here."""
        if settings.evict == "lru":
            return lru
        return evictor(settings.evict, self.conversation_of, self.places)

    def conversation_of(self, key: ChunkKey) -> Hashable:
        """Whose KV this is; of several that begin alike the one that is read first, else the one that had the last
        turn."""
        if self._unread:
            self._read()
        owners, places = self._owners.get(key, ()), self._places
        waiting = [name for name in owners if name in places]
        return min(waiting, key=places.__getitem__) if waiting else owners[-1] if owners else None

    def places(self) -> Mapping[Hashable, float]:
        """Where each conversation waits."""
        return self._places  # type: ignore[return-value]  # a name is a Hashable

    # inside

    def _note(self, name: Name, keys: tuple[ChunkKey, ...]) -> None:
        with self._lock:
            for key in self._keys.pop(name, ()):
                left = tuple(owner for owner in self._owners.pop(key, ()) if owner != name)
                if left:
                    self._owners[key] = left
            for key in keys:
                self._owners[key] = (*self._owners.get(key, ()), name)
            if keys:
                self._keys[name] = keys

    def _read(self) -> None:
        with self._lock:
            unread, self._unread = self._unread, []
        found: dict[Name, list[ChunkKey]] = {}
        for known in unread:
            told = known()
            if told is None:
                with self._lock:
                    self._unread.append(known)
            for name, key in told or ():
                found.setdefault(name, []).append(key)
        for name, keys in found.items():
            if name not in self._keys:  # what is known since then is right
                self._note(name, tuple(keys))
