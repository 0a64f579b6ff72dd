"""Prefetching: read KV from slow tiers into memory in the background, before a question needs it.

Texts are prefetched once a retriever has found them, conversations in the order of waiting
requests. Nothing is encoded here. A question reads or computes any KV that was not prefetched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

from ragfuse.engine.ask import texts_of
from ragfuse.engine.encoder import ids_of
from ragfuse.engine.runtime import Runtime
from ragfuse.plan.tiers import to_prefetch
from ragfuse.process.jobs import BackgroundJobs
from ragfuse.sessions.session_store import Name
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

MAX_WAITING_REQUESTS = 8
"""Maximum queued requests; further ones are dropped."""
MAX_TIER_SHARE = 0.5
"""Share of a fast tier's capacity, without pinned entries, that one request may fill."""


class Prefetcher:
    """Reads entries from slow tiers one at a time, so that they enter the fast ones.

    Requests take turns, entry by entry. No lock is held while a tier is queried or read.

    Args:
        runtime: The model with its encoder, and the store whose tiers are read.

    Attributes:
        jobs: The queued requests.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._store, self._runtime = runtime.store, runtime
        self.jobs = BackgroundJobs("prefetch", MAX_WAITING_REQUESTS)
        self._ahead: Iterator[Entry] | None = None
        self._skipped = set[ChunkKey]()

    def submit(self, texts: Iterable[str]) -> None:
        """Prefetch the KV of these texts. Returns at once."""
        self.submit_keys(self._keys(texts_of(texts)))

    def submit_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Prefetch the entries of these keys, likeliest first. Returns at once."""
        self.jobs.submit(partial(self._read, self._of_keys(keys)))

    def look_ahead(self, waiting: Sequence[Name]) -> None:
        """Prefetch these conversations in order, replacing those of an earlier call."""
        known = map(self._runtime.conversations.keys, waiting)
        groups = (self._store.lookup(keys).values() for keys in known)
        self._ahead = self._fitting(groups)
        self.jobs.submit(partial(self._read, self._ahead, is_ahead=True))

    def skip(self, keys: Iterable[ChunkKey]) -> None:
        """Skip keys that a question is now reading itself."""
        if len(self.jobs):
            self._skipped.update(keys)

    # internal

    def _read(self, entries: Iterator[Entry], is_ahead: bool = False) -> None:
        """Read a request's next entry, then queue the rest behind other requests."""
        if is_ahead and entries is not self._ahead:
            return
        for entry in entries:
            if entry.key not in self._skipped:
                self._store.read_layers(entry.key, 0, entry.n_layers, entry.tier)
                self.jobs.submit(partial(self._read, entries, is_ahead))
                return
        if len(self.jobs) == 1:
            self._skipped.clear()

    def _keys(self, texts: Sequence[str]) -> Iterator[ChunkKey]:
        encoder = self._runtime.encoder
        for text in texts:
            ids = ids_of(text.strip(), encoder.model)
            if len(ids) >= encoder.shortest:
                yield encoder.key(ids, encoder.context)

    def _of_keys(self, keys: Iterable[ChunkKey]) -> Iterator[Entry]:
        """Yield the entries to read; announce them to their tiers, which may read all together."""
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
        """Yield the slow-tier entries of the first groups that fit into the fast tiers.

        Args:
            groups: Single entries, or those of conversations in queue order (AttentionStore 3.3.1).
            share: Share of a fast tier's bytes, without pinned entries, that they may fill,
                counting those already there.
        """
        fast = {tier.name: tier for tier in self._store.tiers if not tier.slow}
        if not fast:
            return
        room = min(
            tier.capacity
            - sum(tier.occupied(entry.nbytes) for entry in tier.list() if entry.pinned)
            for tier in fast.values()
        )

        def nbytes(entry: Entry) -> int:
            return max(tier.occupied(entry.nbytes) for tier in fast.values())

        sized = ((group, sum(map(nbytes, group))) for group in groups)
        for group in to_prefetch(sized, int(share * room)):
            yield from (entry for entry in group if entry.tier not in fast)
