"""The sessions of a store, and an index from KV keys to conversations.

Sessions are stored in the store's catalog. If a turn cannot be written to the catalog, only this
process has the turn until the next turn is written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from ragfuse.errors import InputError, NoSessionError, StoreError
from ragfuse.plan.evict import ConversationEvictor, Evictor, lru, rank_named
from ragfuse.process.jobs import BackgroundJobs
from ragfuse.sessions.session import Session
from ragfuse.settings import Settings
from ragfuse.store import KVStore, SessionInfo
from ragfuse.store.deletion import unanswered
from ragfuse.types.keys import ChunkKey

if TYPE_CHECKING:
    from ragfuse.store.catalog import Catalog


Name = tuple[str, str]
"""The full name of a conversation: (tenant digest, session name)."""


class ConversationIndex:
    """An index from KV keys to conversations, with the queue positions of waiting conversations.

    Thread-safe. Engines that share a request queue share an index. Queries never block, so a tier
    may query the index while it holds its own lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[Name, tuple[ChunkKey, ...]] = {}
        # the conversation with the latest turn is last
        self._owners: dict[ChunkKey, tuple[Name, ...]] = {}
        # by tenant, the queue position of each session
        self._waiting: dict[str, dict[str, float]] = {}
        self._places: Mapping[Name, float] = MappingProxyType({})

    # updates

    def note(self, name: Name, keys: Sequence[ChunkKey]) -> None:
        """Set the keys of a conversation's KV. If `keys` is empty, remove the conversation."""
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
        """Return the keys of a conversation's KV, in order; () if the conversation is unknown."""
        return self._keys.get(name, ())

    def expect(self, digest: str, waiting: Mapping[str, float]) -> None:
        """Set the queue positions of a tenant's waiting sessions. The lowest position is next."""
        with self._lock:
            self._waiting[digest] = dict(waiting)
            self._places = {
                (tenant, name): at
                for tenant, ids in self._waiting.items()
                for name, at in ids.items()
            }

    # queries by tiers

    def evict(self, settings: Settings) -> Evictor:
        """Return the evictor for the policy in `settings`; all except `lru` query this index."""
        if settings.evict == "lru":
            return lru
        ttl_s = inf if settings.ttl_s is None else settings.ttl_s
        rank = rank_named(settings.evict)
        return ConversationEvictor(rank, self.conversation_of, self.places, ttl_s, time.time)

    def conversation_of(self, key: ChunkKey) -> Hashable:
        """Return the conversation that uses a key; None if no known conversation uses the key.

        If several conversations share the key, return the conversation that is next in the queue.
        If no conversation is in the queue, return the conversation with the latest turn.
        """
        owners, places = self._owners.get(key, ()), self._places
        waiting = [name for name in owners if name in places]
        return min(waiting, key=places.__getitem__) if waiting else owners[-1] if owners else None

    def places(self) -> Mapping[Hashable, float]:
        """Return the queue position of each waiting conversation."""
        return self._places  # type: ignore[return-value]  # a name is a Hashable


log = logging.getLogger("ragfuse.engine")

MAX_IN_MEMORY = 256
"""Maximum number of sessions in memory; the least recently used session is dropped first."""


@dataclass(frozen=True)
class Deleted:
    """The result of deleting sessions.

    Args:
        sessions: Number of sessions deleted.
        entries: Number of KV entries deleted.
        nbytes: Bytes of the deleted entries.
        silent: Names of tiers that did not respond and may still contain the entries.
    """

    sessions: int = 0
    entries: int = 0
    nbytes: int = 0
    silent: tuple[str, ...] = ()


