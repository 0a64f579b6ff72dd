"""Prefix caching: the longest beginning that a prompt shares with an earlier one is read, not computed.

Exact, unlike fused chunks: what enters saw nothing but exact KV of the tokens before itself, and is used at the very
positions that it was computed at. Kept in memory, dropped with everything else there.
Conversations keep what is theirs alone, blended rows too, in `conversing.py`; entries that both have are kept once.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from ragfuse.core import ChunkKey, ChunkKV, LayerKV, Prompt, Segment, token_digest
from ragfuse.encoding import Encoder
from ragfuse.fork import at_fork, is_torn
from ragfuse.plan.controller import is_exact
from ragfuse.settings import LEVELS, Settings
from ragfuse.store import KVStore
from ragfuse.store.radix import RadixTree, Rows
from ragfuse.store.writer import Writers
from ragfuse.tracing import Ready

log = logging.getLogger("ragfuse.engine")

SAVED_S = 5.0
"""Seconds that a prompt waits, at most, for a beginning that it shares and that is being saved."""
MAX_BEFORE = 4096
"""Tokens before a first chunk, at most, for it to be encoded behind them: they are computed again for that."""
SWEEP_NODES = 256
"""Nodes of a tree after which entries that are gone are looked for, and again whenever it has doubled."""


@dataclass
class _Tenant:
    """What is known of one tenant's prompts."""

    tree: RadixTree = field(default_factory=RadixTree)
    sweep_at: int = SWEEP_NODES


