"""Prefetching: read KV from slow tiers into memory in a background thread, before a question needs it.

Texts are prefetched once a retriever has found them; conversations in the order of the requests that wait. Nothing is
encoded here. A question itself reads or computes the KV that was not prefetched.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

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
            self._submit(f"{len(texts)} texts", lambda: self._affordable(self._keys(texts)))

    def submit_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Prefetch the entries of these keys, given with the likeliest first. Returns at once."""
        if given := list(keys):
            self._submit(f"{len(given)} entries", lambda: self._affordable(given))

    def _submit(self, what: str, entries: Callable[[], Iterable[Entry]]) -> None:
        with self._worker.changed:
            if not self._closed:
                self._requests.append(_Request(what, self._store, entries))
                self._start()

    def look_ahead(self, waiting: Sequence[Name]) -> None:
        """Prefetch the KV of these conversations in their order; they replace those of an earlier call."""
        entries = partial(entries_to_prefetch, self._store, self._keys_of, waiting, self._runtime.settings.memory_free)
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

    def _affordable(self, keys: Iterable[ChunkKey]) -> list[Entry]:
        """Return the stored entries in slow tiers for which the fast ones have room, besides those already in them."""
        entries = list(self._store.lookup(keys).values())
        fast = {tier.name: tier for tier in self._store.tiers if not tier.slow}
        there = [entry for entry in entries if entry.tier in fast]
        for tier in fast.values():
            tier.touch([entry.key for entry in there])
        room = min((MAX_TIER_SHARE * _free(tier) for tier in fast.values()), default=0.0)
        room -= sum(_occupied(entry, fast.values()) for entry in there)
        chosen = defaultdict[str, list[Entry]](list)
        for entry in entries:
            nbytes = _occupied(entry, fast.values())
            if entry.tier not in fast and nbytes <= room:
                room -= nbytes
                chosen[entry.tier].append(entry)
        for name, found in chosen.items():
            self._store.expect(name, [entry.key for entry in found], 0, found[0].n_layers)
        return list(chain.from_iterable(chosen.values()))


def entries_to_prefetch(store: KVStore, keys_of: KeysOf, waiting: Sequence[Name], free_share: float) -> Iterator[Entry]:
    """Yield the entries in slow tiers to prefetch for the first waiting conversations (AttentionStore 3.3).

    Args:
        store: The store.
        keys_of: Returns the keys of a conversation's KV.
        waiting: Conversations with waiting requests, in the order of the queue; each is looked up only when reached.
        free_share: Share of each fast tier that stays free. As many conversations are taken as fit in the rest,
            counting their entries that are in fast tiers already.
    """
    fast = {tier.name: tier for tier in store.tiers if not tier.slow}
    found: dict[Hashable, list[Entry]] = {}

    def nbytes(name: Any) -> int | None:
        found[name] = list(store.lookup(keys_of(name)).values())
        return sum(_occupied(entry, fast.values()) for entry in found[name]) or None

    room = min((int(_free(tier) - free_share * tier.capacity) for tier in fast.values()), default=0)
    for name in to_prefetch(waiting, nbytes, (), room):
        yield from (entry for entry in found[name] if entry.tier not in fast)


def _free(tier: Tier) -> int:
    """Return a tier's capacity in bytes without its pinned entries."""
    return tier.capacity - sum(tier.occupied(entry.nbytes) for entry in tier.list() if entry.pinned)


def _occupied(entry: Entry, tiers: Iterable[Tier]) -> int:
    """Return the most bytes that an entry occupies in any of the tiers."""
    return max((tier.occupied(entry.nbytes) for tier in tiers), default=0)
