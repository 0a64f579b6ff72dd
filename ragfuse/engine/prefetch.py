"""Prefetching: read KV from slow tiers into memory in a background thread, before a question needs
it.

Texts are prefetched once a retriever has found them; conversations in the order of the requests
that wait. Nothing is encoded here. A question itself reads or computes the KV that was not
prefetched.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from threading import Lock

from ragfuse.engine.ask import texts_of
from ragfuse.engine.encoder import may_fit
from ragfuse.engine.runtime import Runtime
from ragfuse.plan.tiers import to_prefetch
from ragfuse.process.jobs import BackgroundJobs, close_at_exit
from ragfuse.sessions.session_store import Name
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.engine")

MAX_WAITING_REQUESTS = 8
"""Most requests that may wait; beyond that the oldest is dropped."""
MAX_TIER_SHARE = 0.5
"""Share of a fast tier's bytes, without pinned entries, that one request may fill."""


class Prefetcher:
    """Reads entries from slow tiers so that they enter the fast ones: one at a time, the newest
    request first.

    Conversations are prefetched while no texts wait. No lock is held while a tier is queried or
    read.

    Args:
        runtime: The model with its encoder, and the store whose tiers are read.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._store, self._runtime = runtime.store, runtime
        self._jobs, self._lock = BackgroundJobs("prefetch", limit=1), Lock()
        # looked up in the background, one after the other
        self._ahead: deque[Iterator[Entry]] = deque(maxlen=1)
        self._requests: deque[Iterator[Entry]] = deque(maxlen=MAX_WAITING_REQUESTS)
        self._skipped = set[ChunkKey]()
        close_at_exit(self)

    def submit(self, texts: Iterable[str]) -> None:
        """Prefetch the KV of these texts, before all earlier requests. Returns at once."""
        self.submit_keys(self._keys(texts_of(texts)))

    def submit_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Prefetch the entries of these keys, given with the likeliest first. Returns at once."""
        self._submit(self._requests, self._of_keys(keys))

    def look_ahead(self, waiting: Sequence[Name]) -> None:
        """Prefetch the KV of these conversations in their order; they replace those of an earlier
        call.
        """
        known = map(self._runtime.conversations.keys, waiting)
        groups = (self._store.lookup(keys).values() for keys in known)
        self._submit(self._ahead, self._fitting(groups))

    def skip(self, keys: Iterable[ChunkKey]) -> None:
        """Skip these keys in waiting requests, as a question now reads them by itself."""
        with self._lock:
            if self._requests or self._ahead:
                self._skipped.update(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all requests are done; return False if that takes longer than `timeout_s`
        seconds.
        """
        return self._jobs.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Accept no more requests, drop waiting ones, and wait at most `timeout_s` seconds for the
        current read.
        """
        with self._lock:
            self._ahead.clear()
            self._requests.clear()
        self._jobs.close(timeout_s)

    # inside

    def _submit(self, requests: deque[Iterator[Entry]], entries: Iterator[Entry]) -> None:
        with self._lock:
            requests.append(entries)
        self._jobs.submit(self._read_all)

    def _read_all(self) -> None:
        """Read entry by entry; a request stays in the queue until its last entry is read."""
        while True:
            with self._lock:
                entries = next((each[-1] for each in (self._requests, self._ahead) if each), None)
                if entries is None:
                    self._skipped.clear()
                    return
            entry = None
            try:
                entry = next(entries, None)
                if entry is not None and entry.key not in self._skipped:
                    self._store.read_layers(entry.key, 0, entry.n_layers, entry.tier)
            except Exception as error:
                log.warning(
                    "Prefetching stopped early. Questions load the rest when they need it: %r",
                    error,
                )
                entry = None
            with self._lock:
                for requests in (self._requests, self._ahead):
                    if entry is None and entries in requests:
                        requests.remove(entries)

    def _keys(self, texts: Sequence[str]) -> Iterator[ChunkKey]:
        """Yield the key of each text that fits the model and is long enough to be stored."""
        encoder = self._runtime.encoder
        runs = (
            encoder.model.tokens(text.strip()) for text in texts if may_fit(text, encoder.model)
        )
        yield from (
            encoder.key(ids, encoder.context) for ids in runs if len(ids) >= encoder.shortest
        )

    def _of_keys(self, keys: Iterable[ChunkKey]) -> Iterator[Entry]:
        """Yield the entries of keys to read, and tell their tiers, which may read them all
        at once.
        """
        found = self._store.lookup(keys)
        for fast in (tier for tier in self._store.tiers if not tier.slow):
            fast.touch([entry.key for entry in found.values() if entry.tier == fast.name])
        chosen = list(self._fitting(([entry] for entry in found.values()), MAX_TIER_SHARE))
        for tier in {entry.tier for entry in chosen}:
            self._store.expect(
                tier, [entry.key for entry in chosen if entry.tier == tier], 0, chosen[0].n_layers
            )
        yield from chosen

    def _fitting(self, groups: Iterable[Collection[Entry]], share: float = 1.0) -> Iterator[Entry]:
        """Yield the entries in slow tiers of the first groups that fit together into the fast
        tiers.

        Args:
            groups: Entries alone, or those of conversations in the order of the queue
                (AttentionStore 3.3.1).
            share: Share of a fast tier's bytes, without pinned entries, that they may fill together
                with those that are there already.
        """
        fast = {tier.name: tier for tier in self._store.tiers if not tier.slow}
        if not fast:
            return
        rooms = list[float]()
        for tier in fast.values():
            pinned = sum(tier.occupied(entry.nbytes) for entry in tier.list() if entry.pinned)
            rooms.append(share * (tier.capacity - pinned))

        def sized(group: Collection[Entry]) -> tuple[Collection[Entry], int]:
            return group, sum(
                max(tier.occupied(entry.nbytes) for tier in fast.values()) for entry in group
            )

        for group in to_prefetch(map(sized, groups), int(min(rooms))):
            yield from (entry for entry in group if entry.tier not in fast)
