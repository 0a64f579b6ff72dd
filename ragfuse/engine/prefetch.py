"""What a retriever has found is brought to memory while the prompt is still being made, in a thread.

What conversations read that wait for their turn comes in the order of the queue. Nothing is encoded here, and what is
not there is no loss: a question reads it for itself, or computes it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from ragfuse.engine.context_window import may_fit
from ragfuse.engine.runtime import Runtime
from ragfuse.plan.look_ahead import to_prefetch
from ragfuse.process.fork import at_fork
from ragfuse.process.worker import Worker, close_at_exit
from ragfuse.sessions.conversation_index import Name
from ragfuse.store import KVStore, Tier
from ragfuse.store.tier import Touches
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.engine")

MAX_WAITING_REQUESTS = 8
"""Wishes that may wait; of more, the oldest is dropped."""
KeysOf = Callable[[Name], Sequence[ChunkKey]]
MAX_TIER_SHARE = 0.5
"""Share of a fast tier, without what is pinned there, that one wish may fill."""


class _Wish:
    """What to bring, in words and step by step. left: keys that a question reads for itself by now."""

    def __init__(self, what: str, bring: Callable[[_Wish], Iterator[None]]) -> None:
        self.what, self.left = what, set[ChunkKey]()
        self.steps = bring(self)


class Prefetcher:
    """Reads what slow tiers hold of texts, so that it enters the fast ones; one entry at a time, newest wish first.

    Conversations come when no text is wished for. keys_of: a conversation's KV. free_share: of each fast tier, which
    they leave free.
    The thread lives while something waits. No lock is held while a tier is asked or read.
    """

    def __init__(self, store: KVStore, runtime: Runtime, keys_of: KeysOf, free_share: float) -> None:
        self._store, self._runtime = store, runtime
        self._keys_of, self._free_share = keys_of, free_share
        self._closed = False
        self._worker = Worker("prefetch", self._take, self._run)
        self.renew()
        at_fork(self)
        close_at_exit(self)

    def renew(self) -> None:
        """Nothing is wished for."""
        self._ahead: _Wish | None = None
        self._wishes: deque[_Wish] = deque(maxlen=MAX_WAITING_REQUESTS)

    def submit(self, texts: Iterable[str]) -> None:
        """Bring these some time soon, before all that waits."""
        texts = (texts,) if isinstance(texts, str) else tuple(texts)
        if texts:
            self._wish(f"{len(texts)} texts", lambda: self._wanted(texts))

    def submit_keys(self, keys: Iterable[ChunkKey]) -> None:
        """The same for entries under these keys, likeliest first."""
        if wanted := [(key,) for key in keys]:
            self._wish(f"{len(wanted)} entries", lambda: wanted)

    def _wish(self, what: str, wanted: Callable[[], Iterable[tuple[ChunkKey, ...]]]) -> None:
        wish = _Wish(what, lambda wish: self._bring(wish, wanted()))
        with self._worker.changed:
            if self._closed:
                return
            self._wishes.append(wish)
            self._start()

    def look_ahead(self, waiting: Sequence[Name]) -> None:
        """Bring the KV of these conversations in their order, in place of those that were told before."""
        wish = _Wish("conversations that wait", lambda wish: self._bring_talks(wish, waiting))
        with self._worker.changed:
            self._ahead = wish if waiting and not self._closed else None
            if self._ahead is not None:
                self._start()

    def leave(self, keys: Iterable[ChunkKey]) -> None:
        """A question reads these for itself now: nobody is helped by a second read."""
        with self._worker.changed:
            for wish in (*self._wishes, *([self._ahead] if self._ahead is not None else ())):
                wish.left.update(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits; False if that took too long."""
        return self._worker.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Take no more, drop what waits, and wait for the read at hand, for `timeout_s` at most."""
        with self._worker.changed:
            self._closed, self._ahead = True, None
            self._wishes.clear()
        self.flush(timeout_s)

    # inside

    def _start(self) -> None:
        if not self._worker.start():
            self._wishes.clear()
            self._ahead = None

    def _take(self) -> _Wish | None:
        """The newest wish, which stays in the queue until its last step is done."""
        return self._wishes[-1] if self._wishes else self._ahead

    def _run(self, wish: _Wish) -> None:
        """One step of a wish."""
        try:
            for _ in wish.steps:
                break
            else:
                self._done(wish)
        except Exception as error:
            log.warning("Of %s nothing more is prefetched: %s", wish.what, error)
            log.debug("Where it failed", exc_info=True)
            self._done(wish)

    def _done(self, wish: _Wish) -> None:
        with self._worker.changed:
            if wish in self._wishes:
                self._wishes.remove(wish)
            if wish is self._ahead:
                self._ahead = None

    def _bring_talks(self, wish: _Wish, waiting: Sequence[Name]) -> Iterator[None]:
        """Read what waits in slow tiers for the first of these conversations, one entry a step."""
        for entry in to_bring(self._store, self._keys_of, waiting, self._free_share):
            if entry.key not in wish.left:
                self._store.read_layers(entry.key, 0, entry.n_layers, entry.tier)
                yield

    def _bring(self, wish: _Wish, wanted: Iterable[tuple[ChunkKey, ...]]) -> Iterator[None]:
        """Read the entries under these keys, the first that is there of each, one a step."""
        entries = self._affordable(self._found(list(wanted)))
        for tier in {entry.tier for entry in entries}:
            there = [entry for entry in entries if entry.tier == tier]
            self._store.expect(tier, [entry.key for entry in there], 0, there[0].n_layers)
        yield
        for entry in entries:
            if entry.key not in wish.left:
                self._store.read_layers(entry.key, 0, entry.n_layers, entry.tier)
                yield

    def _found(self, wanted: Sequence[tuple[ChunkKey, ...]]) -> list[Entry]:
        """What the store has under the keys that the next prompt will look for, likeliest first."""
        found = self._store.lookup((key for keys in wanted for key in keys), counts=False)
        best = (next((found[key] for key in keys if key in found), None) for keys in wanted)
        return list({entry.key: entry for entry in best if entry is not None}.values())

    def _wanted(self, texts: Sequence[str]) -> Iterator[tuple[ChunkKey, ...]]:
        """For each run that a prompt may hold, its key."""
        encoder = self._runtime.encoder
        runs = (encoder.model.tokens(text.strip()) for text in texts if may_fit(text, encoder.model))
        yield from ((encoder.key(ids, encoder.context),) for ids in runs if len(ids) >= encoder.shortest)

    def _affordable(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that lie in slow tiers, as many as fit beside those that are in fast ones and stay there."""
        fast = {tier.name: tier for tier in self._store.tiers if not tier.slow}
        there = [entry for entry in entries if entry.tier in fast]
        for tier in fast.values():
            if isinstance(tier, Touches):
                tier.touch([entry.key for entry in there])
        room = min((MAX_TIER_SHARE * _free(tier) for tier in fast.values()), default=0.0) - sum(e.nbytes for e in there)
        taken = []
        for entry in entries:
            if entry.tier not in fast and entry.nbytes <= room:
                room -= entry.nbytes
                taken.append(entry)
        return taken


def to_bring(store: KVStore, keys_of: KeysOf, waiting: Sequence[Name], free_share: float) -> Iterator[Entry]:
    """Entries of slow tiers that the first of these conversations will read, as many as the fast ones have room for
    beside what of the same lies there; in the conversations' order, each looked for when it is asked for."""
    fast = {tier.name: tier for tier in store.tiers if not tier.slow}
    found: dict[Hashable, list[Entry]] = {}

    def nbytes(name: Any) -> int | None:
        found[name] = list(store.lookup(keys_of(name), counts=False).values())
        return sum(entry.nbytes for entry in found[name]) or None

    room = min((int(_free(tier) - free_share * tier.capacity) for tier in fast.values()), default=0)
    for name in to_prefetch(waiting, nbytes, (), room):
        yield from (entry for entry in found[name] if entry.tier not in fast)


def _free(tier: Tier) -> int:
    """What a tier could hold beside what is pinned."""
    return tier.capacity - sum(entry.nbytes for entry in tier.entries().values() if entry.pinned)