class SessionStore:
    """The sessions of a store. Safe for threads and processes.

    Args:
        store: The store of the sessions' KV.
        catalog: The catalog of persistent sessions.
        tenants: Returns the digests of the tenants whose sessions are listed. None means all.
        ttl_s: Seconds without use until a session expires; None means never. From time to time,
            saving a session also deletes expired sessions.
        saves: The queue of pending saves, which is flushed before a deletion. None means no queue.
        index: The index that receives the keys of all sessions, including sessions of earlier
            processes. None means a private index, which lacks the sessions of earlier processes.
    """

    def __init__(
        self,
        store: KVStore,
        catalog: Catalog,
        tenants: Callable[[], Sequence[str] | None],
        ttl_s: float | None = None,
        saves: BackgroundJobs | None = None,
        index: ConversationIndex | None = None,
    ) -> None:
        self._store, self._catalog, self._tenants, self._ttl_s = store, catalog, tenants, ttl_s
        self._lock, self._saves, self._clock = threading.Lock(), saves, time.time
        # sessions of version 0 are not in the catalog
        self._in_memory: LRUCache[Name, tuple[SessionInfo, Session]] = LRUCache(MAX_IN_MEMORY)
        self._swept, self._index = 0.0, index or ConversationIndex()
        known = defaultdict[Name, list[ChunkKey]](list)
        for model, id, key in catalog.owned() if index is not None else ():
            known[model, id].append(ChunkKey.parse(key))
        for name, keys in known.items():
            self._index.note(name, keys)

    # public

    def ls(self) -> list[SessionInfo]:
        """Return the sessions of the tenants that `tenants` returns, most recently used first."""
        tenants = self._tenants()
        return [info for info in self._all() if tenants is None or info.model in tenants]

    def show(self, id: str) -> Session:
        """Return the session called `id`.

        Raises:
            InputError: The session does not exist or cannot be read, or several models or tenants
                have a session of that name.
        """
        info = self._one(id)
        found = self.get(info.model, id)
        if found is None:
            raise InputError(
                f"Session '{id}' has expired or is damaged. Delete the session if it still exists."
            )
        return found[1]

    def export(self, id: str) -> dict[str, Any]:
        """Return a session in plain JSON types, with its messages in OpenAI's form.

        Raises:
            InputError: As in `show`.
        """
        info, session = self._one(id), self.show(id)
        messages = [{"role": message.role, "content": message.text} for message in session.messages]
        return {"model": info.model, "used": info.used, "messages": messages, **session.as_dict()}

    def delete(self, *ids: str) -> Deleted:
        """Delete sessions and, in every tier, the KV entries that no other session uses.

        Raises:
            InputError: A session does not exist, or several models or tenants have a session of
                that name. Nothing is deleted.
            StoreError: The catalog is not accessible.
        """
        found = [self._one(id) for id in dict.fromkeys(ids)]
        self._settle()
        done = self._delete(found)
        if done.silent:
            log.warning(unanswered(done.silent, "KV of deleted sessions may still be stored there"))
        return done

    def keep_latest(self, count: int) -> Deleted:
        """Delete the persistent sessions except the `count` most recently used ones."""
        self._settle()
        return self._delete([info for info in self.ls() if info.persistent][count:])

    # for `engine/build.py`

    def get(self, model: str, id: str) -> tuple[int, Session] | None:
        """Return (version, session) of a tenant's session; None if there is no such session.

        An expired session is deleted, and None is returned.
        """
        name = model, id
        with self._lock:
            held = self._in_memory.get(name)
        held = self._current(name, held)
        if held is None:
            return None
        info, session = held
        if self._ttl_s is not None and info.used < self._clock() - self._ttl_s:
            with _unless_silent("The overdue session stays for now"):
                self._delete([info])
            return None
        return info.version, session

    def _current(
        self, name: Name, held: tuple[SessionInfo, Session] | None
    ) -> tuple[SessionInfo, Session] | None:
        """Return the catalog's session, or `held` if the catalog fails or has the same version.

        If two processes continue a session, the process that writes first wins.
        """
        answered, found = self._catalog.tried(lambda file: file.session(*name))
        version, used, state = found or (0, 0.0, {})
        if held is not None and (not answered or held[0].version == version):
            return held
        if found is None:
            return None
        return self._keep(name, Session.from_dict(state) or Session(name[1]), version, used)

    def put(self, model: str, session: Session, version: int) -> bool:
        """Save a session in place of its stored version `version`; 0 means a new session.

        If another writer replaced that version first, save nothing and return False. A session that
        cannot be written to the catalog stays in memory, and is written with the next turn.
        """
        now, name = self._clock(), (model, session.id)
        keys = [str(key) for key in session.keys]
        is_written = self._catalog.put_session(
            _info(name, session, version, now), session.as_dict(), keys
        )
        with self._lock:
            held = self._in_memory.get(name)
        if is_written is False or (
            is_written is None and version != (held[0].version if held is not None else 0)
        ):
            return False
        self._keep(name, session, version + (is_written is True), now)
        if self._ttl_s is not None and not 0 <= now - self._swept <= self._ttl_s / 8:
            self._swept = now
            self._later(partial(self._sweep, self._ttl_s))
        return True

    def _keep(
        self, name: Name, session: Session, version: int, used: float
    ) -> tuple[SessionInfo, Session]:
        kept = _info(name, session, version, used), session
        with self._lock:
            self._in_memory[name] = kept
        self._index.note(name, session.keys)
        return kept

    def release(self, keys: set[ChunkKey]) -> None:
        """Delete the KV of those `keys` that no session uses, once all pending saves are done.

        If the catalog fails, nothing is deleted.
        """

        def drop() -> None:
            with _unless_silent("KV that sessions may use stays"):
                self._store.forget(self._unused(keys))

        self._later(drop)

    # internal

    def _settle(self) -> None:
        if self._saves is not None:
            self._saves.flush()

    def _later(self, job: Callable[[], object]) -> None:
        if self._saves is None:
            job()
        else:
            self._saves.submit(job, is_awaited=True)

    def _sweep(self, ttl_s: float) -> None:
        with _unless_silent("Overdue sessions stay for now"):
            self._delete(self.ls(), self._clock() - ttl_s)

    def _all(self) -> list[SessionInfo]:
        """Return the sessions of all tenants, most recently used first."""
        rows = self._catalog.strict.sessions()
        with self._lock:
            alone = [
                replace(info, persistent=False)
                for info, _ in self._in_memory.values()
                if not info.version
            ]
        return sorted((*rows, *alone), key=lambda info: -info.used)

    def _one(self, id: str) -> SessionInfo:
        found = [info for info in self.ls() if info.id == id]
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(
                f"{len(found)} models or tenants have a session '{id}'. To choose a tenant, set"
                " RAGFUSE_SALT. To choose model and tenant, use Engine.sessions in Python."
            )
        raise NoSessionError(f"There is no session '{id}'.", "`ragfuse sessions ls` lists them.")

    def _delete(self, sessions: Iterable[SessionInfo], before: float = inf) -> Deleted:
        """Delete sessions last used before `before`, and the KV that no other session uses."""
        keys, count = set[ChunkKey](), 0
        for name in ((info.model, info.id) for info in sessions if info.used < before):
            with self._lock:
                held = self._in_memory.get(name)
                if held is not None and held[0].used >= before:
                    held = None
                elif held is not None:
                    del self._in_memory[name]
            written = self._catalog.strict.delete_session(*name, before)
            if held is None and written is None:
                continue
            self._index.note(name, ())
            keys.update(
                map(ChunkKey.parse, written or ()), held[1].keys if held is not None else ()
            )
            count += 1
        done = self._store.forget(self._unused(keys))
        return Deleted(count, len(done.entries), done.nbytes, tuple(done.silent))

    def _unused(self, keys: set[ChunkKey]) -> set[ChunkKey]:
        """Return the keys that no session uses and that are not protected. May raise StoreError."""
        with self._lock:
            held = self._in_memory.values()
            alone = (session.keys for info, session in held if not info.version)
            unused = keys.difference(*alone)
        found = self._catalog.strict.in_use([str(key) for key in unused])
        return unused - {ChunkKey.parse(name) for name in found}


def _info(name: Name, session: Session, version: int, used: float) -> SessionInfo:
    return SessionInfo(*name, version, used, len(session.turns), session.n_tokens)


@contextmanager
def _unless_silent(what_stays: str) -> Iterator[None]:
    """Log a StoreError of the catalog instead of raising it."""
    try:
        yield
    except StoreError as error:
        log.debug("%s: %s", what_stays, error)
