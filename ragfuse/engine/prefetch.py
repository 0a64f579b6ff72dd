"""Prefetching: read KV from slow tiers into memory in a background thread, before a question needs it.

Texts are prefetched once a retriever has found them; conversations in the order of the requests that wait. Nothing is
encoded here. A question itself reads or computes the KV that was not prefetched.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ragfuse.engine.overflow import may_fit
from ragfuse.engine.question import texts_of
from ragfuse.engine.runtime import Runtime
from ragfuse.plan.look_ahead import to_prefetch
from ragfuse.process.worker import Worker, close_at_exit
from ragfuse.sessions.conversation_index import Name
from ragfuse.store import KVStore, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.engine")

MAX_WAITING_REQUESTS = 8
"""Most requests that may wait; beyond that the oldest is dropped."""
T = TypeVar("T", bound=Hashable)
KeysOf = Callable[[Name], Sequence[ChunkKey]]
MAX_TIER_SHARE = 0.5
"""Share of a fast tier's bytes, without pinned entries, that one request may fill."""


class _Request:
    """One prefetch request.

    Attributes:
        what: A description of what it reads, for the log.
        skipped: Keys that are not read here, as a question reads them by itself.
        steps: Reads one entry per step.
    """

    def __init__(self, what: str, store: KVStore, entries: Callable[[], Iterable[Entry]]) -> None:
        self.what, self._store, self._entries = what, store, entries
        self.skipped = set[ChunkKey]()
        self.steps = self._read()

    def _read(self) -> Iterator[None]:
        for entry in self._entries():
            if entry.key not in self.skipped:
                self._store.read_layers(entry.key, 0, entry.n_layers, entry.tier)
                yield


class Prefetcher:
    """Reads entries from slow tiers so that they enter the fast ones: one at a time, the newest request first.

    Conversations are prefetched while no texts wait. The thread ends once nothing waits. No lock is held while a tier
    is queried or read.

    Args:
        runtime: The model with its encoder, and the store whose tiers are read.
        keys_of: Returns the keys of a conversation's KV.
    """

    def __init__(self, runtime: Runtime, keys_of: KeysOf) -> None:
        self._store, self._runtime, self._keys_of = runtime.store, runtime, keys_of
        self._closed = False
        self._worker = Worker("prefetch", self._take, self._run)
        self._ahead: _Request | None = None
        self._requests: deque[_Request] = deque(maxlen=MAX_WAITING_REQUESTS)
        close_at_exit(self)

    def submit(self, texts: Iterable[str]) -> None:
        """Prefetch the KV of these texts, before all earlier requests. Returns at once."""
        texts = texts_of(texts, "texts")
        if texts:
            self._submit(f"{len(texts)} texts", lambda: self._of_keys(self._keys(texts)))

    def submit_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Prefetch the entries of these keys, given with the likeliest first. Returns at once."""
        if given := list(keys):
            self._submit(f"{len(given)} entries", lambda: self._of_keys(given))

    def _submit(self, what: str, entries: Callable[[], Iterable[Entry]]) -> None:
        with self._worker.changed:
            if not self._closed:
                self._requests.append(_Request(what, self._store, entries))
                self._start()

    def look_ahead(self, waiting: Sequence[Name]) -> None:
        """Prefetch the KV of these conversations in their order; they replace those of an earlier call."""
        entries = partial(self._fitting, waiting, self._of_conversation)
        request = _Request("the conversations of waiting requests", self._store, entries)
        with self._worker.changed:
            self._ahead = request if waiting and not self._closed else None
            if self._ahead is not None:
                self._start()

    def skip(self, keys: Iterable[ChunkKey]) -> None:
        """Skip these keys in waiting requests, as a question now reads them by itself."""
        with self._worker.changed:
            for request in (*self._requests, *([self._ahead] if self._ahead is not None else ())):
                request.skipped.update(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all requests are done; return False if that takes longer than `timeout_s` seconds."""
        return self._worker.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Accept no more requests, drop waiting ones, and wait at most `timeout_s` seconds for the current read."""
        with self._worker.changed:
            self._closed, self._ahead = True, None
            self._requests.clear()
        self.flush(timeout_s)

    # inside

    def _start(self) -> None:
        if not self._worker.start():
            self._requests.clear()
            self._ahead = None

    def _take(self) -> _Request | None:
        """Return the newest request; it stays in the queue until its last step is done."""
        return self._requests[-1] if self._requests else self._ahead

    def _run(self, request: _Request) -> None:
        """Run one step of a request."""
        try:
            for _ in request.steps:
                break
            else:
                self._done(request)
        except Exception as error:
            log.warning(
                "Prefetching %s stopped early. Questions load the rest when they need it: %s", request.what, error
            )
            log.debug("Where it failed", exc_info=True)
            self._done(request)

    def _done(self, request: _Request) -> None:
        with self._worker.changed:
            if request in self._requests:
                self._requests.remove(request)
            if request is self._ahead:
                self._ahead = None

    def _keys(self, texts: Sequence[str]) -> Iterator[ChunkKey]:
        """Yield the key of each text that fits the model and is long enough to be stored."""
        encoder = self._runtime.encoder
        runs = (encoder.model.tokens(text.strip()) for text in texts if may_fit(text, encoder.model))
        yield from (encoder.key(ids, encoder.context) for ids in runs if len(ids) >= encoder.shortest)

    def _of_keys(self, keys: Iterable[ChunkKey]) -> list[Entry]:
        """Return the entries of keys to read, and tell their tiers, which may read them all at once."""
        found = self._store.lookup(keys)
        for fast in (tier for tier in self._store.tiers if not tier.slow):
            fast.touch([entry.key for entry in found.values() if entry.tier == fast.name])
        chosen = list(self._fitting(found, lambda key: [found[key]], MAX_TIER_SHARE))
        for tier in {entry.tier for entry in chosen}:
            self._store.expect(tier, [entry.key for entry in chosen if entry.tier == tier], 0, chosen[0].n_layers)
        return chosen

    def _of_conversation(self, name: Name) -> list[Entry]:
        return list(self._store.lookup(self._keys_of(name)).values())

    def _fitting(
        self, names: Iterable[T], entries_of: Callable[[T], list[Entry]], share: float = 1.0
    ) -> Iterator[Entry]:
        """Yield the entries in slow tiers of the first names whose entries fit together into the fast tiers.

        Args:
            names: Keys, or conversations in the order of the queue (AttentionStore 3.3.1).
            entries_of: Looks up the entries of a name, which is done only when it is reached.
            share: Share of a fast tier's bytes, without pinned entries, that they may fill together with those that are
                there already.
        """
        fast = {tier.name: tier for tier in self._store.tiers if not tier.slow}
        found: dict[Hashable, list[Entry]] = {}

        def nbytes(name: Any) -> int | None:
            found[name] = entries_of(name)
            return sum(max(tier.occupied(entry.nbytes) for tier in fast.values()) for entry in found[name]) or None

        free_share = self._runtime.settings.memory_free
        rooms = (share * _free(tier) - free_share * tier.capacity for tier in fast.values())
        for name in to_prefetch(names, nbytes, (), int(min(rooms, default=0))) if fast else ():
            yield from (entry for entry in found[name] if entry.tier not in fast)


def _free(tier: Tier) -> int:
    """Return a tier's capacity in bytes without its pinned entries."""
    return tier.capacity - sum(tier.occupied(entry.nbytes) for entry in tier.list() if entry.pinned)