class PrefixCache:
    """The beginnings of one engine's prompts. Thread-safe."""

    def __init__(self, settings: Settings, encoder: Callable[[], Encoder], store: KVStore) -> None:
        self._settings, self._encoder, self._store = settings, encoder, store
        self._fast = [tier.name for tier in store.tiers if not tier.slow]
        self._changed = threading.Condition()
        self._tenants = defaultdict[str, _Tenant](_Tenant)
        self._writer = Writers(["prefix"], settings.writer_queue)
        self._waiting, self._waiting_bytes = set[ChunkKey](), 0
        at_fork(self)

    def renew(self) -> None:
        """Nothing is being saved; what was known is known, unless it was being changed."""
        if is_torn(self._changed):
            self._tenants = defaultdict[str, _Tenant](_Tenant)
        self._changed = threading.Condition()
        self._waiting, self._waiting_bytes = set[ChunkKey](), 0

    @property
    def is_on(self) -> bool:
        """Whether there is memory to keep anything in, and it is wanted."""
        return self._settings.prefix_cache and bool(self._fast)

    def placed(self, prompt: Prompt) -> Prompt:
        """The prompt with all that it shares with an earlier one as segments of kind "prefix".

        What is known of its conversation stays as it is, and so does the last token: it is always computed.
        """
        if not self.is_on or not _is_plain(prompt):
            return prompt
        n_past = _n_history(prompt)
        with self._changed:
            tree = self._tenants[self._encoder().digest].tree
            found = [each.cut(n_past, len(prompt) - 1) for each in tree.match(prompt.token_ids) if each.hi > n_past]
            found = [each for each in found if each.hi - each.lo > 0]
            keys = {each.key for each in found}
            self._changed.wait_for(lambda: not keys & self._waiting, SAVED_S)
        there = self._store.lookup(keys, counts=False) if keys else {}
        if gone := keys - set(there):
            with self._changed:
                tree.discard(gone - self._waiting)
        # A conversation's entries may be kept in fewer bits elsewhere: what was read so would not be exact.
        found = [each for each in found if each.key in there and LEVELS[0] in there[each.key].sizes]
        return replace(prompt, segments=tuple(_with(prompt, found))) if found else prompt

    def begin(self, ready: Ready, is_kept: bool) -> None:
        """Save what is exact of a prompt that is prefilled, while its answer is written.

        is_kept: its conversation saves what is new in it; then that entry is used here, too.
        """
        prompt = ready.plan.prompt
        if not self._can_save(ready) or is_kept:
            return
        n_exact = exact_rows(ready)
        parts = list(_parts(ready, n_exact))
        least, runs = self._settings.min_chunk_tokens, _computed(parts, n_exact)
        runs = ((lo, hi) for lo, hi in runs if hi - lo >= least or hi < n_exact)  # a short end waits to grow
        made = [self._entry(prompt.token_ids, lo, hi) for lo, hi in runs]
        self._save(ready, prompt.token_ids, [*parts, *made], made)

    def after(self, ready: Ready, written: Sequence[int], is_kept: bool) -> None:
        """Save the KV of an answer, too, written as these ids behind a prompt that is exact."""
        if is_kept or not self._can_save(ready) or exact_rows(ready) < len(ready.plan.prompt):
            return
        n_prompt, n_rows = len(ready.plan.prompt), ready.n_held(len(written))
        if n_rows - n_prompt >= self._settings.min_chunk_tokens:
            ids = (*ready.plan.prompt.token_ids, *written)[:n_rows]
            made = self._entry(ids, n_prompt, n_rows)
            self._save(ready, ids, [made], [made])

    def lacks(self, ready: Ready) -> tuple[Sequence[int], int]:
        """What an answered prompt begins with, to the end of its first chunk, where that was blended: its ids, and how
        many of them are exact. No ids where nothing is lacking.

        The first chunk stands where nothing but the beginning stands before it, so it can be exact the next time: what
        it costs to blend it is most of what blending costs.
        """
        n_exact, prompt = exact_rows(ready), ready.plan.prompt
        for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True):
            is_first = 0 < lo == n_exact == prompt.first_chunk and segment.kind == "chunk"
            if is_first and lo <= MAX_BEFORE and hi - lo >= self._settings.min_chunk_tokens and self._can_save(ready):
                return prompt.token_ids[:hi], lo
        return (), 0

    def extend(self, token_ids: Sequence[int], n_exact: int) -> None:
        """Encode what follows a beginning that is known, and know it too."""
        encoder, tier = self._encoder(), self._fast[-1]
        before, run = token_ids[:n_exact], token_ids[n_exact:]
        with self._changed:
            known = self._tenants[encoder.digest].tree.match(before)
        if not known or _chained(known)[-1:] != known[-1:] or known[-1].hi < n_exact:
            return  # nothing would lead to it
        key = encoder.key(run, token_digest(before))
        if not self._store.lookup([key], counts=False):
            kv = encoder.model.encode(run, before)
            self._store.put(key, kv, tier=tier, levels={tier: LEVELS[:1]})
        self.note(token_ids, n_exact, key)

    def note(self, token_ids: Sequence[int], lo: int, key: ChunkKey) -> None:
        """Know that tokens from `lo` on are kept under `key`, at positions from 0 on."""
        if self.is_on:
            with self._changed:
                self._insert(token_ids, [Rows(lo, len(token_ids), key, 0, lo)])

    def expect(self, token_ids: Sequence[int], lo: int, key: ChunkKey) -> None:
        """The same of what a conversation is about to keep: a prompt that shares it waits until it is `saved`."""
        if self.is_on:
            with self._changed:
                self._waiting.add(key)
            self.note(token_ids, lo, key)

    def saved(self, keys: Iterable[ChunkKey]) -> None:
        """What was expected is kept now, or will not be."""
        with self._changed:
            self._waiting.difference_update(keys)
            self._changed.notify_all()

    def forget(self, runs: Collection[Sequence[int]]) -> None:
        """Drop all beginnings that hold one of these runs of tokens, from there on."""
        with self._changed:
            tree = self._tenants[self._encoder().digest].tree
            keys = set().union(*map(tree.holding, runs)) if runs else set()
            tree.discard(keys)
            self._changed.wait_for(lambda: not keys & self._waiting, SAVED_S)
        self._store.forget(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was computed is saved; False if that took too long."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Save what waits, or as much of it as `timeout_s` allows, and take no more."""
        self._writer.close(timeout_s)

    def _can_save(self, ready: Ready) -> bool:
        profile = self._encoder().model.profile
        movable = not profile.refusal or profile.fixed
        return self.is_on and movable and ready.prefill.cache is not None and _is_plain(ready.plan.prompt)

    def _entry(self, token_ids: Sequence[int], lo: int, hi: int) -> Rows:
        """Tokens lo:hi as an entry of their own, whose keys stay at the positions that they were computed at."""
        context = token_digest(token_ids[:lo]) if lo else ""
        key = replace(self._encoder().key(token_ids[lo:hi], context), layout=f"at{lo}" if lo else "")
        return Rows(lo, hi, key)

    def _insert(self, token_ids: Sequence[int], parts: Sequence[Rows]) -> None:
        """Under the lock. Parts that do not follow what is known are left out: their beginning is not kept."""
        tenant = self._tenants[self._encoder().digest]
        known = [each for each in tenant.tree.match(token_ids) if each.hi <= min(part.lo for part in parts)]
        chain = _chained([*known, *parts])
        if chain:
            tenant.tree.insert(token_ids, chain)
        if tenant.tree.n_nodes >= tenant.sweep_at:
            there = self._store.lookup(tenant.tree.keys, counts=False)
            tenant.tree.discard(lambda key: key not in there and key not in self._waiting)
            tenant.sweep_at = max(SWEEP_NODES, 2 * tenant.tree.n_nodes)

    def _save(self, ready: Ready, ids: Sequence[int], parts: Sequence[Rows], made: Sequence[Rows]) -> None:
        """Know all parts from now on, and save those that were made of the prompt's rows in the background."""
        kv = ready.prefill.kv
        nbytes = sum(each.hi - each.lo for each in made) * kv.nbytes // max(1, kv.n_tokens)
        with self._changed:
            full = self._waiting_bytes and self._waiting_bytes + nbytes > self._settings.history_buffer_bytes
            if full or not parts:
                return
            self._insert(ids, sorted(parts, key=lambda part: part.lo))
            self._waiting |= {each.key for each in made}
            self._waiting_bytes += nbytes
        if made and self._writer.submit("prefix", partial(self._write, kv, made, nbytes)):
            return
        self._done(made, nbytes)

    def _write(self, kv: ChunkKV, made: Sequence[Rows], nbytes: int) -> None:
        tier = self._fast[-1]
        try:
            for each in made:
                if not self._store.lookup([each.key], counts=False):
                    rows = ChunkKV(tuple(_rows(layer, each.lo, each.hi) for layer in kv.layers))
                    self._store.put(each.key, rows, tier=tier, levels={tier: LEVELS[:1]})
        finally:
            self._done(made, nbytes)

    def _done(self, made: Sequence[Rows], nbytes: int) -> None:
        with self._changed:
            self._waiting -= {each.key for each in made}
            self._waiting_bytes -= nbytes
            self._changed.notify_all()


def exact_rows(ready: Ready) -> int:
    """How many rows a prompt begins with that are full prefill's own: up to the first that is blended or lossy."""
    plan = ready.plan
    lossy = (f.segment for f in plan.fetches if f.level != LEVELS[0] or not is_exact(plan.prompt, f))
    first = min(lossy, default=None)
    return len(plan.prompt) if first is None else plan.prompt.spans[first][0]


def _parts(ready: Ready, n_exact: int) -> Iterator[Rows]:
    """What a prompt read of its exact beginning."""
    prompt = ready.plan.prompt
    for fetch in sorted(ready.plan.fetches, key=lambda fetch: fetch.segment):
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        if hi <= n_exact:
            yield Rows(lo, hi, fetch.key, (segment.rows or (0, 0))[0], segment.turn)


def _computed(parts: Sequence[Rows], n_exact: int) -> Iterator[tuple[int, int]]:
    """Rows of an exact beginning that were not read, as lo:hi."""
    at = 0
    for part in parts:
        if at < part.lo:
            yield at, part.lo
        at = part.hi
    if at < n_exact:
        yield at, n_exact


def _chained(parts: Sequence[Rows]) -> list[Rows]:
    """Parts as far as each follows the one before, from 0 on."""
    chain: list[Rows] = []
    for part in parts:
        if part.lo != (chain[-1].hi if chain else 0):
            break
        chain.append(part)
    return chain


def _rows(layer: LayerKV, lo: int, hi: int) -> LayerKV:
    """A copy of rows that shares nothing with the prompt's."""
    return LayerKV(layer.keys[:, lo:hi].clone(), layer.values[:, lo:hi].clone())


def _is_plain(prompt: Prompt) -> bool:
    """Whether its tokens stand at 0, 1, 2 ... as in any other prompt."""
    return prompt.taken is None and prompt.segments[-1].stop == len(prompt)


def _n_history(prompt: Prompt) -> int:
    """Rows of what it goes on with."""
    placed = zip(prompt.segments, prompt.spans, strict=True)
    return max((hi for segment, (_, hi) in placed if segment.kind == "history"), default=0)


def _with(prompt: Prompt, found: Sequence[Rows]) -> Iterator[Segment]:
    """A prompt's segments with others in place of the tokens that were found."""
    ends = list(accumulate(len(segment.tokens) for segment in prompt.segments))
    at = 0
    for rows in (*found, None):
        lo = rows.lo if rows is not None else len(prompt)
        for index in range(bisect_right(ends, at), len(ends)):
            begin = ends[index] - len(prompt.segments[index].tokens)
            if max(at, begin) >= lo:
                break
            yield _cut(prompt.segments[index], max(at, begin) - begin, min(lo, ends[index]) - begin)
        if rows is None:
            return
        tokens, span = prompt.token_ids[rows.lo : rows.hi], (rows.row, rows.row + rows.hi - rows.lo)
        start = prompt.segments[0].start + rows.lo
        yield Segment(tokens, start, "prefix", (rows.key,), rows=span, origin=rows.origin)
        at = rows.hi


def _cut(segment: Segment, lo: int, hi: int) -> Segment:
    """Tokens lo:hi of a segment."""
    if (lo, hi) == (0, len(segment.tokens)):
        return segment
    first = (segment.rows or (0, 0))[0]
    rows, stored = ((first + lo, first + hi), segment.stored or segment.tokens) if segment.keys else (None, ())
    return replace(segment, tokens=segment.tokens[lo:hi], start=segment.start + lo, rows=rows, stored=stored)
